"""The timeline: one row for each thing worth telling, in the order it happened.

Role: the words. Each event is described in one place, so that terminal, `why` and page tell the same story. Pure.
Not for cost: that is `_accounting`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import msgspec

from outlast.core import events as ev
from outlast.observe import checkpoint_words
from outlast.observe.rounding import counted, format_s

__all__ = ["Row", "row_of", "surely_stranger", "timeline"]

_ALWAYS = (
    ev.RunStarted, ev.Recovery, ev.CoordinatorLost, ev.AgentLost, ev.Refused, ev.VerdictReached, ev.AuditMismatch,
    ev.AlarmWeighed, ev.Asked, ev.DeviceFinding, ev.Stall, ev.RunFinished, ev.VacancyDecided,
)  # fmt: skip


_NUM_STALLS = 10


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `since_s`: seconds since the run's start. The figures are None where the event has none."""

    at_s: float
    since_s: float
    kind: str
    what: str
    level: Literal["info", "warning", "error"] = "info"
    noticed_by: str | None = None
    detect_s: float | None = None
    microbatches_recomputed: int | None = None
    downtime_s: float | None = None


def surely_stranger(event: ev.Refused) -> bool:
    """Whether it was a stranger for certain: who only ended a connection, or was sent away with a greeting half said,
    may be a process of the run that was struck as it connected."""
    return event.stranger and not event.reason.startswith("a connection that ")


def timeline(events: Iterable[ev.AnyEvent], *, everything: bool = False, start_s: float | None = None) -> list[Row]:
    """Rows for the events that matter to a reader, by time; with `everything`, for all but progress as they were told.

    An exit or a suspicion that led to a recovery is told by its recovery; strangers are told of once.
    `start_s`: when the run began (Unix seconds); by default the first of `events` says so.
    """
    events = list(events)
    if not events:
        return []
    start_s = events[0].at_s if start_s is None else start_s
    events = events if everything else _with_strangers_once(_few_stalls(events))
    told = {event.replica for event in events if isinstance(event, ev.Recovery)}
    rows = [
        row_of(event, start_s)
        for event in events
        if not isinstance(event, ev.ProgressMade | ev.StepAnatomy) and (everything or _matters(event, told))
    ]
    # Some are written down later than they ended: that a step was long is known with the next ones.
    return rows if everything else sorted(rows, key=lambda row: row.at_s)


def _few_stalls(events: list[ev.AnyEvent]) -> list[ev.AnyEvent]:
    """Where a loop is held up again and again (an evaluation, say) the longest few stand for all of them."""
    stalls = sorted((e for e in events if isinstance(e, ev.Stall)), key=lambda e: e.seconds)
    hidden = {id(event) for event in stalls[:-_NUM_STALLS]}
    return [event for event in events if id(event) not in hidden]


def _with_strangers_once(events: Sequence[ev.AnyEvent]) -> list[ev.AnyEvent]:
    """The events, with one alone about strangers: the first, which counts all of them and names where else they
    spoke."""
    strangers = [event for event in events if isinstance(event, ev.Refused) and event.stranger]
    if not strangers:
        return list(events)
    counts: dict[tuple[str, str], int] = {}
    for event in strangers:
        counts[event.place, event.reason] = max(event.count, counts.get((event.place, event.reason), 0))
    places = list(dict.fromkeys(event.place for event in strangers))
    place = places[0] if len(places) == 1 else f"{places[0]} and {counted(len(places) - 1, 'other socket')}"
    sure = next((event for event in strangers if surely_stranger(event)), strangers[0])
    total = sum(counts.values())
    whole = msgspec.structs.replace(strangers[0], count=total, place=place, peer=sure.peer, reason=sure.reason)
    return [whole if event is strangers[0] else event for event in events if event not in strangers[1:]]


