"""What a member tells the coordinator of itself while it trains: heartbeats, who answers a ping, what it waits for."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from outlast.core.phases import Phase
from outlast.core.protocol import messages as m

if TYPE_CHECKING:
    from outlast.runtime._mesh import Mesh
    from outlast.runtime._replica import Replica

__all__ = ["Pace", "ping", "stalled"]

_ANSWERS_S = 0.25  # how long answers to a ping are collected before they are reported


class Pace:
    """What heartbeats say of progress: the losses since the last one, and a running mean of the time of a step."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._losses: list[tuple[int, float]] = []
        self._committed_at_s = 0.0
        self._lock = threading.Lock()

    def committed(self) -> None:
        """A step was committed now."""
        now = time.monotonic()
        if self._committed_at_s:
            took = now - self._committed_at_s
            self.step_s = 0.8 * self.step_s + 0.2 * took if self.step_s else took
        self._committed_at_s = now

    def restart(self) -> None:
        """A view change lies between two commits: that is not the time of a step."""
        self._committed_at_s = 0.0

    def record(self, step: int, loss: float) -> None:
        """JSON has no other numbers than finite ones; of these the verdict tells."""
        if math.isfinite(loss):
            with self._lock:
                self._losses.append((step, loss))

    def take(self) -> tuple[tuple[int, float], ...]:
        """The losses since the last call."""
        with self._lock:
            losses, self._losses = self._losses, []
            return tuple(losses)


def ping(replica: Replica, mesh: Mesh) -> None:
    """Ping all; a timer reports who answered. Counted from the pings: who was busy until now reaches everybody."""
    mesh.ping()

    def report() -> None:
        me = replica.env.me
        replica.link.send([m.Rows(member=me, view=mesh.view.id, reached=tuple(sorted(mesh.answered)))])

    timer = threading.Timer(_ANSWERS_S, report)
    timer.daemon = True
    timer.start()


def stalled(replica: Replica, phase: Phase, missing: tuple[str, ...], waited_s: float) -> None:
    """A wait takes longer than its deadline."""
    mesh = replica.mesh  # not the member's view: that may be the next one already, and nobody is missed in it
    if mesh is not None:
        message = m.Stalled(
            member=replica.env.me, view=mesh.view.id, phase=phase, missing=missing, waited_s=waited_s,
            deadline_s=replica.patience(phase),
        )  # fmt: skip
        replica.link.send([message])
