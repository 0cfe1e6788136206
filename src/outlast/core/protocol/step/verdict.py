"""From a step's headers to its verdict: every check, in its order, as courses that sockets and virtual time both run.

`effects.py` says what a course is; `deciding.py` is the course of the whole step, of which these are the second half.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from outlast.core.policy.guard_records import Culprit, GuardEvidence, Guards, GuardState, Ruling
from outlast.core.policy.step_decisions import agree, decide, unreproduced
from outlast.core.protocol import messages as m
from outlast.core.protocol.disputes import Said
from outlast.core.protocol.row_plans import RowsNote
from outlast.core.protocol.slices import Slice, Words, accused_slices, bucket_name, settled
from outlast.core.protocol.step.effects import Act, AskAll, ChannelName, Course, Seat, TellFleet
from outlast.core.protocol.types import Header, RollEntry, View
from outlast.errors import Evicted, GuardStop, OutlastError, StateDiverged, ViewAbandoned

__all__ = [
    "PartRows", "RowEvidence", "StateDifference", "StepEvidence", "StepGuards", "against_whom", "checked", "confer",
    "examined", "first_difference", "same_states",
]  # fmt: skip

PartRows = tuple[tuple[str, int], ...]
"""Name and fingerprint of each tensor of a part of the state."""


class StepGuards(Protocol):
    """What watches the steps. `rows`: fingerprints of the tensors in a step's part of the state."""

    policy: Guards | None
    state: GuardState
    undecided: str

    @property
    def can_rewind(self) -> bool: ...
    def suspects(self, headers: Sequence[Header]) -> bool: ...
    def evidence(self, headers: Sequence[Header], culprits: Sequence[Culprit], part: str) -> GuardEvidence: ...
    def rule(self, headers: Sequence[Header], culprits: Sequence[Culprit], part: str) -> Ruling | None: ...
    def rows(self, step: int) -> PartRows: ...


class RowEvidence(Protocol):
    """What is known of a robust rule's rows. `false`: whether a reducer's slice is not what the rows give; None: it
    cannot be told here."""

    def refuse_bad_rows(self, notes: Sequence[RowsNote], leaves: Mapping[str, Sequence[int]]) -> None: ...
    def false(self, bucket: int, reducer: int) -> bool | None: ...


class StateDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Members at one step whose states are not equal. `part`: the first tensor that differs, of `num_parts`; `there`:
    all who are at that step; `untrained`: they are as the run begins with them."""

    step: int
    part: str
    num_parts: int
    there: tuple[RollEntry, ...]
    differing: tuple[str, ...]
    majority: bool
    text: str
    untrained: bool = False

    @property
    def joined(self) -> tuple[str, ...]:
        """Who of them came in by replaying, and has committed nothing yet."""
        return tuple(entry.member for entry in self.there if entry.joined)


@dataclass(frozen=True, kw_only=True)
class StepEvidence:
    """What a member brings to a roll call, and to the checks of a step beside the headers. `entries`: the view's roll,
    in its first step; `parts`: fingerprints of my state by tensor; `said`: what all have committed to, None without
    audits; `diverged`: the error that states which differ end in; `culprits`: what I found when I looked closer."""

    view: View
    parts: Callable[[], Sequence[tuple[str, int]]]
    diverged: Callable[[View, StateDifference], OutlastError]
    entries: Sequence[RollEntry] | None = None
    said: Said | None = None
    look_again: Callable[[Sequence[Slice]], Words] = lambda _: {}
    rows: RowEvidence | None = None
    culprits: Callable[[], Sequence[Culprit]] = tuple


# --- the order -------------------------------------------------------------------------------------------------------
def checked(seat: Seat, guards: StepGuards, headers: Sequence[Header], found: StepEvidence) -> Course[Ruling | None]:
    """Everything between complete headers and the decision. Raises what `examined` and `confer` do."""
    yield from examined(seat, guards, headers, found)
    yield Act(what="look closer", headers=tuple(headers))
    return (yield from confer(seat, guards, headers, found.culprits()))


def examined(seat: Seat, guards: StepGuards, headers: Sequence[Header], found: StepEvidence) -> Course[None]:
    """What headers show without anything being computed again: states, audits, reduced slices, rows. Raises
    ViewAbandoned, on every member alike, where the step must be done again, and what `diverged` and rows do."""
    audits = seat.member.audits
    if found.entries is not None:
        told = [
            msgspec.structs.replace(entry, committed=header.step, fingerprint=header.state[1])
            for entry, header in zip(found.entries, headers, strict=True)
        ]
        yield from same_states(seat, guards, found, told, headers[0].step)
        audits.compared(headers[0].step)
    if found.said is not None:
        with seat.lock:
            audits.can_rewind = guards.can_rewind
            seat.member.audit(headers, found.said)
        guards.undecided = audits.undecided
    yield from _slices(seat, found.view, headers, found.look_again)
    if found.rows is not None:
        yield from _rows(seat, found.view, headers, found.rows)


def confer(
    seat: Seat, guards: StepGuards, headers: Sequence[Header], findings: Sequence[Culprit]
) -> Course[Ruling | None]:
    """The ruling on this step, the same on all members; `findings`: what I found when I looked closer. Raises
    ViewAbandoned where the step must be done again without somebody, and what ends this replica or the run (Evicted,
    GuardStop, StateDiverged)."""
    culprits: list[Culprit] = []
    part = ""
    if guards.suspects(headers):
        culprits, part = yield from _look_closer(seat, guards, headers, findings)
    ruling = guards.rule(headers, culprits, part)
    if ruling is not None and (ruling.evidence.differing or against_whom(ruling.evidence)):
        seat.member.audits.noticed(ruling.evidence.step, ", ".join(against_whom(ruling.evidence)))
    if ruling is not None and ruling.verdict.before_decision:
        yield from _refuse(seat, ruling)
    return ruling


# --- states ----------------------------------------------------------------------------------------------------------
def same_states(
    seat: Seat, guards: StepGuards, found: StepEvidence, entries: Sequence[RollEntry], step: int = -1
) -> Course[None]:
    """Compare what members say of their states, in a roll call (`step` -1), in a view's first step, or before somebody
    is fed who joins a view that is held back. Where most are equal and the guards replace such replicas, those that
    differ must go: ViewAbandoned on the others, Evicted on them. Else what `diverged` makes of it, on every member
    alike. Not in the first view's roll, where no state has been trained yet."""
    groups: dict[tuple[int, int], list[str]] = defaultdict(list)
    for entry in entries:
        if entry.fingerprint:  # 0: not told, as its member does not know that this is the end
            groups[entry.committed, entry.fingerprint].append(entry.member)
    steps = [at for at, _ in groups]
    double = next((at for at in steps if steps.count(at) > 1), None)
    if double is None:
        return
    said = (yield AskAll(step, {"parts": tuple(found.parts())}, roll=step < 0))["parts"]
    there = tuple(entry for entry in entries if entry.committed == double and entry.fingerprint)
    part, count = first_difference({entry.member: said[entry.member] for entry in there})
    differing, majority = _unlike(there)
    text = "; ".join(f"{', '.join(names)} at step {at}: {value:016x}" for (at, value), names in groups.items())
    difference = StateDifference(
        step=double,
        part=part,
        num_parts=count,
        there=there,
        differing=differing,
        majority=majority,
        text=text,
        untrained=found.view.start and step < 0,
    )
    if not difference.untrained:
        yield from _expel(seat, guards, difference)
    raise found.diverged(found.view, difference)


def _unlike(there: Sequence[RollEntry]) -> tuple[tuple[str, ...], bool]:
    """(who is not like the majority, whether there is one). A copy may be one of a memory that was wrong by then, so it
    speaks for nobody; where only one has a state of its own, copies can be found wrong, and it cannot."""
    own = {entry.member: entry.fingerprint for entry in there if not entry.copied}
    if len(own) > 1:
        wrong, majority = agree(own)
        if not majority:
            return tuple(own), False
        right = next(value for name, value in own.items() if name not in wrong)
        return tuple(entry.member for entry in there if entry.fingerprint != right), True
    wrong, majority = agree({entry.member: entry.fingerprint for entry in there})
    return (wrong, majority) if own.keys().isdisjoint(wrong) else (tuple(entry.member for entry in there), False)


def first_difference(rows: Mapping[str, PartRows]) -> tuple[str, int]:
    """(the first part that is not the same on all, how many are not). Parts that only some have differ."""
    tables = [dict(table) for table in rows.values()]
    names = list(dict.fromkeys(name for table in tables for name in table))
    different = [name for name in names if len({table.get(name) for table in tables}) > 1]
    changing = "what changed while it was compared (is state=... updated inside the inner loop?)"
    shown = different[0].removeprefix("/model/").removeprefix("/") if different else changing
    return shown, len(different)


def _expel(seat: Seat, guards: StepGuards, found: StateDifference) -> Course[None]:
    """Where most are equal and the guards replace who is not, those must go."""
    policy = guards.policy
    if policy is None or policy.divergence != "replace" or not policy.agreement or not found.majority:
        return
    wrong = [entry for entry in found.there if entry.member in found.differing]
    evidence = GuardEvidence(
        step=found.step,
        num_members=len(found.there),
        loss=0.0,
        culprits=tuple(Culprit(replica=e.member, host=e.audit.host, device=e.audit.device) for e in wrong),
        part=found.part,
        differing=found.differing,
        joined=tuple(entry.member for entry in wrong if entry.joined),
    )
    yield from _refuse(seat, Ruling(verdict=decide(policy, guards.state, evidence), evidence=evidence))