def row_of(event: ev.AnyEvent, start_s: float) -> Row:
    """The row of one event, in a run that began at `start_s`."""
    what, level = _describe(event)
    row = Row(
        at_s=event.at_s, since_s=event.at_s - start_s, kind=str(event.__struct_config__.tag), what=what, level=level
    )
    match event:
        case ev.Recovery():
            return msgspec.structs.replace(
                row,
                noticed_by=event.noticed_by,
                detect_s=event.detect_s,
                downtime_s=event.downtime_s,
                microbatches_recomputed=event.microbatches_recomputed,
            )
        case ev.CoordinatorLost() | ev.ReplicaExited():
            return msgspec.structs.replace(row, noticed_by=event.noticed_by)
    return row


def _matters(event: ev.AnyEvent, told: Collection[str]) -> bool:
    match event:
        case ev.Notice():
            return event.level != "info"
        case ev.CoordinatorStarted():
            return event.takeover
        case ev.ViewInstalled():
            return event.planned
        case ev.JoinerCaughtUp():
            return True
        case ev.Suspected():
            return event.decision == "evict" and event.replica not in told
        case ev.RowsAdmitted():
            return event.action != "go" or event.lowered or _unprotected(event)
        case ev.ReducerAccused():
            return True
        case ev.DataTrouble():
            return event.what != "skipped" or _is_told(event)
        case ev.ReplicaExited():
            return event.cause not in {"finished", "left"} and event.replica not in told
    return isinstance(event, _ALWAYS) or checkpoint_words.matters(event)


def _describe(event: ev.AnyEvent) -> tuple[str, Literal["info", "warning", "error"]]:
    match event:
        case ev.RunStarted():
            spares = f" and {counted(event.num_spares, 'spare')}" if event.num_spares else ""
            return f"run {event.run_id} started with {counted(event.num_replicas, 'replica')}{spares}", "info"
        case ev.RunFinished():
            detail = f": {_first_line(event.detail)}" if event.detail else ""
            level: Literal["info", "warning", "error"] = "error" if event.outcome == "failed" else "info"
            return f"run {event.outcome} after {counted(event.steps, 'step')}{detail}", level
        case ev.Recovery():
            lost = f", {counted(event.lost_steps, 'step')} lost" if event.lost_steps else ""
            detail = f" ({_first_line(event.detail)})" if event.detail else ""
            step = f" in step {event.step}" if event.step else ""
            cause = event.cause if event.cause == event.replica else f"{event.replica}: {event.cause}"
            return f"{cause}{detail}; recovered{step}{lost}", "warning"
        case ev.Stall():
            who = f"{event.replica} was in {_place(event.phase)}" if event.replica else _waited(event.phase)
            usual = f"step {event.step} took {format_s(event.seconds)} longer than usual ({format_s(event.usual_s)})"
            return f"{usual}: {who}", "warning"
        case ev.Refused():
            return _describe_refusal(event), "warning"
        case ev.Notice():
            return event.text, event.level
        case ev.Suspected():
            verdict = "evicted" if event.decision == "evict" else "given time"
            return f"{event.replica} suspected: {event.evidence}; {verdict}", "warning"
        case ev.AuditMismatch():
            where = f" ({event.host}, {event.device})" if event.host else ""
            level = "error" if event.verdict == "undecided" else "warning"
            return f"audit: {event.evidence}: {event.verdict}{where}; held until settled", level
        case ev.DeviceFinding():
            who = event.replica or event.host
            return (
                f"{who} ({event.device}): {event.evidence}" if event.device else f"{who}: {event.evidence}",
                "warning",
            )
        case ev.AlarmWeighed():
            return _describe_alarm(event), "warning"
        case ev.DataTrouble():
            return _describe_data(event), "warning"
        case ev.Asked():
            said = f"asked to {event.what} {event.about}" if event.what != "scale" else f"asked for {event.about}"
            return f"{said}: {event.text}" + ("" if event.accepted else " (nothing was changed)"), "info"
        case ev.SparesHeld():
            return _describe_spares(event), "info"
        case ev.StateCertified():
            return f"the state after step {event.step - 1} is certified at {event.share:g}", "info"
        case ev.VerdictReached():
            return _describe_verdict(event), "error" if event.action == "stop" else "warning"
    return _describe_process(event)


def _describe_spares(event: ev.SparesHeld) -> str:
    less = f" (the policy asks for {event.worth})" if event.worth > event.number else ""
    return f"{counted(event.number, 'spare')} from now on{less}: {event.reason}"


