"""What a replica tells the coordinator of others, though nothing has ended: who answers, for whom it waits too long.

Evidence for `core/policy`, which decides; nothing is decided here.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from outlast.core.phases import Phase
from outlast.core.protocol import messages as m
from outlast.runtime._mesh import Mesh

if TYPE_CHECKING:
    from outlast.runtime._replica import Replica

__all__ = ["ping", "stalled"]

_ANSWERS_S = 0.25  # how long answers to a ping are collected before they are reported


def ping(replica: Replica, mesh: Mesh) -> None:
    """Ping all; a timer reports who answered. Counted from the pings: who was busy until now reaches everybody."""
    mesh.ping()

    def report() -> None:
        answered = tuple(sorted(mesh.answered))
        replica.link.send([m.Rows(member=replica.env.me, view=mesh.view.id, reached=answered)])

    timer = threading.Timer(_ANSWERS_S, report)
    timer.daemon = True
    timer.start()


def stalled(replica: Replica, phase: Phase, missing: tuple[str, ...], waited_s: float) -> None:
    """A wait inside the exchange exceeds its deadline."""
    view = replica.member.view
    if view is not None:
        told = m.Stalled(
            member=replica.env.me, view=view.id, phase=phase, missing=missing, waited_s=waited_s,
            deadline_s=replica.patience(phase),
        )  # fmt: skip
        replica.link.send([told])
