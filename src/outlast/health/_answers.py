"""Answers that devices of a kind gave, in a JSON file beside the diary, replaced by one rename. No torch."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

import msgspec

__all__ = ["Answers"]

VERSION = 1


class _File(msgspec.Struct, kw_only=True):
    version: int
    kinds: dict[str, dict[str, int]]


class Answers:
    """Fingerprints by kind of device and size of the questions. A file that cannot be read is none: the answers are
    learned again, and that is said once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kinds: dict[str, dict[str, int]] = {}
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_File)
            if found.version == VERSION:
                self._kinds = found.kinds
            else:
                self._say(f"it is of version {found.version}, and this outlast reads {VERSION}")
        except FileNotFoundError:
            pass
        except (OSError, msgspec.DecodeError) as error:
            self._say(str(error))

    def _say(self, reason: str) -> None:
        print(f"outlast: the answers in {self.path} are not used: {reason}", file=sys.stderr)

    def of(self, kind: str, size: int) -> dict[str, int]:
        """A copy of the answers of one kind of device."""
        return dict(self._kinds.get(f"{kind}, size {size}", {}))

    def keep(self, kind: str, size: int, answers: dict[str, int]) -> None:
        """Add answers; the first ones stay. A folder that cannot be written loses them, which is said."""
        self._kinds[f"{kind}, size {size}"] = answers | self._kinds.get(f"{kind}, size {size}", {})
        data = msgspec.json.encode(_File(version=VERSION, kinds=self._kinds))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(name, self.path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            print(f"outlast: the answers cannot be kept: {error}", file=sys.stderr)
