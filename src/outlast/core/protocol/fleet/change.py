"""A view is over: everybody is told to leave, and a successor is chosen among those who did (protocol, 2).

A view is dead once one of its members is known to have left it or to be gone, because
every exchange needs all members. Nothing is installed before every view that may be acted in is dead and somebody who
acted in it carries its state over, or nobody of it can act any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet._bad_links import relieved, well_linked_first
from outlast.core.protocol.fleet._beginning import begin_again, forget_view
from outlast.core.protocol.fleet._host_places import other_hosts_first
from outlast.core.protocol.fleet._vacancies import held
from outlast.core.protocol.fleet._work import work_of
from outlast.core.protocol.fleet.state import Change, FleetState
from outlast.core.protocol.fleet.views import install
from outlast.core.protocol.types import View

__all__ = ["acknowledge", "begin", "demote", "successor", "try_install", "unexplained"]


def begin(c: FleetState, cause: str) -> None:
    """Everyone leaves together. Idempotent; while reports are awaited it is only noted (rule 3)."""
    if c.view is None or c.change is not None or c.ending is not None:
        return
    if c.awaiting:
        c.disturbed = cause
        return
    acting = c.roster.alive(dict.fromkeys(c.view.members + (c.planned.members if c.planned else ())))
    old = dict.fromkeys(c.view.members + (c.planned.members if c.planned else ()) + tuple(sorted(c.outgoing)))
    c.change = Change(upto=c.latest(), view=c.view.members, old=old, cause=cause, waiting=set(acting))
    c.change.acked.update(c.roster.alive(c.outgoing - c.unheard))  # they left before this view was installed
    for name in c.roster.having("joining"):
        c.start_again(name)
    c.timer(f"ack:{c.change.upto}", c.settings.ack_s)
    c.tell(acting, m.Notify(epoch=c.epoch, view=c.change.upto, cause=cause))


def acknowledge(c: FleetState, name: str) -> None:
    """`name` has left every view up to `upto`."""
    change = c.change
    if change is not None and name in change.waiting:
        change.waiting.discard(name)
        change.acked.add(name)


def demote(c: FleetState, name: str) -> None:
    """It cannot be a member: too far behind, or without state. It starts again as a joiner, or goes if it was asked."""
    if c.change is not None and c.roster.is_alive(name):
        c.change.old.pop(name, None)
        c.change.waiting.discard(name)
        c.change.acked.discard(name)
        c.outgoing.discard(name)
        c.start_again(name)
        if c.roster.peers[name].leaving:
            c.tell([name], c.departure())


def try_install(c: FleetState, now_s: float) -> None:
    change = c.change
    assert change is not None
    if not change.expired and _some_will_answer(c, change):
        return
    if change.doubts and _open_doubts(c, change):
        return
    alive = c.roster.alive(change.old)
    of_view = set(change.view).intersection(alive).difference(change.stale)  # not who was found to have no state
    if _brings_state(c, change, of_view & change.acked):  # else who had left before it counts: it may be ahead of all
        alive = [name for name in alive if name not in c.outgoing]
    carriers = [name for name in alive if name in change.acked]
    fit = [name for name in carriers if name not in change.stale]
    if not alive:
        _without_survivors(c, change)
    elif any(name in of_view for name in fit) or (fit and not of_view):
        _carry_on(c, change, fit)
    elif carriers and change.stale.issuperset(alive):  # whoever was ahead of them is gone: their own step is the newest
        _carry_on(c, change, carriers)
    elif change.lease_out and change.waiting and _others_go_on(c, change):
        for name in sorted(change.waiting):
            c.condemn(name, "silent for longer than the lease")
        try_install(c, now_s)


def _planned_goes_on(c: FleetState, change: Change) -> bool:
    """Whether the planned view may have formed, and nobody has left it or is gone: who was to leave has left only the
    view before it, which proves nothing of this one (2)."""
    planned = c.planned.members if c.planned is not None else ()
    return bool(planned) and change.waiting.issuperset(planned)


def _end_planned(c: FleetState, change: Change) -> None:
    """None of its members answers. The exit of one proves it dead; of those whose hosts are not heard of, only the end
    of their lease does."""
    assert c.planned is not None
    for name in c.planned.members:
        if name not in c.killed and not _unheard(c, name):
            c.journal("suspected", replica=name, evidence=_unleft(change), decision="evict")
            c.kill(name, _unleft(change))


def _unleft(change: Change) -> str:
    return f"did not acknowledge leaving view {change.upto}"


def _others_go_on(c: FleetState, change: Change) -> bool:
    """Whether somebody is there to go on, or nobody is waited for whose host is heard of."""
    return bool(change.acked) or c.roster.count("ready") > 0 or not _some_will_answer(c, change)


def _some_will_answer(c: FleetState, change: Change) -> bool:
    """Whether anybody is waited for whose host is heard of."""
    if not c.silent:
        return bool(change.waiting)
    return any(not _unheard(c, name) for name in change.waiting)


def _carry_on(c: FleetState, change: Change, carriers: Sequence[str]) -> None:
    if not change.lease_out and _planned_goes_on(c, change):
        _end_planned(c, change)
        return
    for name in sorted(change.waiting):
        silence = c.silent.get(c.roster.peers[name].agent)
        c.condemn(name, silence.why if silence else _unleft(change))
    for name in sorted(change.stale.difference(carriers)):
        demote(c, name)
    install(c, successor(c, change, carriers), change.cause)


def _open_doubts(c: FleetState, change: Change) -> bool:
    """Whether a broken connection still waits to be explained: by an exit, or by the silence of a host."""
    change.doubts = unexplained(c, change)
    return bool(change.doubts) and change.doubtful


def unexplained(c: FleetState, change: Change) -> set[tuple[str, str]]:
    """Pairs between which a connection ended though both live, on hosts that are heard of."""
    return {pair for pair in change.doubts if all(c.roster.is_alive(name) and not _unheard(c, name) for name in pair)}


def _unheard(c: FleetState, name: str) -> bool:
    return c.roster.peers[name].agent in c.silent


def _without_survivors(c: FleetState, change: Change) -> None:
    ready = [name for name in c.roster.having("ready") if not c.roster.peers[name].leaving]
    if ready:  # a spare is a replica that owned nothing; it goes on from its own last step, to the same bits
        c.reports.fleet_lost(c.known_steps(change.old), behind=1)  # more, where it was stopped: these are lost
        c.roster.forget_steps()
        install(c, successor(c, change, ready[: c.settings.num_replicas]), change.cause)
    elif c.unheard:
        return  # after a restart: a spare may still say that it is ready
    elif not c.ever_formed:
        forget_view(c)
    elif words := c.failures.of_all(change.view):
        c.finish(
            "failed", c.failures.codes.get(change.view[-1], 5), 0, f"all replicas failed, the last one so:\n{words}"
        )
    elif c.failures.calm.issuperset(change.view):
        c.finish("stopped", 5, 0, "the script ended by itself before all steps were done; `break` ends a loop early")
    elif not begin_again(c, change.old, change.cause):
        c.finish("failed", 6, 0, "every replica that held the training state is gone")


def successor(c: FleetState, change: Change, carriers: Sequence[str]) -> View:
    """Survivors in their order, ready spares in the places of the dead, the other spares attached.

    Who was asked to leave is left out, unless nobody else is known to carry the state.
    """
    peers, wanted = c.roster.peers, c.settings.num_replicas
    staying = [name for name in carriers if not peers[name].leaving]
    if not _brings_state(c, change, staying):
        staying = list(carriers)
    stays = set(staying)
    spares = [name for name in c.roster.having("ready") if name not in change.old and name not in stays]
    spares = well_linked_first(c, [name for name in spares if not peers[name].leaving])
    spares = other_hosts_first(c, spares, staying)
    # Who goes takes no place: beside it the spares tell in the roll call whether they are ahead of it.
    vacant = max(0, wanted - sum(not peers[name].leaving for name in staying))
    incoming, attached = spares[:vacant], tuple(spares[vacant:])
    members: list[str] = []
    for name in change.old:
        if name in stays:
            members.append(name)
        elif incoming:
            members.append(incoming.pop(0))
    members += [name for name in staying if name not in change.old] + incoming
    members = list(c.roster.by_host(members))
    return View(
        id=c.next_id(),
        members=tuple(members),
        attached=attached,
        relieved=relieved(c, members),
        work=work_of(c, members),
        held=held(c, members),
        saved=0 if _brings_state(c, change, staying) else c.saved,
    )


def _brings_state(c: FleetState, change: Change, staying: Iterable[str]) -> bool:
    """Whether one of them has formed the newest view that anybody is known to have formed. Who has not came as a spare,
    and may be behind; and of a checkpoint that its view was told of it may not have read anything yet."""
    peers = c.roster.peers
    newest = max((peer.view for peer in peers.values() if peer.view is not None), default=None)
    return any(peers[name].view == newest is not None for name in staying if name not in change.stale)
