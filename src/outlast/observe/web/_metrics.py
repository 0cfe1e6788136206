"""The metrics of runs in Prometheus's text format.

Role: names, units and words. Pure. Invariants: base units; counters end in `_total` and never fall while the server
lives; no label by replica or rank, so the number of series does not grow with the fleet; each figure is the one that
`outlast status` and `outlast why` print at that moment.
"""

from __future__ import annotations

import bisect
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from outlast.core.step_parts import PARTS
from outlast.observe.fault_sums import sums_of
from outlast.observe.page_picture import RunFold
from outlast.observe.status_records import ReplicaState, RunState, Status

__all__ = ["CONTENT_TYPE", "Scraped", "metrics_text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Scraped(msgspec.Struct, frozen=True, kw_only=True):
    """One run at one moment. `name`: what the label `run` says; `now_s`: as `RunFold` takes it, None where nobody holds
    the run; `share_read`: of its history, 0 to 1."""

    name: str
    fold: RunFold
    status: Status
    now_s: float | None
    share_read: float


class _Family:
    """One metric: its samples over all runs."""

    def __init__(self, name: str, kind: str, text: str) -> None:
        self.name, self.kind, self.text = name, kind, text
        self.lines: list[str] = []

    def add(self, value: float | None, suffix: str = "", **labels: str) -> None:
        if value is None:
            return
        told = ",".join(f'{key}="{_escaped(word)}"' for key, word in labels.items())
        self.lines.append(f"{self.name}{suffix}{{{told}}} {_number(value)}")

    def text_lines(self) -> Iterator[str]:
        yield f"# HELP {self.name} {self.text}"
        yield f"# TYPE {self.name} {self.kind}"
        yield from self.lines


def metrics_text(runs: Sequence[Scraped], version: str) -> str:
    """The whole answer of `/metrics`."""
    build = _Family("outlast_build_info", "gauge", "Version of outlast that serves; always 1.")
    build.add(1, version=version)
    families: dict[str, _Family] = {build.name: build}
    for run in runs:
        for family in _of_run(run):
            families.setdefault(family.name, family)
            if families[family.name] is not family:
                families[family.name].lines += family.lines
    return "\n".join(line for family in families.values() for line in family.text_lines()) + "\n"


def _of_run(run: Scraped) -> Iterator[_Family]:
    yield from _of_state(run)
    yield from _of_faults(run)
    yield from _of_losses(run)
    yield from _of_checkpoints(run)
    yield from _of_time(run)


def _of_state(run: Scraped) -> Iterator[_Family]:
    state, fold = run.status, run.fold
    info = _Family("outlast_run_info", "gauge", "The run that is served; always 1.")
    info.add(1, run=run.name, run_id=state.run_id)
    yield info
    now = _Family("outlast_run_state", "gauge", "1 for the state the run is in, 0 for the others.")
    for name in typing.get_args(RunState):
        now.add(float(state.state == name), run=run.name, state=name)
    yield now
    yield _gauge(run, "outlast_run_step", "Steps committed, as the newest commit has it.", state.step)
    yield _gauge(run, "outlast_run_steps_wanted", "Steps in all, as the loop said.", state.until)
    yield _counter(
        run,
        "outlast_steps_committed_total",
        "Steps committed, those done twice included.",
        fold.history.steps_committed,
    )
    yield _gauge(run, "outlast_step_duration_seconds", "Mean duration of the last steps.", state.step_s)
    yield _gauge(run, "outlast_last_commit_timestamp_seconds", "Unix time of the newest commit.", state.step_at_s)
    yield _gauge(run, "outlast_loss", "Loss of the newest step.", state.loss)
    yield _gauge(run, "outlast_replicas_wanted", "Replicas the run is to have.", state.num_replicas)
    members = _Family("outlast_replicas", "gauge", "Replicas by state.")
    counts: Counter[str] = Counter(replica.state for replica in state.replicas)
    for name in typing.get_args(ReplicaState):
        members.add(counts.get(name, 0), run=run.name, state=name)
    yield members
    agents = _Family("outlast_agents", "gauge", "Agents by state.")
    of_agents = Counter(agent.state for agent in state.agents)
    for place in ("running", "lost", "ended"):
        agents.add(of_agents.get(place, 0), run=run.name, state=place)
    yield agents
    yield _gauge(
        run, "outlast_history_read_ratio", "Share of the journal that curves and accounts have seen.", run.share_read
    )


def _of_faults(run: Scraped) -> Iterator[_Family]:
    fold, state = run.fold, run.status
    causes = Counter(event.cause for event in fold.recoveries)
    yield _labelled(run, "outlast_recoveries_total", "Faults that the run outlasted.", "cause", causes)
    yield _histogram(
        run,
        "outlast_recovery_downtime_seconds",
        "How long no step was committed, by fault.",
        [event.downtime_s for event in fold.recoveries],
    )
    yield _histogram(
        run,
        "outlast_recovery_detection_seconds",
        "Last sign of life to the first notice, by fault.",
        [event.detect_s for event in fold.recoveries],
    )
    yield _labelled(
        run,
        "outlast_verdicts_total",
        "What guards decided, other than simply to apply a step.",
        "action",
        fold.verdicts,
    )
    yield _counter(
        run,
        "outlast_audit_mismatches_total",
        "Gradients that a second replica computed otherwise.",
        state.num_audit_mismatches,
    )
    yield _labelled(
        run,
        "outlast_refused_connections_total",
        "Connections that did not prove that they belong.",
        "reason",
        fold.refusals,
    )


def _of_losses(run: Scraped) -> Iterator[_Family]:
    fold = run.fold
    sums = sums_of([*fold.recoveries, *fold.rewinds], fold.history.accounts.gone, run.status.last_save)
    for name, text, value in (
        ("microbatches_recomputed_total", "Microbatches of the dead computed again.", sums.microbatches_recomputed),
        ("downtime_seconds_total", "How long no step was committed; what one view mended is once.", sums.downtime_s),
        ("steps_lost_total", "Steps done twice or in vain.", sums.lost_steps),
    ):
        yield _counter(run, f"outlast_{name}", text, value)


def _of_checkpoints(run: Scraped) -> Iterator[_Family]:
    fold, state = run.fold, run.status
    saved = state.last_save
    yield _counter(run, "outlast_checkpoints_saved_total", "Generations published.", fold.num_saves)
    yield _counter(run, "outlast_checkpoints_failed_total", "Saves that came to nothing.", state.num_failed_saves)
    yield _counter(run, "outlast_checkpoint_written_bytes_total", "Bytes written by all writers.", fold.written_bytes)
    if saved is not None:
        yield _gauge(run, "outlast_checkpoint_step", "Step of the newest generation.", saved.step)
        yield _gauge(run, "outlast_checkpoint_timestamp_seconds", "Unix time of the newest generation.", saved.at_s)
        yield _gauge(
            run, "outlast_checkpoint_durable_seconds", "Begin to the last durable part, newest save.", saved.durable_s
        )
        yield _gauge(
            run, "outlast_checkpoint_blocked_seconds", "How long the newest save held up the loop.", saved.blocked_s
        )
    yield _gauge(run, "outlast_certified_step", "Steps of the newest certified state.", state.certified_step)


def _of_time(run: Scraped) -> Iterator[_Family]:
    cost = run.fold.accounting(run.status, run.now_s)
    use = _Family("outlast_time_seconds", "gauge", "Wall time by use; they sum to outlast_wall_seconds.")
    for name, seconds in cost.seconds().items():
        if name != "wall":
            use.add(seconds, run=run.name, use=name)
    yield use
    anatomy = run.fold.anatomy.anatomy()
    parts = _Family("outlast_step_part_seconds", "gauge", "A step's time by part: mean of members and most.")
    for part in PARTS:
        each = [getattr(member, f"{part}_s") for member in anatomy.members]
        if each:
            parts.add(sum(each) / len(each), run=run.name, part=part, of="mean")
            parts.add(max(each), run=run.name, part=part, of="most")
    yield parts
    yield _gauge(run, "outlast_wall_seconds", "Wall time of the run so far.", cost.wall_s)
    yield _gauge(run, "outlast_ettr_ratio", "Effective training time ratio: productive over wall.", cost.ettr)
    events = _Family("outlast_clock_events_total", "counter", "Faults by clock: mtbf any, mtbi stood still, mtbr lost.")
    for clock in run.fold.clocks(run.status, run.now_s):
        events.add(clock.count, run=run.name, clock=clock.name.lower())
    yield events


def _gauge(run: Scraped, name: str, text: str, value: float | None) -> _Family:
    family = _Family(name, "gauge", text)
    family.add(value, run=run.name)
    return family


def _counter(run: Scraped, name: str, text: str, value: float) -> _Family:
    family = _Family(name, "counter", text)
    family.add(value, run=run.name)
    return family


def _labelled(run: Scraped, name: str, text: str, label: str, counts: Counter[str]) -> _Family:
    family = _Family(name, "counter", text)
    for word, count in sorted(counts.items()):
        family.add(count, run=run.name, **{label: word})
    return family


def _histogram(run: Scraped, name: str, text: str, values: Iterable[float]) -> _Family:
    family, found = _Family(name, "histogram", text), sorted(values)
    for bound in _BUCKETS:
        family.add(bisect.bisect_right(found, bound), "_bucket", run=run.name, le=_number(bound))
    family.add(len(found), "_bucket", run=run.name, le="+Inf")
    family.add(sum(found), "_sum", run=run.name)
    family.add(len(found), "_count", run=run.name)
    return family


def _number(value: float) -> str:
    if value != value or value in (float("inf"), float("-inf")):
        return "NaN" if value != value else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