def _describe_refusal(event: ev.Refused) -> str:
    """Who was not let in, and whether it may have been one of the run's own."""
    if not event.stranger:
        at = f" at {event.place}" if event.place else ""
        return f"refused{at}: {event.reason}, from {event.peer} ({counted(event.count, 'time')} so far)"
    more = f"; {event.count - 1:,} more since" if event.count > 1 else ""
    who = "a stranger without the run's secret"
    if not surely_stranger(event):
        who = "a stranger, or a process of the run that was struck as it connected,"
    return f"{who} spoke to {event.place} ({event.peer}: {event.reason}): ignored{more}"


def _describe_alarm(event: ev.AlarmWeighed) -> str:
    """What is suspected, on what evidence, what was done, and what else would have cost."""
    soon = f"{event.host} fails with a chance of {event.chance:.0%} within about {format_s(event.delay_s)}"
    done = {"wait": "nothing is done", "save": "a save is asked for"}.get(event.action, "")
    if event.action == "move":
        to = f" to {', '.join(event.successors)}" if event.successors else ""
        done = f"its work moves{to} between two steps (out: {', '.join(event.replicas)})"
    if event.told_only:
        done = f"nothing is done (on_alarm is tell); else {done}"
    costs = ", ".join(f"{name} {format_s(cost)}" for name, cost in sorted(event.costs.items(), key=lambda row: row[1]))
    return f"{soon} ({event.evidence}); {done}; expected cost: {costs}"


def _is_told(event: ev.DataTrouble) -> bool:
    """Whether a story has this event: the first ten skipped samples, and then each tenfold, since a bad data set must
    not fill it."""
    before, mark = event.total - len(event.samples), 10
    while mark * 10 <= event.total:
        mark *= 10
    return before < 10 or before < mark


def _describe_data(event: ev.DataTrouble) -> str:
    if event.what != "skipped":
        who = f"{event.replica} on {event.host}" if event.host else event.replica
        return f"step {event.step}: {event.text}; all data workers of {who} were replaced"
    spent = f"{event.total:,} of the {event.allowed:,} that may be"
    return f"step {event.step}: {event.text}: skipped from here on, others stand in ({spent})"


def _waited(phase: str) -> str:
    return (
        "the view changed, and all waited for each other in it" if phase == "connect" else "all waited for each other"
    )


_DONE = {
    "apply": "taken all the same", "skip_step": "step skipped", "skip_batch": "step skipped, its bad samples left out",
    "rewind": "gone back to the certified state", "lower_rate": "step skipped, learning rate lowered for a while",
    "replace": "replica replaced", "quarantine": "replica put out of the run for good", "evict_host": "host put out",
    "stop": "run stopped",
}  # fmt: skip


def _describe_verdict(event: ev.VerdictReached) -> str:
    """What was seen, what was done, and all that is known of who is to blame."""
    done = _DONE[event.action] + (f" of step {event.to_step}" if event.to_step >= 0 else "")
    place = " on ".join(part for part in (event.replica, event.host, event.device) if part)
    samples = ", ".join(map(str, event.samples[:8])) + (" …" if len(event.samples) > 8 else "")
    blame = [
        place, f"microbatch {event.microbatch}" if event.microbatch >= 0 else "",
        f"sample{'s' if len(event.samples) > 1 else ''} {samples}" if samples else "",
        f"module {event.module}" if event.module else "", f"parameter {event.parameter}" if event.parameter else "",
        event.operation + (f" at {event.where}" if event.where else ""),
    ]  # fmt: skip
    known = "; ".join(part for part in blame if part)
    return f"step {event.step}: {event.evidence}: {done}" + (f" ({event.confidence}: {known})" if known else "")


