"""From complete headers to a verdict that every member of the view shares, over this member's port.

What is asked, in which order, and what follows is a course of the protocol (`core/protocol/step/verdict.py`): if the
headers show reason to look closer, members tell each other once more what they found, still before the step is decided;
so a death in between leaves nothing half done. A verdict that is an outcome rides in `Meta`; one that is none (somebody
must go, the run must stop) leaves the step undecided. Here is nothing but the way to the sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outlast.core.phases import Phase
from outlast.core.policy import Culprit, Ruling
from outlast.core.protocol import Header, RollEntry, Said, View
from outlast.core.protocol import messages as m
from outlast.core.protocol.slices import Slice, Words
from outlast.core.protocol.step import verdict as course
from outlast.runtime.checks.guards import Guarding
from outlast.runtime.checks.state_comparison import Comparison, diverged
from outlast.runtime.view.courses import carry_out, seat_of
from outlast.runtime.view.port import ViewPort

__all__ = ["confer", "examine", "report", "roll_evidence"]

Parts = Callable[[], Sequence[tuple[str, int]]]  # one fingerprint for each tensor of my state


def roll_evidence(view: View, parts: Parts) -> course.StepEvidence:
    """What this member brings to a roll call."""
    return _evidence(view, parts)


def examine(
    port: ViewPort,
    guards: Guarding,
    headers: Sequence[Header],
    *,
    view: View,
    comparison: Comparison | None,
    parts: Parts,
    said: Said | None,
    look_again: Callable[[Sequence[Slice]], Words],
    rows: course.RowEvidence | None,
) -> None:
    """All headers are there: what they show without anything being computed again. Raises what `examined` does."""
    entries = comparison.entries if comparison is not None else None
    found = _evidence(view, parts, entries=entries, said=said, look_again=look_again, rows=rows)
    carry_out(port, course.examined(seat_of(port), guards, headers, found))


def _evidence(
    view: View,
    parts: Parts,
    *,
    entries: Sequence[RollEntry] | None = None,
    said: Said | None = None,
    look_again: Callable[[Sequence[Slice]], Words] = lambda _: {},
    rows: course.RowEvidence | None = None,
) -> course.StepEvidence:
    return course.StepEvidence(
        view=view, entries=entries, parts=parts, said=said, look_again=look_again, rows=rows, diverged=diverged
    )


def confer(port: ViewPort, guards: Guarding, headers: Sequence[Header], findings: Sequence[Culprit]) -> Ruling | None:
    """The ruling on this step, the same on all members; `findings`: what I found when I looked closer. Raises
    ViewAbandoned where the step must be done again without somebody, and what ends this replica or the run (Evicted,
    GuardStop, StateDiverged)."""
    if guards.suspects(headers):
        port.enter(Phase.HEADER)
    return carry_out(port, course.confer(seat_of(port), guards, headers, findings))


def report(port: ViewPort, ruling: Ruling | None) -> None:
    """Tell the coordinator; every member does, and the first counts. A step that was simply applied is not worth it."""
    if ruling is None or not ruling.verdict.evidence:
        return
    port.tell_coordinator([m.Judged(member=port.env.me, step=ruling.evidence.step, verdict=ruling.verdict)])
