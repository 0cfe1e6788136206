"""A view takes effect: durable first, then told to whoever is in it."""

from __future__ import annotations

from outlast.core.protocol.fleet._telling import tell_view
from outlast.core.protocol.fleet._vacancies import noted
from outlast.core.protocol.fleet.state import FleetState
from outlast.core.protocol.types import View

__all__ = ["formation_s", "install", "let_go"]


def install(c: FleetState, view: View, cause: str) -> None:
    """Durable first, then told (protocol, step 3 of a death)."""
    before = c.change.old if c.change is not None else {}
    base = c.planned if c.planned_entered else c.view
    for name in view.members:
        c.roster.mark(name, "member")
    noted(c, view)
    c.change, c.orders = None, 0
    c.set_views(view, None)
    # They hold the state, and until the view has formed nobody knows that somebody of it does: its members may all be
    # gone by then. So they are let go once it has (`let_go`), by this coordinator or the next.
    departed = [name for name in c.roster.alive(before) if name not in c.current]
    c.outgoing = {name for name in departed if c.roster.peers[name].leaving}
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
    c.timer(f"form:{view.id}", formation_s(c, view))


def let_go(c: FleetState) -> None:
    """The view has formed: who left for it may go."""
    outgoing, c.outgoing = c.roster.alive(sorted(c.outgoing)), set()
    c.persist()
    c.tell(outgoing, c.departure())


def formation_s(c: FleetState, view: View) -> float:
    """How long a view may take to form: a first one loads what a checkpoint holds, and so may one of spares."""
    loads = view.start or view.saved
    return c.settings.start_s if loads and c.facts.get("checkpoints") else c.settings.formation_s