def _describe_process(event: ev.AnyEvent) -> tuple[str, Literal["info", "warning", "error"]]:
    match event:
        case ev.RunEnded():
            return f"the last process ended; exit code {event.exit_code}", "info"
        case ev.CoordinatorStarted():
            verb = "took over" if event.takeover else "started"
            return f"coordinator {verb} with epoch {event.epoch}, process {event.pid}", "info"
        case ev.CoordinatorLost():
            return f"coordinator of epoch {event.epoch} lost: {event.cause}", "warning"
        case ev.AgentStarted():
            where = f" on {event.host} at {event.address}" if event.host else ""
            return f"agent {event.agent} started{where}, process {event.pid}", "info"
        case ev.AgentLost():
            return (
                f"agent {event.agent} lost: {event.cause}; with it {', '.join(event.replicas) or 'nobody'}",
                "warning",
            )
        case ev.ReplicaStarted():
            return f"{event.replica} started by {event.agent}, process {event.pid}", "info"
        case ev.ReplicaExited():
            at = f" in step {event.step}" if event.step is not None else ""
            detail = f": {_first_line(event.detail)}" if event.detail else ""
            calm = event.cause in {"finished", "left"}
            return f"{event.replica} ended{at} ({event.cause}{detail})", "info" if calm else "warning"
        case ev.ViewInstalled():
            kind = "planned view" if event.planned else "view"
            why = "" if event.cause == "planned" else f": {event.cause}"
            members = counted(len(event.members), "member")
            return f"{kind} {event.epoch}.{event.n} installed with {members}{why}", "info"
        case ev.ViewFormed():
            took = format_s(event.roll_call_s)
            return f"view {event.epoch}.{event.n} formed for step {event.step}, roll call {took}", "info"
        case ev.TrainingEnded():
            return f"training ended after {counted(event.steps, 'step')}; {event.writer} writes", "info"
        case ev.JoinerServed():
            return f"{event.replica} receives the state of step {event.step} from {', '.join(event.donors)}", "info"
        case ev.JoinerCaughtUp():
            return f"{event.replica} caught up with step {event.step} in {format_s(event.seconds)}", "info"
    return _describe_rows(event)


def _describe_rows(event: ev.AnyEvent) -> tuple[str, Literal["info", "warning", "error"]]:
    match event:
        case ev.RowsAdmitted():
            return _describe_view(event)
        case ev.VacancyDecided():
            return event.reason, "error" if event.action == "stop" else "warning"
        case ev.ReducerAccused():
            said = f"{len(event.votes)} of {len(event.members)} say so"
            of_rank = f" of rank {event.rank}" if event.rank else ""
            what = f"the slice of bucket {event.bucket}{of_rank} that {event.reducer} reduced in step {event.step}"
            end = "evicted" if event.decision == "evict" else "the run stops"
            remedy = f"; remedy: {event.remedy}" if event.remedy else ""
            wrong = f"{event.replica} ({event.device or 'device unknown'} under {event.host}) is wrong"
            return f"{event.accuser} disputes {what}; {wrong}, {said}; {end}{remedy}", "error"
    return checkpoint_words.describe(event) or (str(event.__struct_config__.tag), "info")


def _describe_view(event: ev.RowsAdmitted) -> tuple[str, Literal["info", "warning", "error"]]:
    view, liars = f"view {event.view[0]}.{event.view[1]}", counted(event.tolerated, "liar")
    if event.action != "go":
        what = {"wait": "waits for more replicas", "stop": "stops"}[event.action]
        return f"{view} {what}, it would tolerate {liars}: {event.reason}", "warning"
    if _unprotected(event):
        return f"{view} goes on and tolerates no liar: {event.reason}", "error" if event.lowered else "warning"
    return f"{view} goes on, tolerating {liars}: {event.reason}", "warning" if event.lowered else "info"


def _place(phase: str) -> str:
    """A phase in words."""
    return {"body": "the loop's own code", "load": "fetching its samples"}.get(phase, f"the phase {phase}")


def _unprotected(event: ev.RowsAdmitted) -> bool:
    """A rule was asked for, and one liar of this view may own more rows than it trims."""
    return event.tolerated == 0 < event.trim_count < event.most_rows


def _first_line(text: str) -> str:
    """A row is one line; the tracebacks that some details carry stand in the journal and in the replica's log."""
    return text.partition("\n")[0].removesuffix(":")
