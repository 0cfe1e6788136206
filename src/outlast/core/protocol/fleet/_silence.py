"""Silence and broken paths: who is asked to go, on what evidence (protocol, 19, 20). Judgement is `core/policy`'s."""

from __future__ import annotations

from collections.abc import Iterable

from outlast.core.phases import Phase
from outlast.core.policy import EvictionBelief, EvictionDecision, EvictionPolicy, EvictionState
from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet.state import FleetState
from outlast.core.protocol.types import View

__all__ = ["agent_continued", "continued", "cut", "examined", "probed", "rows", "stalled"]


def stalled(c: FleetState, now_s: float, message: m.Stalled) -> None:
    """Somebody waits too long: have the ones it waits for looked at."""
    if c.view is None or c.change is not None:
        return
    if c.planned is not None and message.view == c.planned.id:
        c.planned_entered = True
    elif message.view != c.view.id:
        return
    for name in c.roster.alive(message.missing):
        c.stalls[name] = message
        c.tell([c.roster.peers[name].agent], m.Examine(epoch=c.epoch, member=name))


def examined(c: FleetState, now_s: float, seen: m.Examined) -> None:
    """An agent's evidence about a suspect: evict, wait, continue it or probe the paths. Unasked, it stands for itself:
    in a view of one nobody waits for who hangs."""
    asked = c.stalls.pop(seen.member, None)
    if not c.roster.is_alive(seen.member):
        return
    found, agent = _decided(c, seen, asked), c.roster.peers[seen.member].agent
    if found.action == "continue":
        c.tell([agent], m.Continue(epoch=c.epoch, member=seen.member))
        return
    # whoever is stopped outside the view holds no change up, and none holds it up
    beside = seen.state == "T" and not seen.traced and seen.member not in c.current
    if not beside and (c.view is None or c.change is not None):
        return
    if found.action == "evict":
        reason = f"rank {seen.place}: {found.reason}" if seen.place else found.reason
        if beside or c.reports.noticed(seen.member, asked.member if asked else agent, now_s):
            c.journal("suspected", replica=seen.member, evidence=reason, decision="evict")
        c.kill(seen.member, reason)
    elif found.action == "probe" and asked is not None:
        newest = c.planned if c.planned is not None and asked.view == c.planned.id else c.view
        assert newest is not None, "there is a view, or the member is beside it"
        _probe(c, seen.member, newest)


def _decided(c: FleetState, seen: m.Examined, asked: m.Stalled | None) -> EvictionDecision:
    """What the policy makes of an agent's evidence, and of what the peer says that waits."""
    waited_s, awaited_s = (asked.waited_s, asked.deadline_s) if asked else (seen.silent_s, seen.allowed_s)
    others = [other for other in c.roster.alive(c.current) if other != seen.member]
    state = EvictionState(
        kernel=seen.state,
        phase=Phase(seen.phase),
        silent_s=seen.silent_s,
        waited_s=waited_s,
        cpu_advanced=seen.cpu_advanced,
        traced=seen.traced,
        deaf=seen.deaf,
        full=seen.full,
        asked=asked is not None,
        seated=seen.member in c.current,
        alone=not others and not c.roster.count("ready"),
    )
    return _policy(c).decide(EvictionBelief(allowed_s=seen.allowed_s, awaited_s=awaited_s), state)


def _policy(c: FleetState) -> EvictionPolicy:
    return EvictionPolicy(outside_s=c.settings.outside_s)


def _probe(c: FleetState, suspect: str, view: View) -> None:
    """Ask the members of the view whom they reach; the answers are taken together a little later."""
    c.idle.add(suspect)
    if c.probing != view.id:
        c.probing = view.id
        c.rows.clear()
        c.tell(view.members, m.ProbePaths(epoch=c.epoch, view=view.id))
        c.timer(f"probe:{view.id}", 2.0 * c.settings.doubt_s)


def continued(c: FleetState, now_s: float, said: m.Continued) -> None:
    """An agent continued a member for which nobody waited."""
    text = f"{said.member} was stopped for {said.for_s:.1f} s while nobody waited for it, and was continued"
    c.journal("notice", level="warning", text=text)


def agent_continued(c: FleetState, now_s: float, said: m.AgentContinued) -> None:
    """The launcher continued an agent."""
    text = f"agent {said.agent} was stopped for {said.for_s:.1f} s, and was continued"
    c.journal("notice", level="warning", text=text)


def rows(c: FleetState, now_s: float, message: m.Rows) -> None:
    """Whom a member of the probed view reaches, in the lane of one of its ranks."""
    c.rows[message.member, message.place] = message


def probed(c: FleetState, name: str) -> None:
    """The time for answers to the probe of view `name` is over: cut the broken paths."""
    idle, c.idle, c.probing = c.idle, set(), None
    view = next((v for v in (c.view, c.planned) if v is not None and f"probe:{v.id}" == name), None)
    if view is None or c.change is not None:
        return
    alive = set(c.roster.alive(view.members))
    told = [(place, member, row.reached) for (member, place), row in c.rows.items() if row.view == view.id]
    lanes: dict[int, dict[str, tuple[str, ...]]] = {0: {}}
    for place, member, reached in told:
        if member in alive:
            lanes.setdefault(place, {})[member] = reached
    # Both must miss the other: who was busy when it was pinged reaches everybody once it pings itself. And who only
    # waits, as its agent says, but neither pings nor answers, hangs; of a replica's other ranks the agent says that.
    pairs = {
        (member, other)
        for place, answers in lanes.items()
        for member, reached in answers.items()
        for other in alive - {member} - set(reached)
        if (member not in answers[other] if other in answers else other in idle and not place)
    }
    if pairs:
        cut(c, pairs, "no path between two members")


def cut(c: FleetState, pairs: Iterable[tuple[str, str]], why: str) -> None:
    """Evict a minimum vertex cover of the broken pairs; of two, who does not answer the coordinator either."""
    members = c.view.members if c.view else ()
    age = {name: index for index, name in enumerate(members)}
    reachable = c.change.acked if c.change is not None else {member for member, _ in c.rows}
    for name in _policy(c).cut(pairs, reachable, age):
        if c.change is not None:
            c.condemn(name, why)
        else:
            c.journal("suspected", replica=name, evidence=why, decision="evict")
            c.kill(name, why)