# --- slices and rows -------------------------------------------------------------------------------------------------
def _slices(
    seat: Seat, view: View, headers: Sequence[Header], look_again: Callable[[Sequence[Slice]], Words]
) -> Course[None]:
    """Somebody found a slice to be false: all compute it once more, and see who was wrong."""
    accused = accused_slices(headers)
    if not accused:
        return
    step = headers[0].step
    said = (yield AskAll(step, {"slices": look_again(accused)}))["slices"]
    findings = [found for key in accused for found in settled(step, key, headers, said)]
    with seat.lock:
        seat.member.audits.hold(view.id, findings)
    what = ", ".join(f"bucket {bucket_name(bucket)} by {reducer}" for bucket, reducer in accused)
    names = ", ".join(dict.fromkeys(found.culprit for found in findings))
    raise ViewAbandoned(f"audit: what was reduced in step {step} is not what the sums give ({what}): {names}")


def _rows(seat: Seat, view: View, headers: Sequence[Header], rows: RowEvidence) -> Course[None]:
    """What headers say of a robust rule's rows and of who reduced them: all vote on the first who is accused."""
    with seat.lock:
        _, plan = seat.member.standing()
    rows.refuse_bad_rows([header.rows for header in headers], plan.leaves)
    accusations = sorted({(b, name, h.member) for h in headers for b, name in h.rows.accused})
    if not accusations:
        return
    (bucket, reducer, accuser), step = accusations[0], headers[0].step
    members = tuple(header.member for header in headers)
    false = rows.false(bucket, members.index(reducer)) if seat.me not in (reducer, accuser) else seat.me == accuser
    culprit = accuser if false is False else reducer
    told = m.Accused(
        member=seat.me,
        view=view.id,
        step=step,
        bucket=bucket,
        reducer=reducer,
        accuser=accuser,
        culprit=culprit,
        members=members,
        at_s=seat.now_s(),
    )
    try:
        votes = (yield AskAll(step, {"vote": culprit}))["vote"]
    except ViewAbandoned:  # whoever has left meanwhile had every vote
        yield TellFleet((told,))
        raise
    yield TellFleet((told,))
    against = sum(vote == reducer for vote in votes.values())
    raise ViewAbandoned(
        f"{accuser} found the slice of bucket {bucket_name(bucket)} that {reducer} reduced to be false; "
        f"{against} of {len(votes)} members say so too"
    )


# --- the closer look -------------------------------------------------------------------------------------------------
def _look_closer(
    seat: Seat, guards: StepGuards, headers: Sequence[Header], findings: Sequence[Culprit]
) -> Course[tuple[list[Culprit], str]]:
    """Everybody's findings in the view's order, and the name of what differs."""
    step = headers[0].step
    who = Culprit(replica=seat.me, host=seat.host, device=seat.device)
    differ = guards.evidence(headers, (), "").differing
    words: dict[ChannelName, Any] = {"closer look": tuple(findings) or ((who,) if differ else ())}
    if differ:
        words["parts"] = guards.rows(step)
    said = yield AskAll(step, words)
    part = ""
    if differ:
        part, count = first_difference(said["parts"])
        part += f" and {count - 1} more" if count > 1 else ""
    return [culprit for header in headers for culprit in said["closer look"][header.member]], part


def against_whom(evidence: GuardEvidence) -> tuple[str, ...]:
    """The members that a replacement is about."""
    if evidence.differing:
        return evidence.differing
    return tuple(dict.fromkeys(culprit.replica for culprit in unreproduced(evidence)))


def _refuse(seat: Seat, ruling: Ruling) -> Course[None]:
    """The step is not decided: it is done again without who was wrong, or the run ends here."""
    verdict, evidence = ruling.verdict, ruling.evidence
    against = against_whom(evidence) if verdict.action != "stop" else ()
    if verdict.evidence:
        yield TellFleet((m.Judged(member=seat.me, step=evidence.step, verdict=verdict, against=against),))
    where = f"replica {seat.me}, step {evidence.step}"
    if verdict.action == "stop":
        kind = StateDiverged if evidence.differing else GuardStop
        raise kind(verdict.evidence, where=where, did="nothing was committed", remedy=verdict.remedy)
    if seat.me in against:
        raise Evicted(verdict.evidence, where=where, did="the run goes on without it", remedy=verdict.remedy)
    names = ", ".join(against)
    with seat.lock:
        answers = seat.member.lost((), f"{names}: {verdict.evidence}", seat.now_s(), stale=against)
    yield TellFleet(tuple(answers))
    raise ViewAbandoned(f"{names} must go: {verdict.evidence}")
