"""What is known of each device, across runs: an append-only file of JSON lines, one entry a line, never rewritten.

Role: the memory that no run has. Each line carries its version and a checksum, and is written in one call under a lock
of the file; so a line that was cut short, damaged, or written by a later version costs itself and nothing else, and is
counted. A diary that cannot be read or written never holds up a run. No torch.
"""

from __future__ import annotations

import fcntl
import os
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, get_args

import msgspec

from outlast.errors import ConfigError, EnvironmentFault, nearest

__all__ = ["Diary", "DiaryEntry", "EntryKind", "default_diary"]

VERSION = 1
EntryKind = Literal["failure", "finding", "test", "repair", "hours", "note", "retired", "returned", "learned", "alarm"]
_LONGEST = 16 * 1024  # bytes of a line


class DiaryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One thing about one device. `device`: its serial number or UUID, else host and slot. `run`: whose journal it is
    from, "" for none. `hours`: how long it worked, of `kind` hours; until the failure, of an alarm that came true.
    `passed`: of a test, or of an alarm that was false; None of one that work was moved away from."""

    at_s: float
    device: str
    kind: EntryKind
    text: str = ""
    host: str = ""
    run: str = ""
    hours: float = 0.0
    passed: bool | None = None


class _Line(msgspec.Struct, kw_only=True):
    """As it is in the file. `sum`: CRC-32 of the entry's JSON."""

    v: int
    sum: int
    entry: msgspec.Raw


class _Version(msgspec.Struct):
    v: int


def default_diary(environ: dict[str, str] | None = None) -> Path:
    """OUTLAST_DIARY, or outlast/diary.jsonl under $XDG_STATE_HOME (~/.local/state)."""
    environ = dict(os.environ) if environ is None else environ
    if named := environ.get("OUTLAST_DIARY"):
        return Path(named)
    return Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "outlast" / "diary.jsonl"


class Diary:
    """Keeps what is known of each device, line by line in a file. `skipped`: lines that could not be used when it was
    last read, by reason."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped: dict[str, int] = {}

    def entries(self) -> list[DiaryEntry]:
        """All entries, in the order in which they were written. EnvironmentFault if the file cannot be read; an absent
        one is empty."""
        self.skipped = {}
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise EnvironmentFault(
                f"the diary {self.path} cannot be read: {error.strerror}", remedy="OUTLAST_DIARY names another file"
            ) from error
        return list(self._decoded(data))

    def _decoded(self, data: bytes) -> Iterator[DiaryEntry]:
        whole = data.endswith(b"\n")
        lines = data.split(b"\n")
        for number, line in enumerate(lines):
            if not line:
                continue
            try:
                found = msgspec.json.decode(line, type=_Line)
                if found.v != VERSION:
                    self._skip(f"of version {found.v}")
                elif zlib.crc32(found.entry) != found.sum:
                    self._skip("damaged")
                else:
                    yield msgspec.json.decode(found.entry, type=DiaryEntry)
            except msgspec.DecodeError:
                self._skip("cut short" if number == len(lines) - 1 and not whole else _reason(line))

    def _skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def add(self, *entries: DiaryEntry) -> None:
        """Append. EnvironmentFault if the file cannot be written, ConfigError for an entry that is too long."""
        lines = []
        for entry in entries:
            raw = msgspec.json.encode(entry)
            if len(raw) > _LONGEST:
                raise ConfigError(f"a diary entry of {len(raw)} bytes", remedy=f"at most {_LONGEST}")
            lines.append(msgspec.json.encode(_Line(v=VERSION, sum=zlib.crc32(raw), entry=msgspec.Raw(raw))) + b"\n")
        if not lines:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append(b"".join(lines))
        except OSError as error:
            raise EnvironmentFault(
                f"the diary {self.path} cannot be written: {error.strerror}",
                remedy="OUTLAST_DIARY names another file",
            ) from error

    def _append(self, data: bytes) -> None:
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                data = b"\n" + data  # who wrote last was interrupted: that line is lost, this one is not
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
            os.fsync(handle)
        finally:
            os.close(handle)

    # --- one device ----------------------------------------------------------------------------------------------
    def named(self, device: str, entries: Iterable[DiaryEntry]) -> str:
        """The device that a person means: its name, or an unambiguous part of it. ConfigError otherwise."""
        names = list(dict.fromkeys(entry.device for entry in entries if entry.kind != "learned"))
        if device in names:
            return device
        found = [name for name in names if device and device in name]
        if len(found) == 1:
            return found[0]
        if found:
            raise ConfigError(
                f"{device!r} may be {len(found)} devices", remedy=f"one of {', '.join(sorted(found)[:5])}"
            )
        raise ConfigError(f"the diary knows no device {device!r}", remedy=nearest(device, names, "outlast health ls"))

    def write(
        self, kind: EntryKind, device: str, text: str, *, host: str = "", passed: bool | None = None
    ) -> DiaryEntry:
        """Append one entry, made now."""
        if kind not in get_args(EntryKind):
            raise ConfigError(f"no kind of entry {kind!r}", remedy=nearest(kind, get_args(EntryKind)))
        entry = DiaryEntry(at_s=time.time(), device=device, kind=kind, text=text, host=host, passed=passed)
        self.add(entry)
        return entry


def _reason(line: bytes) -> str:
    """Why a line is no entry."""
    try:
        version = msgspec.json.decode(line, type=_Version).v
    except msgspec.DecodeError:
        return "damaged"
    return "damaged" if version == VERSION else f"of version {version}"
