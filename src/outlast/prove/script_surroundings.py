"""What one struck run has around its processes: a disk or a clock of its own if these are struck, and its hosts."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

from outlast.prove import host_namespaces, struck_clock, struck_disk
from outlast.prove._strike_acts import Surrounding
from outlast.prove.script_plan import KINDS
from outlast.prove.strike_plan import Role
from outlast.prove.struck_hosts import StruckHosts

__all__ = ["ScriptSurroundings", "cannot_be_struck"]

_ROOM = 3, 64 << 20  # of what an undisturbed run saves, and besides
_KEPT = "kept"


def cannot_be_struck(kind: str) -> str:
    """Why runs on this machine cannot be struck by this kind; "" if they can."""
    if kind == "clock":
        return struck_clock.unavailable()
    if kind == "frozen":
        return struck_disk.cannot_freeze()
    if KINDS[kind].roles == ("host",):
        missing = "tc missing (iproute2)" if kind in ("slowlink", "lossy") and not shutil.which("tc") else ""
        return host_namespaces.unavailable() or missing
    return struck_disk.unavailable() if kind in ("full", "readonly") else ""


class ScriptSurroundings:
    """A context manager for one run in `folder`. `saved_bytes`: what an undisturbed run saves; `hosts`: on how many it
    is, with how many replicas on each at most; (0, 0): on this machine."""

    def __init__(
        self, folder: Path, roles: Collection[Role], saved_bytes: int, hosts: tuple[int, int] = (0, 0)
    ) -> None:
        self.around: dict[Role, Surrounding] = {}
        self.environ: dict[str, str] = {}
        self.prefix: list[str] = []
        self.options: list[str] = []
        self.hosts: StruckHosts | None = None
        self._of_hosts = hosts
        self.checkpoints = folder / "checkpoints"
        self._folder, self._disk, self._stack = folder, "disk" in roles, ExitStack()
        self._clock, self._size_bytes = "clock" in roles, _ROOM[0] * saved_bytes + _ROOM[1]

    def __enter__(self) -> ScriptSurroundings:
        with ExitStack() as made:  # what was made is undone if the rest cannot be
            self._make(made)
            self._stack = made.pop_all()
        return self

    def _make(self, made: ExitStack) -> None:
        if self._of_hosts[0]:
            self.hosts = made.enter_context(StruckHosts(self._folder, *self._of_hosts))
            self.around["host"], self.prefix, self.options = self.hosts, self.hosts.entering, self.hosts.options
            self.environ |= self.hosts.environ
        if self._clock:
            clock = struck_clock.StruckClock(self._folder / "clock")
            self.around["clock"] = clock
            self.environ |= clock.environ
        if self._disk:
            disk = made.enter_context(struck_disk.StruckDisk(self._folder / "disk", self._size_bytes))
            self.around["disk"], self.prefix = disk, disk.entering
            made.callback(disk.save, Path(_KEPT), self._folder / "checkpoints")
            self.checkpoints = disk.place / _KEPT

    def __exit__(self, *_: object) -> None:
        """What was saved is found under `checkpoints` of the run's folder, as in any other run."""
        self._stack.close()
