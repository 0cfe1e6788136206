"""Silence and broken paths: who is asked to go, on what evidence (protocol, 19, 20). Judgement is `core/policy`'s."""

from __future__ import annotations

from collections.abc import Iterable

from outlast.core.phases import Phase
from outlast.core.policy.evictions import SilenceEvidence, judge, vertex_cover
from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet.state import FleetState

__all__ = ["continued", "cut", "examined", "probed", "rows", "stalled"]


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
    """An agent's evidence about a suspect: evict, wait, or probe the paths. Unasked, it stands for itself: in a view
    of one nobody waits for who hangs."""
    asked = c.stalls.pop(seen.member, None)
    if (
        seen.state == "T"
        and not seen.traced
        and c.roster.is_alive(seen.member)
        and _stopped_again(c, seen, bool(asked))
    ):
        return
    if c.view is None or c.change is not None or not c.roster.is_alive(seen.member):
        return
    waited_s, deadline_s = (asked.waited_s, asked.deadline_s) if asked else (seen.silent_s, seen.allowed_s)
    evidence = SilenceEvidence(
        state=seen.state,
        traced=seen.traced,
        phase=Phase(seen.phase),
        silent_s=seen.silent_s,
        cpu_advanced=seen.cpu_advanced,
        deaf=seen.deaf,
        allowed_s=seen.allowed_s,
        waited_s=waited_s,
        deadline_s=deadline_s,
    )
    verdict = judge(evidence, c.settings.outside_s)
    if verdict.decision == "evict":
        if c.reports.noticed(seen.member, asked.member if asked else c.roster.peers[seen.member].agent, now_s):
            c.journal("suspected", replica=seen.member, evidence=verdict.reason, decision="evict")
        c.kill(seen.member, verdict.reason)
    elif verdict.decision == "probe" and asked is not None:
        newest = c.planned if c.planned is not None and asked.view == c.planned.id else c.view
        c.idle.add(seen.member)
        if c.probing != newest.id:
            c.probing = newest.id
            c.rows.clear()
            c.tell(newest.members, m.ProbePaths(epoch=c.epoch, view=newest.id))
            c.timer(f"probe:{newest.id}", 2.0 * c.settings.doubt_s)


def _stopped_again(c: FleetState, seen: m.Examined, asked: bool) -> bool:
    """Whether that is all about a member that is stopped. The only holder of the state is continued and waited for, as
    long as a script may be silent; whoever is in no view has been continued once, and is replaced (27)."""
    name, agent = seen.member, c.roster.peers[seen.member].agent
    if name in c.current:
        others = [other for other in c.roster.alive(c.current) if other != name]
        if others or c.roster.count("ready") or seen.silent_s > c.settings.outside_s:
            return False
        c.tell([agent], m.Continue(epoch=c.epoch, member=name))
        return True
    if not asked:
        c.journal("suspected", replica=name, evidence="stopped again, though it was continued", decision="evict")
        c.kill(name, "stopped again, though it was continued")
    return True


def continued(c: FleetState, now_s: float, said: m.Continued) -> None:
    """An agent continued a member for which nobody waited."""
    text = f"{said.member} was stopped for {said.for_s:.1f} s while nobody waited for it, and was continued"
    c.journal("notice", level="warning", text=text)


def rows(c: FleetState, now_s: float, message: m.Rows) -> None:
    """Whom a member of the probed view reaches."""
    c.rows[message.member] = message


def probed(c: FleetState, name: str) -> None:
    """The time for answers to the probe of view `name` is over: cut the broken paths."""
    idle, c.idle, c.probing = c.idle, set(), None
    view = next((v for v in (c.view, c.planned) if v is not None and f"probe:{v.id}" == name), None)
    if view is None or c.change is not None:
        return
    answers = {member: row.reached for member, row in c.rows.items() if row.view == view.id}
    alive = set(c.roster.alive(view.members))
    answers = {member: reached for member, reached in answers.items() if member in alive}
    # Both must miss the other: who was busy when it was pinged reaches everybody once it pings itself. And who only
    # waits, as its agent says, but neither pings nor answers, hangs.
    pairs = {
        (member, other)
        for member, reached in answers.items()
        for other in alive - {member} - set(reached)
        if (member not in answers[other] if other in answers else other in idle)
    }
    if pairs:
        cut(c, pairs, "no path between two members")


def cut(c: FleetState, pairs: Iterable[tuple[str, str]], why: str) -> None:
    """Evict a minimum vertex cover of the broken pairs; of two, who does not answer the coordinator either."""
    members = c.view.members if c.view else ()
    age = {name: index for index, name in enumerate(members)}
    reachable = c.change.acked if c.change is not None else set(c.rows)
    for name in vertex_cover(pairs, reachable=reachable, age=age):
        if c.change is not None:
            c.condemn(name, why)
        else:
            c.journal("suspected", replica=name, evidence=why, decision="evict")
            c.kill(name, why)
