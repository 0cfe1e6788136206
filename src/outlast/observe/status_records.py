"""What is known of a run at one moment, as records: the run, its coordinator and agents, its replicas.

Role: the shape of `outlast status --json`, and what page and metrics are made from. Pure. Each figure has one home:
whoever shows it asks this record, and computes nothing again.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from outlast.core import events as ev

__all__ = ["OVER", "OVER_DETAIL", "RUNNING", "Process", "ReplicaState", "ReplicaStatus", "RunState", "Status"]

RunState = Literal["starting", "forming", "training", "stalled", "ending", "finished", "failed", "stopped", "lost"]
OVER: frozenset[RunState] = frozenset({"finished", "failed", "stopped", "lost"})
"""States of a run that nobody goes on with."""
RUNNING: frozenset[RunState] = frozenset({"starting", "forming", "training", "stalled", "ending"})
"""States of a run that goes on: its time is told up to now."""

ReplicaState = Literal[
    "starting",
    "joining",
    "spare",
    "forming",
    "training",
    "stalled",
    "suspected",
    "leaving",
    "ending",
    "exited",
    "ended",
]
OVER_DETAIL = "the run is over"
"""What is told of a replica that nothing else ended."""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator or an agent. `view`: (epoch, n); `step`: the last stable step; None before the first. In a run
    on several hosts also `host`, the `address` at which the others reach it, and `slots`, for how many replicas."""

    name: str
    pid: int
    state: Literal["running", "lost", "ended"]
    view: tuple[int, int] | None
    step: int | None
    detail: str = ""
    host: str = ""
    address: str = ""
    slots: int = 0


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation of a slot. `view` is None outside the view; `step`: the last it is known to hold; "stalled" is a
    member of a stalled run, and `detail` says for how long nothing has come of its work. "ended" is one whose script is
    done, or that ended with its run; "exited" one that something else ended."""

    replica: str
    agent: str
    pid: int
    state: ReplicaState
    view: tuple[int, int] | None
    step: int | None
    detail: str = ""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment. Times are Unix seconds; `step_s` is the mean of the last steps reported, None where none is
    being made: before the first, in a run that is stalled, between two views; `until`: steps in all, None before the
    loop has said it. `step`: how many were committed, the newest at `step_at_s`, `step_age_s` ago;
    "stalled" is a run whose newest commit is much older than usual; "ending" one whose training is done, and whose
    scripts are not.

    `replicas`: all that have not ended, and of a slot where all have, the newest. `as_of_s`: the moment of
    all ages: now while somebody holds the run, its last event when nobody does. `last_save`: the newest generation,
    `save_age_s` old. `certified_step`: of the newest certified state, None without audits.
    """

    run_id: str
    state: RunState
    detail: str
    started_at_s: float | None
    updated_at_s: float | None
    view: tuple[int, int] | None
    step: int | None
    until: int | None
    step_s: float | None
    loss: float | None
    num_replicas: int
    num_recoveries: int
    last_recovery: ev.Recovery | None
    num_verdicts: int
    last_verdict: ev.VerdictReached | None
    coordinator: Process | None
    agents: list[Process]
    replicas: list[ReplicaStatus]
    last_save: ev.CheckpointSaved | None = None
    failed_save: ev.CheckpointFailed | None = None  # after it
    num_audit_mismatches: int = 0
    step_at_s: float | None = None
    step_age_s: float | None = None
    num_failed_saves: int = 0
    certified_step: int | None = None
    as_of_s: float | None = None
    save_age_s: float | None = None
