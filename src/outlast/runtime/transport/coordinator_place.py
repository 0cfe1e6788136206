"""Where the coordinator is now: for the length of a run on one record, or as a file of this host says.

With a record that hosts share the next coordinator may be on another one. One process of each host follows that, and
writes the address into a file of the run's folder there; everybody else on the host reads it. What stands there is only
where to call: whoever answers has to prove that it knows the run's secret.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from outlast.errors import ConfigError
from outlast.runtime.transport.endpoints import read_host_port, shown

__all__ = ["CoordinatorPlace", "keep_place"]

_NAME = "coordinator"
_LONGEST = 300


def keep_place(folder: Path, address: str) -> None:
    """Write down where it is, in one piece. OSError."""
    new = folder / f".{_NAME}.{os.getpid()}"
    new.write_text(address + "\n", encoding="ascii")
    new.replace(folder / _NAME)


class CoordinatorPlace:
    """`first`: where it was when this process began; `folder`: None where it stays there."""

    def __init__(self, first: tuple[str, int], folder: Path | None) -> None:
        self._now, self._file = first, folder / _NAME if folder is not None else None
        self._seen = (0, 0)

    @property
    def moves(self) -> bool:
        """Whether it is worth asking again."""
        return self._file is not None

    def now(self) -> tuple[str, int]:
        """Cheap enough to be asked ten times a second."""
        if self._file is None:
            return self._now
        with contextlib.suppress(OSError, ConfigError, UnicodeDecodeError):
            found = self._file.stat()
            mark = found.st_ino, found.st_mtime_ns
            if mark != self._seen:
                self._now = read_host_port(self._file.read_text(encoding="ascii")[:_LONGEST].strip())
                self._seen = mark
        return self._now

    def __str__(self) -> str:
        return shown(*self.now())
