"""What the guards of a step decided, as its members report it: written down once, and carried out where only the
coordinator can: who offends again is quarantined, a host that does so altogether gets no replica any more.

Every member reports the same verdict, because it follows from the same headers; the first to be heard counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.core.policy.step_decisions import escalate, escalate_fleeting
from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet.roster import QUARANTINED_AT, slot_of
from outlast.core.protocol.fleet.state import FleetState

if TYPE_CHECKING:
    from outlast.core.policy import VerdictAction

__all__ = ["judged"]


def judged(c: FleetState, now_s: float, told: m.Judged) -> None:
    """Write the verdict down; count the offence of each member that it is against, and act on repetition."""
    verdict = told.verdict
    for name in told.against or ("",):
        key = (told.step, verdict.action, name)
        if key in c.roster.judged:
            continue
        c.roster.judged.add(key)
        if not name:
            _write(c, told, verdict.action, verdict.culprit.replica)
        elif c.roster.is_alive(name):
            _against(c, name, told)


def _against(c: FleetState, name: str, told: m.Judged) -> None:
    """Who has just joined and differs may be right, and its loop at fault; not in the place of one that was wrong."""
    host, slot = c.roster.peers[name].agent, slot_of(name)
    action: VerdictAction = "replace"
    if told.verdict.confidence != "possible" or slot in c.roster.offences:
        action = _fleeting(c, slot) if told.verdict.fleeting else _lasting(c, slot, host)
    _write(c, told, action, name)
    why = f"{action.replace('_', ' ')}: {told.verdict.evidence}"
    c.condemn(name, why)  # a process that is started in its place has nothing of the old one's memory
    if action == "evict_host":
        c.roster.barred.add(host)
        for peer in [p for p in c.roster.peers.values() if p.agent == host and p.alive]:
            c.condemn(peer.name, why)


def _lasting(c: FleetState, slot: str, host: str) -> VerdictAction:
    c.roster.offences[slot] = c.roster.offences.get(slot, 0) + 1
    host_of = {slot_of(peer.name): peer.agent for peer in c.roster.peers.values() if peer.agent}
    others = [agent for agent in c.roster.agents if agent != host and agent not in c.roster.barred]
    return escalate(slot, host, c.roster.offences, host_of, others)


def _fleeting(c: FleetState, slot: str) -> VerdictAction:
    c.roster.fleeting[slot] = c.roster.fleeting.get(slot, 0) + 1
    action = escalate_fleeting(slot, c.roster.fleeting, c.settings.num_replicas)
    if action == "quarantine":
        c.roster.offences[slot] = max(QUARANTINED_AT, c.roster.offences.get(slot, 0))
    return action


def _write(c: FleetState, told: m.Judged, action: str, replica: str) -> None:
    verdict, who = told.verdict, told.verdict.culprit
    known = c.roster.peers.get(replica)
    same = who.replica == replica
    c.journal(
        "verdict",
        step=told.step,
        action=action,
        evidence=verdict.evidence,
        confidence=verdict.confidence,
        remedy=verdict.remedy,
        replica=replica,
        host=known.agent if known else who.host,
        device=who.device if same else "",
        module=who.module,
        parameter=who.parameter,
        operation=who.operation,
        where=who.where,
        microbatch=who.microbatch,
        samples=list(who.samples),
        to_step=verdict.to,
    )
