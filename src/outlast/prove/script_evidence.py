"""What one struck run was doing when it was struck, which faults from inside were met, and what each cost. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from outlast.core import events as ev
from outlast.prove._commit_log import Commit
from outlast.prove.striker import StrikeDone, StrikeRecord
from outlast.runtime.settings.fault_points import Fault

__all__ = ["MOMENTS", "ScriptEvidence", "Moment", "Survived", "evidence_of"]

Moment = Literal["before the first step", "training", "in a save", "in a recovery", "after the last step"]
MOMENTS: tuple[Moment, ...] = (
    "before the first step", "training", "in a save", "in a recovery", "after the last step"
)  # fmt: skip
_STOPPED_S = 0.05  # after a strike, as long as it takes to be noticed at all


class Survived(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that the run outlasted, as its journal has it."""

    cause: str
    detect_s: float
    downtime_s: float
    lost_steps: int


class ScriptEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """`moments`: beside what was done, in its order; `met`: beside the faults from inside. Seconds of the run's own
    accounts."""

    moments: list[Moment] = []
    met: list[bool] = []
    survived: list[Survived] = []
    accounts_s: dict[str, float] = {}


def evidence_of(
    record: StrikeRecord, commits: Sequence[Commit], events: Sequence[ev.AnyEvent], faults: Sequence[Fault]
) -> ScriptEvidence:
    """What one run that is over shows: each moment that was struck, each fault that was met, what was survived."""
    cost: dict[str, Any] = record.why.get("cost", {})
    return ScriptEvidence(
        moments=[moment_of(done, record, commits, events) for done in record.done],
        met=[_met(fault, commits, events) for fault in faults],
        survived=[
            Survived(cause=e.cause, detect_s=e.detect_s, downtime_s=e.downtime_s, lost_steps=e.lost_steps)
            for e in events
            if isinstance(e, ev.Recovery)
        ],
        accounts_s={name: float(value) for name, value in cost.items()},
    )


def moment_of(
    done: StrikeDone, record: StrikeRecord, commits: Sequence[Commit], events: Sequence[ev.AnyEvent]
) -> Moment:
    """By the commit log, and by what the journal says of recoveries and saves."""
    at_s = record.unix_s + done.at_s
    times = [commit.at_s - record.started_s for commit in commits]
    if not times or done.at_s < min(times):
        return "before the first step"
    if done.at_s > max(times):
        return "after the last step"
    for event in events:
        if isinstance(event, ev.Recovery) and event.at_s - event.downtime_s + _STOPPED_S < at_s < event.at_s:
            return "in a recovery"
    begun = [event.at_s for event in events if isinstance(event, ev.CheckpointBegan) and event.at_s <= at_s]
    if begun:
        ended = (ev.CheckpointSaved, ev.CheckpointFailed)
        if not any(isinstance(event, ended) and max(begun) <= event.at_s <= at_s for event in events):
            return "in a save"
    return "training"


def _met(fault: Fault, commits: Sequence[Commit], events: Sequence[ev.AnyEvent]) -> bool:
    """Whether the process that a fault was ordered for came to its step, and no further, and ended."""
    last = max((commit.step for commit in commits if commit.who == fault.replica), default=-1)
    ended = any(isinstance(event, ev.ReplicaExited) and event.replica == fault.replica for event in events)
    return ended and fault.step is not None and last in (fault.step - 1, fault.step)
