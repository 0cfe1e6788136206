"""A view takes effect: durable first, then told to whoever is in it."""

from __future__ import annotations

from outlast.core.protocol.fleet._telling import tell_view
from outlast.core.protocol.fleet._vacancies import noted
from outlast.core.protocol.fleet.state import FleetState
from outlast.core.protocol.types import View

__all__ = ["formation_s", "install"]


def install(c: FleetState, view: View, cause: str) -> None:
    """Durable first, then told (protocol, step 3 of a death)."""
    before = c.change.old if c.change is not None else {}
    base = c.planned if c.planned_entered else c.view
    for name in view.members:
        c.roster.mark(name, "member")
    noted(c, view)
    c.change, c.orders = None, 0
    c.set_views(view, None)
    c.reports.formed.clear()
    c.stalls.clear()
    c.persist()
    c.journal(
        "view_installed",
        epoch=view.id.epoch,
        n=view.id.n,
        members=list(view.members),
        cause=cause,
        planned=False,
        num_microbatches=c.num_microbatches,
    )
    tell_view(c, base, view, cause)
    departed = [name for name in c.roster.alive(before) if name not in c.current]
    c.tell([name for name in departed if c.roster.peers[name].leaving], c.departure())
    c.timer(f"form:{view.id}", formation_s(c, view))


def formation_s(c: FleetState, view: View) -> float:
    """How long a view may take to form: a first one loads what a checkpoint holds, and so may one of spares."""
    loads = view.start or view.saved
    return c.settings.start_s if loads and c.facts.get("checkpoints") else c.settings.formation_s
