"""Alarms of a host's devices: what each is worth, and what is done (`core.policy.Prognosis` and `AlarmPolicy`).

A host, as its agent declares it, is the unit: what is wrong with one of its devices takes the host out of service. Work
is moved by a planned view, between two steps: nothing is lost and no bit changes, because shares never matter to them.
A host that was moved away from gets no replica until it has passed a test, or its alarm was shown to be false by time.
"""

from __future__ import annotations

from collections.abc import Sequence

from outlast.core.policy import ActionCosts, AlarmBelief, AlarmDecision, AlarmPolicy, AlarmState, alarm_name
from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet._host_places import enough_without
from outlast.core.protocol.fleet._vacancies import too_few
from outlast.core.protocol.fleet.state import FleetState

__all__ = ["SEVERITIES", "emptied", "failed", "heard", "opened", "tested", "weigh"]

SEVERITIES = ("notice", "warning", "fatal")
_OF_THE_HOST = ("signal", "exception", "evicted", "agent_lost")
_AT_ONCE_S = 1.0  # replicas of a host that die within that die of one failure
_UNSAVED_S = 600.0  # of work that no checkpoint holds, where no alarm had one asked for yet
_PLANNED_S = 0.5  # what a planned view costs the run, before there was one
_AWAY_S = 60.0  # how long a host that is well is out of work until that is known


def heard(c: FleetState, now_s: float, note: m.DeviceNoted) -> None:
    """An agent speaks of its host: an alarm, or the result of a test."""
    if note.source == "test":
        tested(c, now_s, note.member, note.action)
    elif note.action in SEVERITIES and note.member in c.roster.agents:
        opened(c, now_s, note.member, alarm_name(note.action, note.evidence), note.evidence)
        weigh(c, now_s, note.member, first=True)


def opened(c: FleetState, now_s: float, agent: str, name: str, evidence: str) -> None:
    """An alarm of a host; nothing follows from it here."""
    c.prognosis = c.prognosis.alarm(agent, name, now_s)
    c.alarms.setdefault(agent, evidence)


def tested(c: FleetState, now_s: float, agent: str, result: str) -> None:
    """A host that answers rightly was doubted in vain; one that does not is out for good."""
    if result == "passed":
        c.prognosis = c.prognosis.cleared(agent)
        _settle(c, agent)
    elif result == "failed":
        c.prognosis = c.prognosis.failed(agent, now_s)
        c.alarms.pop(agent, None)
        c.roster.barred.add(agent)


def emptied(c: FleetState, agent: str) -> None:
    """Its work goes elsewhere, and it gets none until it was found well."""
    c.roster.doubted.add(agent)
    c.prognosis = c.prognosis.emptied(agent)


def _settle(c: FleetState, agent: str) -> None:
    c.alarms.pop(agent, None)
    c.roster.doubted.discard(agent)
    c.roster.look()


def failed(c: FleetState, now_s: float, agent: str, cause: str) -> None:
    """A replica of the host has died: an open alarm of it was true."""
    if cause in _OF_THE_HOST and agent and now_s - c.failed_s.get(agent, -_AT_ONCE_S) >= _AT_ONCE_S:
        c.failed_s[agent] = now_s
        c.prognosis = c.prognosis.failed(agent, now_s)
        c.alarms.pop(agent, None)


def weigh(c: FleetState, now_s: float, agent: str, *, first: bool = False) -> None:
    """Decide what to do about a host's open alarm; again from time to time, as what is unsaved grows and the alarm
    fades."""
    c.prognosis = c.prognosis.closed(now_s)
    if agent not in c.prognosis.open:
        _settle(c, agent)
        return
    name, since_s = c.prognosis.open[agent]
    policy, kind = AlarmPolicy(kind=c.settings.on_alarm), c.prognosis.kind(name)
    belief = AlarmBelief(p=kind.p, delay_s=kind.delay_s)
    c.timer(f"outlook:{agent}", policy.again_s(belief))
    if c.over or c.ending is not None or c.view is None:
        return
    members = [p.name for p in c.roster.peers.values() if p.agent == agent and p.alive and not p.leaving]
    successors = _successors(c, agent)
    staying = _num_staying(c, agent)
    elsewhere = bool(successors) or (staying > 0 and _others(c, agent))
    elsewhere = elsewhere and not too_few(c, staying + len(successors)) and enough_without(c, agent)
    state = AlarmState(
        costs=_costs(c, agent, elsewhere),
        unsaved_s=min(now_s - c.saved_s, _UNSAVED_S),
        since_s=now_s - since_s,
        can_move=elsewhere and bool(members),
    )
    found = policy.decide(belief, state)
    if first or found.outlook.action != "wait":
        _tell(c, agent, found, members, successors)
    if found.acts:
        _act(c, now_s, agent, found, members)


def _others(c: FleetState, agent: str) -> bool:
    """Whether a replacement could be started on another host."""
    out = c.roster.barred | c.roster.doubted | c.roster.retired_agents | c.roster.drained_agents
    return bool(c.roster.agents - {agent} - out)


def _num_staying(c: FleetState, agent: str) -> int:
    """Members on other hosts, which hold the state until a replacement has it: none is started before."""
    peers = [c.roster.peers[name] for name in c.current]
    return sum(peer.agent != agent and peer.alive and not peer.leaving for peer in peers)


def _successors(c: FleetState, agent: str) -> list[str]:
    return [name for name in c.roster.having("ready") if c.roster.peers[name].agent != agent]


def _costs(c: FleetState, agent: str, elsewhere: bool) -> ActionCosts:
    """In seconds of the whole run. A death that others outlast loses no step; one of the only host loses what no
    checkpoint holds."""
    outages = c.outages
    failure_s = sum(outages) / len(outages) if outages else c.settings.failure_s
    here = [name for name in c.current if c.roster.peers[name].agent == agent]
    share = len(here) / max(1, len(c.current))
    keeps = bool(c.facts.get("checkpoints"))
    return ActionCosts(
        failure_s=failure_s,
        save_s=c.settings.save_s if keeps else 1e9,
        move_s=sum(c.planned_s.values()) / len(c.planned_s) if c.planned_s else _PLANNED_S,
        idle_s=_AWAY_S * share if elsewhere and not _successors(c, agent) else 0.0,
        exposure=float(len(here) == len(c.current)) if keeps else 0.0,
    )


def _tell(c: FleetState, agent: str, found: AlarmDecision, members: Sequence[str], successors: Sequence[str]) -> None:
    (name, _), outlook = c.prognosis.open[agent], found.outlook
    moved = outlook.action == "move"
    c.journal(
        "alarm_weighed",
        host=agent,
        alarm=name,
        evidence=c.alarms.get(agent, ""),
        chance=outlook.chance,
        delay_s=c.prognosis.kind(name).delay_s,
        action=outlook.action,
        costs={action: cost for action, cost in outlook.costs.items() if cost < 1e8},
        replicas=list(members) if moved else [],
        successors=list(successors[: len(members)]) if moved else [],
        told_only=outlook.action != "wait" and not found.acts,
    )


def _act(c: FleetState, now_s: float, agent: str, found: AlarmDecision, members: Sequence[str]) -> None:
    """A save is asked for by whoever reads in the journal that it was decided (the driver)."""
    if found.outlook.action == "save":
        c.saved_s = now_s
    elif found.outlook.action == "move":
        emptied(c, agent)
        for name in members:
            peer = c.roster.peers[name]
            peer.leaving = c.leaving = True
            if peer.joined:  # who has yet to say hello is told then
                c.dismiss(name)
