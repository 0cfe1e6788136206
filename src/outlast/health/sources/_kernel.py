"""The kernel's log: XIDs of accelerators, machine checks, memory errors, what was killed for memory, cards that reset.

`/dev/kmsg` is read without waiting, from its end on; a line says by itself what it is about. What is in an XID: the
codes that a device does not come back from without a reset are fatal (NVIDIA's XID catalogue; arXiv 2503.11901 counts
which of them end jobs).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from outlast.health.sources._readings import Reading

__all__ = ["KernelLog", "read_kernel_lines"]

FATAL_XIDS = frozenset({48, 62, 64, 74, 79, 92, 94, 95, 110, 119, 120, 136, 140, 143})
"""Double-bit errors, micro-controller halts, failed row remaps, NVLink, fallen off the bus, uncontained errors, GSP."""
SOFTWARE_XIDS = frozenset({13, 31, 43, 45, 68, 69})
"""What a program does to itself."""

_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("xid", re.compile(r"NVRM: Xid \((?:PCI:)?(?P<device>[0-9a-fA-F:.]+)\): (?P<code>\d+)")),
    ("memory.uncorrected", re.compile(r"EDAC (?P<device>\S+):.*\bUE\b|Memory failure: (?P<page>0x[0-9a-f]+)")),
    ("edac.line", re.compile(r"EDAC (?P<device>\S+):.*\bCE\b")),
    ("mce", re.compile(r"mce: \[Hardware Error\]|Machine check events logged|\[Hardware Error\]: (?P<device>CPU \d+)")),
    ("oom", re.compile(r"Out of memory: Killed process (?P<device>\d+)|oom-kill:")),
    ("nic.reset", re.compile(r"(?P<device>mlx\d_core|bnxt_en|ena|i40e|ice|ixgbe)\b.*\b(?:reset|timed out|health)")),
    ("fs.error", re.compile(r"(?:EXT4|XFS|BTRFS)[^:]*?(?:error|corruption)[^:]*?\((?:device )?(?P<device>\w+)", re.I)),
    ("disk.error", re.compile(r"I/O error, dev (?P<device>\w+)|(?P<nvme>nvme\d+): .*timeout")),
)  # fmt: skip


def read_kernel_lines(lines: Iterable[str], at_s: float, source: str = "kernel") -> Iterator[Reading]:
    """One reading for each line that is about hardware."""
    for line in lines:
        for name, pattern in _PATTERNS:
            found = pattern.search(line)
            if found is None:
                continue
            parts = found.groupdict()
            device = next((value for key, value in parts.items() if key != "code" and value), "")
            value = float(parts["code"]) if parts.get("code") else None
            if name == "xid":
                code = int(parts["code"])
                name = "xid.fatal" if code in FATAL_XIDS else "xid" if code in SOFTWARE_XIDS else "xid.warning"
            text = line[line.find(";") + 1 :].strip()[:200]
            yield Reading(at_s=at_s, source=source, device=device, name=name, value=value, text=text)
            break


class KernelLog:
    """Reads what was logged since the last call; the first call only finds the end."""

    name = "kernel"

    def __init__(self, path: Path = Path("/dev/kmsg"), *, from_start: bool = False) -> None:
        self._path, self._from_start = path, from_start
        self._handle: int | None = None
        self._rest = b""

    def read(self, now_s: float) -> list[Reading]:
        """OSError where the log may not be read, which is a missing reading."""
        if self._handle is None:
            self._handle = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if not self._from_start:
                os.lseek(self._handle, 0, os.SEEK_END)
        lines = [line.decode("utf-8", "replace") for line in self._lines(self._handle)]
        return list(read_kernel_lines(lines, now_s))

    def _lines(self, handle: int) -> Iterator[bytes]:
        """Whole lines, at most ten thousand at a time."""
        for _ in range(10_000):
            try:
                data = os.read(handle, 8192)
            except BlockingIOError:
                return
            except BrokenPipeError:  # older lines were overwritten before they were read
                continue
            if not data:
                return
            *whole, self._rest = (self._rest + data).split(b"\n")
            yield from whole

    def __del__(self) -> None:
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.close(self._handle)
