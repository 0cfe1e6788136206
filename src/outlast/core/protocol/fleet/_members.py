"""What members say of themselves: who they are, which views they have formed or left, how far they are."""

from __future__ import annotations

from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet import _agents, _blame, _ending, _returning
from outlast.core.protocol.fleet import change as _change
from outlast.core.protocol.fleet._planned import note_formed
from outlast.core.protocol.fleet.state import FleetState
from outlast.core.protocol.types import ViewId, differences

__all__ = ["done", "failed", "formed", "hello", "leaving", "left", "ready", "rejoin"]


def hello(c: FleetState, now_s: float, hello: m.Hello) -> None:
    """A member greets, for the first time or again."""
    if hello.epoch > c.epoch:
        c.superseded()
        return
    c.tell([hello.member], m.Welcome(epoch=c.epoch))
    known = c.roster.peers.get(hello.member)
    if (known is not None and not known.alive) or c.roster.superseded(hello.member):
        reason = "the run went on without this replica"
        c.tell([hello.member], m.Evict(epoch=c.epoch, reason=reason))
        return
    if not _same_facts(c, hello):
        return
    c.unheard.discard(hello.member)
    peer = known or c.roster.add(hello.member, hello.agent, "spawning")
    peer.address, peer.store, peer.device, peer.joined = hello.address, hello.store, hello.device, True
    peer.since_s = peer.since_s or now_s
    peer.committed = max(peer.committed, hello.committed)
    peer.leaving, peer.going = peer.leaving or hello.leaving, peer.going or hello.leaving
    c.leaving = c.leaving or peer.leaving
    if c.ending is not None:
        _ending.greet(c, peer, hello)
    elif peer.name in c.current:
        _returning.member(c, peer, hello)
    elif peer.leaving:
        _returning.leaver(c, peer, hello)
    else:
        _returning.outsider(c, peer, hello)


def _same_facts(c: FleetState, hello: m.Hello) -> bool:
    if not c.facts and hello.facts:
        c.facts = dict(hello.facts)
        c.persist()
    shown = differences(c.facts, hello.facts)
    if not shown:
        return True
    c.tell([hello.member], m.Evict(epoch=c.epoch, reason=shown, remedy="facts"))
    c.journal("notice", level="error", text=f"{hello.member} was refused: {shown}")
    return False


def left(c: FleetState, now_s: float, left: m.Left) -> None:
    """A member has left a view, told to or not."""
    peer = c.roster.peers.get(left.member)
    if peer is None or not peer.alive:
        return
    peer.left = max(peer.left or left.view, left.view)
    view = c.view
    if view is None or left.member not in c.current or left.view < view.id:
        return
    _change.begin(c, left.cause or f"{left.member} left")
    change = c.change
    if change is None:
        return
    if left.view >= change.upto:
        _change.acknowledge(c, left.member)
    change.stale.update(left.stale)
    for name in left.suspects:
        c.reports.noticed(name, left.member, left.at_s)
        change.doubts.add((left.member, name))
    if left.suspects and change.doubtful:
        c.timer(f"doubt:{change.upto}", c.settings.doubt_s)


def formed(c: FleetState, now_s: float, formed: m.Formed) -> None:
    """A member has formed a view."""
    peer = c.roster.peers.get(formed.member)
    if peer is None or not peer.alive:
        return
    peer.committed = max(peer.committed, formed.step)
    c.reports.formed[formed.member] = formed
    if c.planned is not None and formed.view == c.planned.id and formed.left_at_s > 0:
        took_s = max(0.0, formed.formed_at_s - formed.left_at_s)
        c.planned_s[formed.view] = max(took_s, c.planned_s.get(formed.view, 0.0))
    if note_formed(c, peer, formed.view) and not c.awaiting:
        c.reports.view_formed(formed)


def ready(c: FleetState, now_s: float, ready: m.Ready) -> None:
    """A joiner has caught up."""
    peer = c.roster.peers.get(ready.member)
    if peer is not None and peer.status == "joining" and peer.serve == ready.serve:
        c.roster.mark(peer.name, "ready")
        peer.committed = ready.step
        c.journal("joiner_caught_up", replica=peer.name, step=ready.step, seconds=max(0.0, now_s - peer.since_s))


def rejoin(c: FleetState, now_s: float, rejoin: m.Rejoin) -> None:
    """A replica has no state to act with, or none that it was being given."""
    peer = c.roster.peers.get(rejoin.member)
    if peer is None or not peer.alive:
        return
    if peer.name in c.current:
        if c.view is not None and ViewId(epoch=0, n=0) < rejoin.view < c.view.id:
            return  # said of an earlier view, and late: of this one it speaks for itself
        _change.begin(c, f"{peer.name} has no state to act with")
        _change.demote(c, peer.name)
    elif peer.status in ("joining", "ready"):
        c.roster.mark(peer.name, "fresh")


def leaving(c: FleetState, now_s: float, leaving: m.Leaving) -> None:
    """A member was asked to go, by whoever started it."""
    departing(c, now_s, m.Departing(members=(leaving.member,)))


def departing(c: FleetState, now_s: float, going: m.Departing) -> None:
    """The same of several at once."""
    for name in c.roster.alive(going.members):
        peer = c.roster.peers[name]
        peer.leaving = peer.going = c.leaving = True
        c.dismiss(name)


def done(c: FleetState, now_s: float, done: m.Done) -> None:
    """A member has passed the closing barrier."""
    peer = c.roster.peers.get(done.member)
    if peer is not None:
        peer.committed = max(peer.committed, done.steps)
        c.done.setdefault(done.view, set()).add(done.member)


def failed(c: FleetState, now_s: float, failed: m.Failed) -> None:
    """User code raised in a member."""
    peer = c.roster.peers.get(failed.member)
    if peer is not None:
        peer.committed = max(peer.committed, failed.step)
    _blame.raised(c, failed)
    if peer is not None and peer.alive and c.ending is None and not c.over:
        _agents.raised(c, now_s, peer, failed)
