"""Where the coordinator is now: for the length of a run on one record, or as a file of this host says.

With a record that hosts share the next coordinator may be on another one. One process of each host follows that, and
writes the address into a file of the run's folder there; a member that the next one calls does so too, for its host may
not see the record. Everybody else on the host reads it. What stands there is only where to call: whoever answers has to
prove that it knows the run's secret. The file never goes back to an earlier epoch of its run.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import NamedTuple

from outlast.errors import ConfigError
from outlast.runtime.transport.endpoints import read_host_port, shown

__all__ = ["CoordinatorPlace", "keep_place"]

_NAME = "coordinator"
_LONGEST = 400


class _Kept(NamedTuple):
    """What the file says: `address`, of the coordinator in this `epoch` of this `run`."""

    address: str
    epoch: int
    run: str


def keep_place(folder: Path, address: str, epoch: int, run: str) -> None:
    """Write down where it is, in one piece, unless a later epoch's is there. OSError.

    Of two at once the earlier may come last: who has read the later one puts that back (`CoordinatorPlace.now`).
    """
    there = _read(folder / _NAME)
    if there is not None and there.run == run and (there.epoch > epoch or there == (address, epoch, run)):
        return
    new = folder / f".{_NAME}.{threading.get_native_id()}"
    new.write_text(f"{address} {epoch} {run}\n", encoding="ascii")
    new.replace(folder / _NAME)


def _read(file: Path) -> _Kept | None:
    with contextlib.suppress(OSError, UnicodeDecodeError, ValueError):
        address, epoch, run = file.read_text(encoding="ascii")[:_LONGEST].removesuffix("\n").split(" ")
        return _Kept(address, int(epoch), run)
    return None


class CoordinatorPlace:
    """`first`: where it was when this process began; `folder`: None where it stays there; `run`: the run's number, for
    the folder may still hold what an earlier run wrote."""

    def __init__(self, first: tuple[str, int], folder: Path | None, run: str = "") -> None:
        self._now, self._folder, self._run = first, folder, run
        self._newest = _Kept(shown(*first), 0, run)
        self._seen = (0, 0)

    @property
    def moves(self) -> bool:
        """Whether it is worth asking again."""
        return self._folder is not None

    def now(self) -> tuple[str, int]:
        """Cheap enough to be asked ten times a second."""
        if self._folder is None:
            return self._now
        with contextlib.suppress(OSError, ConfigError):
            file = self._folder / _NAME
            found = file.stat()
            mark = found.st_ino, found.st_mtime_ns
            if mark != self._seen:
                self._take(_read(file))
                self._seen = mark
        return self._now

    def _take(self, kept: _Kept | None) -> None:
        if kept is None or kept.run != self._run:
            return
        if kept.epoch < self._newest.epoch:
            assert self._folder is not None
            keep_place(self._folder, *self._newest)
            return
        self._now, self._newest = read_host_port(kept.address), kept

    def followed(self, address: str, epoch: int) -> bool:
        """A coordinator of this run says that it has taken over, in this epoch, and where it listens: everybody on this
        host turns to it. False if that is old, or no address; from any thread."""
        if self._folder is None:
            return False
        there = _read(self._folder / _NAME)
        known = there if there is not None and there.run == self._run else self._newest
        if epoch < known.epoch or (epoch == known.epoch and address != known.address):
            return False
        with contextlib.suppress(ConfigError, OSError, ValueError):
            read_host_port(address)
            if len(address.split()) == 1:
                keep_place(self._folder, address, epoch, self._run)
                return True
        return False

    def __str__(self) -> str:
        return shown(*self.now())
