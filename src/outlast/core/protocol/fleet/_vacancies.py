"""What is done where replicas are missing and no spare is there: fewer go on, they wait for others, or the run stops.

What is done is the policy's (`core.policy.VacancyPolicy`, by the run's record); here it is asked and carried out. Who
waits is in a view that is held: joiners are served in it and let in by planned views, and nothing is computed. Whether
to wait on is asked anew after every event, and when the time is over. A run that stops saves first, as for
`outlast stop`: its driver sees to that. Only where replicas were lost: who joins a fleet that goes on with fewer holds
up nobody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from outlast.core.policy import Replacements, VacancyDecision, VacancyState
from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet.state import FleetState
from outlast.core.protocol.types import View

__all__ = ["believed", "decided", "held", "noted", "save_awaited", "stop_if_too_few", "too_few", "wait_on"]

_LATER_S = 1e-3  # clocks may say that a time is over a little before it is


def believed(c: FleetState, now_s: float, said: m.ReplacementsBelieved) -> None:
    """The run's record has learnt of replacements."""
    c.shortage.replacements = Replacements(
        expected_s=said.expected_s, reshape_s=said.reshape_s, restart_s=said.restart_s
    )


def save_awaited(c: FleetState, now_s: float, said: m.SaveAwaited) -> None:
    """A stop waits for its save, which comes with a step: who waits for others makes it."""
    c.shortage.saving = said.waits


def held(c: FleetState, members: Sequence[str]) -> bool:
    """Whether these, who are to be the next view, or are of a held one, wait in it."""
    return _lost(c, members) and not _stops(c) and decided(c, members).action == "wait"


def noted(c: FleetState, view: View) -> None:
    """This is the next view: why its members wait, or go on with fewer, or are to stop, is written down."""
    waited = not math.isnan(c.shortage.since_s)
    if not _lost(c, view.members) or _stops(c):
        c.shortage.since_s = math.nan
        return
    found, reason = decided(c, view.members), c.settings.vacancies.reason(_belief(c), _state(c, view.members))
    if found.action == "stop":
        c.shortage.stopping = reason
    elif view.held != waited or (c.settings.vacancies.kind == "auto" and not view.held):
        _write(c, view.members, found.action, reason, found.wait_s)
    if not view.held:
        c.shortage.since_s = math.nan
    elif not waited:
        c.shortage.since_s = c.now_s


def wait_on(c: FleetState, view: View) -> None:
    """The view is formed, and held: be reminded when the time for that is over."""
    if math.isnan(c.shortage.since_s):
        c.shortage.since_s = c.now_s  # an earlier coordinator had them wait
    left_s = decided(c, view.members).wait_s
    if 0.0 < left_s < math.inf:
        c.timer("vacancy", left_s + _LATER_S)


def stop_if_too_few(c: FleetState) -> None:
    """The view is formed. Should the run stop, its driver hears it from the journal, of each coordinator once."""
    if c.shortage.stopping and not c.shortage.told and c.view is not None:
        c.shortage.told = True
        _write(c, c.view.members, "stop", c.shortage.stopping, 0.0)


def too_few(c: FleetState, num_members: int) -> bool:
    """Whether so many may not go on."""
    return num_members < min(c.settings.min_replicas, c.settings.num_replicas)


def _stops(c: FleetState) -> bool:
    """Whether the run is about to stop, and nothing is decided any more: it makes the step that is saved."""
    return bool(c.shortage.stopping) or c.shortage.saving


def _lost(c: FleetState, members: Sequence[str]) -> bool:
    """Whether some are missing who were there, or are waited for already. Who goes because it was asked to by people,
    or for an alarm, is not lost: another process takes its place, and meanwhile the others go on, unless they are too
    few."""
    if len(members) >= c.settings.num_replicas:
        return False
    before, few = [view for view in (c.view, c.planned) if view is not None], too_few(c, len(members))
    return any(
        view.held or len(members) + (0 if few else _num_let_go(c, view, members)) < len(view.members) for view in before
    )


def _num_let_go(c: FleetState, view: View, members: Sequence[str]) -> int:
    """Members of `view` that were asked to go, and are not among these. Whose end comes whatever is decided (`going`:
    its host is taken away) is not let go but lost."""
    peers, asked_out = c.roster.peers, c.roster.asked_out
    absent = [peers[name] for name in set(view.members).difference(members)]
    return sum((peer.leaving and not peer.going) or peer.name in asked_out for peer in absent)


def decided(c: FleetState, members: Sequence[str]) -> VacancyDecision:
    """What the policy has these do, who are fewer than should train."""
    return c.settings.vacancies.decide(_belief(c), _state(c, members))


def _belief(c: FleetState) -> Replacements:
    """To stop is never worth its while where nothing is saved."""
    return (
        c.shortage.replacements if c.facts.get("checkpoints") else replace(c.shortage.replacements, restart_s=math.inf)
    )


def _state(c: FleetState, members: Sequence[str]) -> VacancyState:
    wanted, since_s = c.settings.num_replicas, c.shortage.since_s
    return VacancyState(
        running=len(members),
        wanted=wanted,
        least=min(c.settings.min_replicas, wanted),
        waited_s=0.0 if math.isnan(since_s) else c.now_s - since_s,
        some_come=c.roster.may_grow(members),
    )


def _write(c: FleetState, members: Sequence[str], action: str, reason: str, wait_s: float) -> None:
    c.journal(
        "vacancy_decided",
        action=action,
        running=len(members),
        wanted=c.settings.num_replicas,
        least=min(c.settings.min_replicas, c.settings.num_replicas),
        wait_s=None if wait_s == math.inf else wait_s,
        reason=reason,
    )
