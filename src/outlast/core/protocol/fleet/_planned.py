"""Planned changes: orders that members carry out between two steps, once all have heard them (protocol, 6 and 18)."""

from __future__ import annotations

from typing import Literal

from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet._bad_links import relieved, well_linked_first
from outlast.core.protocol.fleet._host_places import make_room, other_hosts_first
from outlast.core.protocol.fleet._telling import tell_order
from outlast.core.protocol.fleet._vacancies import held, noted, wait_on
from outlast.core.protocol.fleet._work import work_of
from outlast.core.protocol.fleet.change import begin
from outlast.core.protocol.fleet.roster import Peer, Status
from outlast.core.protocol.fleet.state import FleetState
from outlast.core.protocol.types import Order, ServeId, View, ViewId

__all__ = ["note_formed", "plan_next", "switched"]


def plan_next(c: FleetState) -> None:
    """The view is formed and nothing is under way: let somebody in or out, or have a joiner served."""
    view = c.view
    assert view is not None
    if view.held:
        wait_on(c, view)
    make_room(c, view)
    leaving = [name for name in view.members if c.roster.peers[name].leaving] if c.leaving else []
    vacant = c.settings.num_replicas - len(view.members) + len(leaving)
    switch = bool(leaving) or (vacant > 0 and c.roster.count("ready") > 0) or _relieves(c, view)
    if not switch and not c.roster.count("fresh"):
        return
    if all(c.roster.peers[name].going for name in view.members) and not _somebody_comes(c, "ready"):
        c.finish("stopped", 143, 0, "every replica was asked to leave before the last step")
    elif view.id.epoch != c.epoch:
        # An earlier coordinator may have given orders in this view that nobody can number any more.
        begin(c, "a planned change under a new coordinator")
    elif not (switch and _switch(c, view, vacant)):
        _serve_all(c, view)


def _switch(c: FleetState, view: View, vacant: int) -> bool:
    peers = c.roster.peers
    staying = [name for name in view.members if not peers[name].leaving]
    ready = well_linked_first(c, [name for name in c.roster.having("ready") if not peers[name].leaving])
    if not staying and not ready:
        if _somebody_comes(c):  # and takes the state over
            return False
        staying = _stays_on(c, view)
    if not staying:  # somebody has to hand the state on: the last one goes with the next change
        staying = [view.members[0]]
    ready = other_hosts_first(c, ready, staying)
    members = c.roster.by_host((*staying, *ready[: max(0, vacant)]))
    others, work, waits = relieved(c, members), work_of(c, members), held(c, members)
    if members == view.members and others == view.relieved and work == view.work and waits == view.held:
        return False
    attached = tuple(name for name in ready if name not in members)
    planned = View(id=c.next_id(), members=members, attached=attached, relieved=others, work=work, held=waits)
    noted(c, planned)
    c.set_views(view, planned)
    c.persist()
    c.journal(
        "view_installed",
        epoch=c.epoch,
        n=planned.id.n,
        members=list(members),
        cause="planned",
        planned=True,
        num_microbatches=c.num_microbatches,
    )
    order = _order(c, "switch", next_view=planned)
    tell_order(c, view, order)
    c.timer(f"form:{planned.id}", c.settings.formation_s)
    return True


def _stays_on(c: FleetState, view: View) -> list[str]:
    """Members that were asked to go and need not: whoever else had the state has died since. They train on until there
    is somebody to take it over. Who says itself that it was asked to go has its end coming."""
    names = [name for name in view.members if not c.roster.peers[name].going]
    untold = [name for name in names if name not in c.stay_told]
    if untold:
        c.stay_told.update(untold)
        why = "whoever else held the training state is gone, and no other comes (for want of a host, or of restarts)"
        c.journal("notice", level="warning", text=f"{', '.join(untold)} cannot leave yet: {why}")
    return names


def _relieves(c: FleetState, view: View) -> bool:
    """Whether others should reduce nothing than do, or compute less, or nobody should wait any longer. Who reduces in
    an earlier coordinator's view stays as it is: that one may have known. Shares wait for joiners, whose streams end
    with the view."""
    if view.held and not held(c, view.members):
        return True
    if view.id.epoch == c.epoch and relieved(c, view.members) != view.relieved:
        return True
    if not c.leaf_s or c.roster.count("joining"):
        return False
    return work_of(c, view.members) != view.work


def _somebody_comes(c: FleetState, *besides: Status) -> bool:
    coming = c.roster.having("spawning", "fresh", "joining", *besides)
    return any(not c.roster.peers[name].leaving for name in coming)


def _serve_all(c: FleetState, view: View) -> None:
    for name in c.roster.having("fresh"):
        peer = c.roster.peers[name]
        c.num_serves += 1
        c.roster.mark(name, "joining")
        peer.serve = (c.epoch, c.num_serves)
        order = _order(c, "serve", joiner=name, serve=peer.serve)
        step = max(c.roster.peers[member].committed for member in view.members)
        c.journal("joiner_served", replica=name, step=step, donors=list(view.members))
        c.tell([name], m.BeginServe(epoch=c.epoch, donors=view.members, serve=peer.serve))
        c.tell(view.members, m.Take(epoch=c.epoch, order=order, addresses={name: peer.address}))


def _order(
    c: FleetState,
    kind: Literal["switch", "serve"],
    *,
    next_view: View | None = None,
    joiner: str = "",
    serve: ServeId = (0, 0),
) -> Order:
    assert c.view is not None
    c.orders += 1
    return Order(view=c.view.id, number=c.orders, kind=kind, next=next_view, joiner=joiner, serve=serve)


def switched(c: FleetState) -> None:
    """Everyone is in the planned view: it is the view now, and who left may go."""
    assert c.view is not None
    assert c.planned is not None
    staying = set(c.planned.members)
    departed = [name for name in c.view.members if name not in staying]
    c.set_views(c.planned, None)
    c.orders = 0
    for name in c.view.members:
        c.roster.mark(name, "member")
    c.persist()
    c.tell(c.roster.alive(departed), m.Close(epoch=c.epoch, reason=m.DEPARTED))


def note_formed(c: FleetState, peer: Peer, at: ViewId) -> bool:
    """Returns whether this was the last member that its view waited for."""
    peer.view = max(peer.view or at, at)
    if c.planned is not None and at == c.planned.id:
        c.planned_entered = True
        c.planned_unformed.discard(peer.name)
        if not c.planned_unformed and not c.awaiting and c.change is None:
            switched(c)
            return True
    elif c.view is not None and at == c.view.id and peer.name in c.unformed:
        c.unformed.discard(peer.name)
        if not c.ever_formed:
            c.ever_formed = True
            c.persist()
        return not c.unformed
    return False
