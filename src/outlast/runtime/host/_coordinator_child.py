"""The coordinator as a process of the launcher: started, watched, replaced from the record, in the end given up.

Invariant: one that is silent is killed before it is replaced, and one that even a kill does not end is left behind; its
successor is fenced from it by the epoch. It reads nothing of the record, and whether the run is over is its owner's
to say.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from outlast.runtime.host._children import Child, Exit
from outlast.runtime.host._coordinator_ends import CoordinatorEnds
from outlast.runtime.host._host_system import HostSystem
from outlast.runtime.host._later_starts import LaterStarts
from outlast.runtime.host.silence import Watch, why_out
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.transport.regions import Region

__all__ = ["CoordinatorChild"]

_TRIES = 8  # restarts in a row without a minute of life between them
_IN_A_ROW_S = 60.0
_KILLED_S = 2.0  # one that was killed and has not ended by then is left to wake or not


@dataclass(slots=True)
class CoordinatorChild:
    """Keeps the coordinator's process. `floor_s`, `hung_s`: see `Watch`; `begin(fd)` starts one that gives its signs of
    life in the block behind this descriptor."""

    system: HostSystem
    ends: CoordinatorEnds
    later: LaterStarts
    floor_s: float
    hung_s: float
    begin: Callable[[int], Child] | None = None
    child: Child | None = None
    progress: Progress | None = None
    _watch: Watch | None = None
    _condemned: tuple[str, float, float] | None = None  # why it was killed, how silent it was, when
    _left: list[Child] = field(default_factory=list)  # killed, and not gone
    _deaths: list[float] = field(default_factory=list)

    def start(self, begin: Callable[[int], Child]) -> None:
        """Start the first one. OSError."""
        self.begin = begin
        self._start()

    def _start(self) -> None:
        assert self.begin is not None
        region = Region(Progress.SIZE, name="outlast-coordinator")
        progress = Progress(region, self.system.now_ns)
        progress.alive()
        try:
            self.child = self.begin(region.fd)
        except OSError:
            region.close()
            raise
        self.progress = progress
        self._watch = Watch(self.child.pid, self.progress, self.floor_s, self.hung_s, self.system.state)
        self._condemned = None

    @property
    def fds(self) -> list[int]:
        """What becomes readable when it ends; nothing while there is none."""
        return [self.child.fd] if self.child is not None else []

    def why_out(self) -> str:
        """Why nobody can join the run just now; "" if they can."""
        return why_out(self.progress if self.child is not None else None, self.system.now_s())

    def kill(self) -> None:
        if self.child is not None:
            self.child.send(signal.SIGKILL)

    def look(self) -> tuple[str, float] | None:
        """Kill it if it is stopped or hangs: then it also lets go of its connections, and everybody turns to the
        successor at once. Returns (why, silent for s) once nobody should wait for its end any longer."""
        if self.child is None or self._watch is None:
            return None
        now_s = self.system.now_s()
        wrong, silent_s = self._watch.look(now_s)
        if self._condemned is None:
            if wrong:
                self._condemned = (f"it {'hung' if wrong == 'hung' else 'was stopped'}", silent_s, now_s)
                self.kill()
        elif now_s - self._condemned[2] > _KILLED_S:
            self._left.append(self.child)
            self.child = None
            return self._condemned[:2]
        return None

    def reap(self) -> tuple[Exit, str, float] | None:
        """(how it has ended, why, silent for s); None while it lives."""
        noticed_s = self.system.now_s()
        if self.child is None or self.progress is None or (how := self.child.reap()) is None:
            return None
        self.child = None
        if self._condemned is not None:
            return how, *self._condemned[:2]
        return how, f"it ended by {how}", max(0.0, noticed_s - self.progress.read()[3])

    def replace(self, why: str, silent_s: float, *, wanted: bool) -> bool:
        """Start another, from the record, `later` if there is no room for it now; False if none is `wanted`, or too
        many have ended in a row."""
        now_s = self.system.now_s()
        self.ends.died(why, silent_s)
        self._deaths = [at_s for at_s in self._deaths if now_s - at_s < _IN_A_ROW_S] + [now_s]
        if len(self._deaths) > _TRIES or not wanted:
            return False
        if self.progress is not None:
            self.progress.region.close()
        self.later.start("the coordinator's successor", self._start)
        return True

    def all(self) -> list[Child]:
        """Those that have not been seen to end, the newest last."""
        return [*self._left, *([self.child] if self.child is not None else [])]

    def forget(self) -> None:
        """They have all been waited for: their descriptors are closed, or somebody else's."""
        self.child = None
        self._left.clear()
