"""What agents and the launcher say: which replicas have started, and which have ended."""

from __future__ import annotations

from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet import _alarms, _blame, _ending
from outlast.core.protocol.fleet import change as _change
from outlast.core.protocol.fleet.roster import Peer, incarnation_of, slot_of
from outlast.core.protocol.fleet.state import FleetState

__all__ = ["agent_gone", "agent_hello", "dropped", "exited", "lingering", "raised", "spawn_failed", "spawned"]


def agent_hello(c: FleetState, now_s: float, hello: m.AgentHello) -> None:
    """An agent greets, and lists the replicas that it has."""
    if hello.epoch > c.epoch:
        c.superseded()
        return
    if not c.roster.agent_here(hello.agent, hello.pid, hello.number):
        return
    c.silent.pop(hello.agent, None)
    c.tell([hello.agent], m.Welcome(epoch=c.epoch))
    listed = set(hello.members)
    for name in hello.members:
        if c.roster.superseded(name):
            c.roster.add(name, hello.agent, "condemned")
        peer = c.roster.peers.get(name) or c.roster.add(name, hello.agent, "spawning")
        peer.agent = hello.agent
        if not peer.alive:
            c.kill(name, "the run went on without this replica")
    started, unstarted = c.roster.unlisted(hello.agent, listed)
    for name in started:
        exited(c, now_s, m.Exited(member=name, cause="exit", detail="died while its agent was out of reach"))
    for name in unstarted:
        c.tell([hello.agent], c.spawn_message(name, hello.agent, 0.0))


def agent_gone(c: FleetState, now_s: float, gone: m.AgentGone) -> None:
    """The launcher saw an agent die, and with it its replicas."""
    lost = [p.name for p in c.roster.peers.values() if p.agent == gone.agent and p.status != "gone"]
    if gone.agent not in c.roster.agents and not lost:
        return
    c.roster.agent_lost(gone.agent)
    c.journal("agent_lost", agent=gone.agent, cause=gone.cause, replicas=lost)
    detail, told = f"its agent {gone.agent} died: {gone.cause}", {end.member: end for end in gone.exits}
    for name in lost:
        exited(c, now_s, told.get(name) or m.Exited(member=name, cause="agent_lost", detail=detail))


def spawned(c: FleetState, now_s: float, spawned: m.Spawned) -> None:
    """An agent has started a replica."""
    peer = c.roster.peers.get(spawned.member)
    if peer is not None:
        peer.pid = spawned.pid
    c.journal("replica_started", replica=spawned.member, agent=spawned.agent, pid=spawned.pid)


def spawn_failed(c: FleetState, now_s: float, failed: m.SpawnFailed) -> None:
    """An agent could not start a replica."""
    c.roster.drop(failed.member, now_s)
    c.unheard.discard(failed.member)
    c.journal("notice", level="error", text=f"{failed.member} could not be started: {failed.error}")


def exited(c: FleetState, now_s: float, gone: m.Exited) -> None:
    """A process has ended: news of a replica that an agent is certain of."""
    dropped(c, now_s, gone, gone.member in c.current)


def dropped(c: FleetState, now_s: float, gone: m.Exited, of_view: bool) -> None:
    """The same of a replica that the current view may be without already. `of_view`: it interrupted one."""
    name = gone.member
    died = _ending.exited(c, gone) if c.ending is not None else None
    known = c.roster.peers.get(name)
    if known is not None and known.status == "gone":
        return
    if known is None and incarnation_of(name) <= c.roster.incarnations.get(slot_of(name), 0):
        c.roster.drop(name, now_s)  # an agent repeats what an earlier coordinator has dealt with
        c.reports.repeated(gone)
        return
    c.roster.learn(name, gone.committed)
    planned_departure = known is not None and known.leaving and gone.cause in ("left", "finished", "exit")
    c.roster.drop(name, now_s)
    c.unheard.discard(name)
    if name in c.failures.left:
        return  # it went when it said what it raised
    fault = died if died is not None else not planned_departure or name in c.current
    c.reports.exited(gone, known.committed if known else None, fault, of_view)
    _blame.ended(c, gone, fault)
    if known is not None and fault:
        _alarms.failed(c, now_s, known.agent, gone.cause)
    if c.change is not None:
        c.change.waiting.discard(name)
        c.change.acked.discard(name)
    elif name in c.current and not c.over and c.ending is None:
        _member_gone(c, name, gone)


def raised(c: FleetState, now_s: float, peer: Peer, failed: m.Failed) -> None:
    """A member said that its script raised: nobody waits for its process, which may take long to end (a device's
    driver, what the script does last). Its slot is taken until then. The last one is waited for: it ends the run."""
    if peer.name not in c.current or c.roster.alive(c.current) == [peer.name]:
        return
    c.failures.left.add(peer.name)
    c.roster.mark(peer.name, "condemned")
    c.unheard.discard(peer.name)
    c.reports.noticed(peer.name, peer.name, failed.at_s)
    detail, at_s = f"the script raised:\n{failed.error}", failed.at_s
    gone = m.Exited(member=peer.name, cause="exception", detail=detail, last_alive_s=at_s, noticed_at_s=at_s)
    c.reports.exited(gone, peer.committed, True, True)
    _alarms.failed(c, now_s, peer.agent, gone.cause)
    c.timer(f"raised:{peer.name}", c.settings.formation_s)
    if c.change is None:
        _member_gone(c, peer.name, gone)
    else:
        c.change.waiting.discard(peer.name)
        c.change.acked.discard(peer.name)


def lingering(c: FleetState, name: str) -> None:
    """Its script raised long ago, and its process has not ended."""
    if c.roster.peers[name].status == "condemned":
        c.kill(name, "its script raised, and its process did not end")


def _member_gone(c: FleetState, name: str, exited: m.Exited) -> None:
    cause = f"{name}: {exited.cause}"
    if not c.awaiting:
        _change.begin(c, cause)
        return
    c.awaiting.discard(name)
    c.disturbed = cause
    # the rest follows in _progress, once nobody is awaited
