"""Somebody reconnected: learn what it missed saying, and tell it what it missed hearing."""

from __future__ import annotations

from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet._planned import note_formed
from outlast.core.protocol.fleet._restart import reconcile
from outlast.core.protocol.fleet.change import begin
from outlast.core.protocol.fleet.roster import Peer
from outlast.core.protocol.fleet.state import FleetState

__all__ = ["leaver", "member", "outsider"]


def member(c: FleetState, peer: Peer, hello: m.Hello) -> None:
    """A member of the view reconnected: learn what it missed saying, and tell it what it missed hearing."""
    at = hello.view.id if hello.view is not None else None
    if at is not None and hello.left:
        peer.left = max(peer.left or at, at)
    if at is not None and hello.formed:
        if hello.told is not None and hello.told.view == at == c.latest():
            c.reports.formed[peer.name] = hello.told
        note_formed(c, peer, at)
        if hello.done:
            c.done.setdefault(at, set()).add(peer.name)
    if peer.name in c.awaiting:
        c.awaiting.discard(peer.name)
        c.disturbed = c.disturbed or _out_of_step(c, peer, hello)
        c.orders_heard.add(hello.heard)
        if not c.awaiting:
            reconcile(c)
    elif c.change is not None:
        if peer.name in c.change.old:
            c.tell([peer.name], m.Notify(epoch=c.epoch, view=c.change.upto, cause=c.change.cause))
        else:
            outsider(c, peer, hello)
    else:
        _remind(c, peer, hello)


def _out_of_step(c: FleetState, peer: Peer, hello: m.Hello) -> str:
    target = c.planned or c.view
    inside = target is not None and peer.name in target.members
    if inside and (hello.view is None or hello.view != target or hello.left or not hello.formed):
        return "the coordinator was restarted in the middle of a change"
    return ""


def _remind(c: FleetState, peer: Peer, hello: m.Hello) -> None:
    view, planned = c.view, c.planned
    assert view is not None
    at = hello.view.id if hello.view is not None else None
    if at is not None and hello.left and at in (view.id, planned and planned.id):
        begin(c, f"{peer.name} left view {at}")
    elif planned is not None and at == planned.id:
        c.planned_entered = True
    elif planned is not None and (at != view.id or hello.heard < c.orders):
        begin(c, f"{peer.name} missed the order to enter view {planned.id}")
    elif at != view.id:
        c.tell([peer.name], c.install_message(view, "reminder"))
    elif hello.heard < c.orders:
        begin(c, f"{peer.name} missed an order")


def leaver(c: FleetState, peer: Peer, hello: m.Hello) -> None:
    """Somebody who was asked to go, and is of no view: it goes, unless it holds the state for a view that has yet to
    form."""
    if hello.state != "member":
        c.outgoing.discard(peer.name)
    elif peer.name in c.outgoing and c.change is not None:
        c.change.acked.add(peer.name)  # its own view was dead before the one was installed that is over now
    c.dismiss(peer.name)


def outsider(c: FleetState, peer: Peer, hello: m.Hello) -> None:
    """Somebody outside the view: new, joining, a spare, or still in a view that is over."""
    following = hello.state in ("joining", "ready") and (peer.serve == hello.serve or peer.status == "spawning")
    if hello.state == "joining" and hello.serve[0] != c.epoch:
        following = False  # the coordinator that died may have told the joiner, and not all members, or none of them
    if following:
        peer.serve = hello.serve
        c.roster.mark(peer.name, hello.state)
    elif hello.state == "fresh":
        c.roster.mark(peer.name, "fresh")
    else:
        c.start_again(peer.name)
