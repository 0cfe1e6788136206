"""Every event the system can report: frozen records, the one vocabulary of journal, terminal, metrics and page.

Role: one record per fact, written once, by the coordinator (`RunEnded` by the launcher), shown the same everywhere.
Times are Unix seconds (`at_s`), durations are seconds. Not the wire protocol between members: that is
`core/protocol/messages.py`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from outlast.core.checkpoint_events import (
    CheckpointBegan,
    CheckpointDelayed,
    CheckpointDiffers,
    CheckpointDrained,
    CheckpointFailed,
    CheckpointInterval,
    CheckpointLoaded,
    CheckpointPruned,
    CheckpointRetried,
    CheckpointSaved,
    CheckpointSkipped,
)
from outlast.core.data_events import DataTrouble
from outlast.core.event_base import Event
from outlast.core.spare_events import SparesHeld, VacancyDecided
from outlast.core.step_parts import PairWait

__all__ = [
    "AgentLost", "AgentStarted", "AlarmWeighed", "AnyEvent", "Asked", "AuditMismatch", "StateCertified",
    "CheckpointBegan", "CheckpointDelayed", "CheckpointDiffers", "CheckpointDrained", "CheckpointFailed",
    "CheckpointInterval", "CheckpointLoaded", "CheckpointPruned", "CheckpointRetried", "CheckpointSaved",
    "CheckpointSkipped", "CoordinatorLost", "CoordinatorStarted", "DataTrouble", "DeviceFinding", "Event", "FleetGone",
    "JoinerCaughtUp", "JoinerServed", "Notice", "ProgressMade", "Recovery", "ReducerAccused", "Refused",
    "ReplicaExited", "ReplicaStarted", "RowsAdmitted", "RunEnded", "RunFinished", "RunStarted", "SparesHeld", "Stall",
    "StepAnatomy", "Suspected", "TrainingEnded", "VacancyDecided", "VerdictReached", "ViewFormed", "ViewInstalled",
    "decode", "encode",
]  # fmt: skip


class RunStarted(Event, frozen=True, kw_only=True, tag="run_started"):
    run_id: str
    command: list[str]
    num_replicas: int
    num_spares: int
    signature: dict[str, str]
    config: dict[str, str | int | float | bool | None]


class CoordinatorStarted(Event, frozen=True, kw_only=True, tag="coordinator_started"):
    epoch: int
    pid: int
    takeover: bool


class CoordinatorLost(Event, frozen=True, kw_only=True, tag="coordinator_lost"):
    epoch: int
    cause: str
    noticed_by: str


class AgentStarted(Event, frozen=True, kw_only=True, tag="agent_started"):
    """`host`: the name of the machine that it joined from, "" for one that the launcher started; `place`: who shares it
    shares memory and clock; `address`: for the other hosts; `slots`: replicas that may run there, 0 for any number."""

    agent: str
    pid: int
    host: str = ""
    place: str = ""
    address: str = ""
    slots: int = 0


class AgentLost(Event, frozen=True, kw_only=True, tag="agent_lost"):
    agent: str
    cause: str
    replicas: list[str]


class ReplicaStarted(Event, frozen=True, kw_only=True, tag="replica_started"):
    """`replica`: slot.incarnation, e.g. `r2.1`."""

    replica: str
    agent: str
    pid: int


class ReplicaExited(Event, frozen=True, kw_only=True, tag="replica_exited"):
    replica: str
    cause: Literal["signal", "exit", "exception", "evicted", "left", "finished", "agent_lost"]
    detail: str
    noticed_by: str
    step: int | None = None


class ViewInstalled(Event, frozen=True, kw_only=True, tag="view_installed"):
    """`num_microbatches`: G, of every step; 0 where it is not known yet (accounting prices orphans by it)."""

    epoch: int
    n: int
    members: list[str]
    cause: str
    planned: bool
    num_microbatches: int = 0


class ViewFormed(Event, frozen=True, kw_only=True, tag="view_formed"):
    epoch: int
    n: int
    step: int
    roll_call_s: float


class Recovery(Event, frozen=True, kw_only=True, tag="recovery"):
    """One fault that the run survived: what, who noticed, how fast, what was lost. Shown the same everywhere.

    `detect_s`: the victim's last sign of life to the first notice. `downtime_s`: how long no step was committed, from
    the last commit before the fault to the first one after it; 0 where training went on."""

    cause: str
    replica: str
    noticed_by: str
    detect_s: float
    downtime_s: float
    microbatches_recomputed: int
    lost_steps: int
    step: int
    view: list[int]
    detail: str = ""


class Suspected(Event, frozen=True, kw_only=True, tag="suspected"):
    replica: str
    evidence: str
    decision: Literal["evict", "wait"]


class RowsAdmitted(Event, frozen=True, kw_only=True, tag="rows_admitted"):
    """What a robust rule makes of a view: `most_rows` on one host, of which `tolerated` may lie. `lowered`: fewer than
    the run was started for."""

    view: list[int]
    step: int
    action: Literal["go", "wait", "stop"]
    tolerated: int
    most_rows: int
    trim_count: int
    lowered: bool
    reason: str


class ReducerAccused(Event, frozen=True, kw_only=True, tag="reducer_accused"):
    """`accuser` computed a slice again that `reducer`, its `rank` where it has several, had reduced, and they differ.
    `replica`: who is wrong according to `votes`, those of `members` that looked and agree; its `host` (agent) and the
    `device` that it names. `confidence`: their share. The step was held; nothing false was applied."""

    replica: str
    step: int
    bucket: int
    reducer: str
    accuser: str
    votes: list[str]
    members: list[str]
    decision: Literal["evict", "stop"]
    rank: int = 0
    host: str = ""
    device: str = ""
    confidence: float = 0.0
    remedy: str = ""


class VerdictReached(Event, frozen=True, kw_only=True, tag="verdict"):
    """What the guards decided about a step, other than simply to apply it. The same on every replica.

    `evidence`: what was seen; `confidence`: of the culprit. Who and what is to blame, as far as it is known: `replica`
    on `host` and `device`; `module`, `parameter`, `operation` and `where` (file:line) in the model; `microbatch` (-1
    if unknown) and `samples` in the data. `to_step`: what a rewind goes back to. `remedy`: what helps."""

    step: int
    action: Literal[
        "apply", "skip_step", "skip_batch", "rewind", "lower_rate", "replace", "quarantine", "evict_host", "stop"
    ]
    evidence: str
    confidence: Literal["certain", "likely", "possible"]
    remedy: str
    replica: str = ""
    host: str = ""
    device: str = ""
    module: str = ""
    parameter: str = ""
    operation: str = ""
    where: str = ""
    microbatch: int = -1
    samples: list[int] = msgspec.field(default_factory=list)
    to_step: int = -1


class JoinerServed(Event, frozen=True, kw_only=True, tag="joiner_served"):
    replica: str
    step: int
    donors: list[str]


class JoinerCaughtUp(Event, frozen=True, kw_only=True, tag="joiner_caught_up"):
    replica: str
    step: int
    seconds: float


class ProgressMade(Event, frozen=True, kw_only=True, tag="progress"):
    """Rides on heartbeats. `stable`: steps that no failure can take back; `losses`: (step, loss) since the last one;
    `messages`: what the view's members have sent to the coordinator so far, besides heartbeats. `until`: steps in all,
    as the loop said; 0 if it did not.

    Accounts: steps `first` up to, not including, `committed` were committed, the newest at `committed_at_s`; what
    passed since the last commit that was counted before them, or since the first view had formed, by use in
    `seconds` (`outlast.core.protocol.StepTime`). Steps counted before and counted again here were done twice.
    `committed` is -1 where none is news. `stalls`: steps that took far too long, each an entry of its own a few seconds
    later, once members have said who waited for whom; the next coordinator writes it if this one dies before."""

    view: list[int]
    stable: int
    losses: list[tuple[int, float]]
    step_s: float
    messages: int = 0
    until: int = 0
    first: int = 0
    committed: int = -1
    committed_at_s: float = 0.0
    seconds: dict[str, float] = msgspec.field(default_factory=dict)
    stalls: list[Stall] = msgspec.field(default_factory=list)


class Stall(Event, frozen=True, kw_only=True, tag="stall"):
    """A step that ended `at_s` took `seconds` longer than usual (`usual_s`), and nothing else explains it. `replica`:
    who was not waiting for others, in `phase` (`outlast.core.phases`) for the longest; empty where all waited."""

    step: int
    seconds: float
    usual_s: float
    replica: str
    phase: str


class StepAnatomy(Event, frozen=True, kw_only=True, tag="step_anatomy"):
    """Where a replica's steps go, and whom it waits for: sums since it joined (`outlast.core.step_parts`)."""

    replica: str
    steps: int
    seconds: dict[str, float]
    waits: dict[str, PairWait] = msgspec.field(default_factory=dict)
    batches: tuple[int, float] = (0, 0.0)


class AuditMismatch(Event, frozen=True, kw_only=True, tag="audit_mismatch"):
    """Replicas computed different gradients for one microbatch, or reduced a slice of a bucket to different results;
    nothing was applied until it was settled. `microbatch`: -1 if it is about something else; `bucket`: likewise.
    `confidence`: share of the replicas asked that agree."""

    step: int
    microbatch: int
    culprit: str
    host: str
    device: str
    verdict: Literal["transient", "persistent", "gone", "undecided", "rewound", "equivocal", "memory"]
    evidence: str
    confidence: float
    remedy: str
    bucket: int = -1


class DeviceFinding(Event, frozen=True, kw_only=True, tag="device_finding"):
    """Something was found out about a device: by checked sums, a test, its readings, or what its links lose.

    `replica` computed on `device` of `host` then; `step`, `microbatch`: -1 where it belongs to none. `action`: what was
    done about it (`recomputed`, `repaired`, `passed`, `failed`, `suspected` ...); `remedy`: what helps."""

    replica: str
    host: str
    device: str
    source: Literal["checks", "test", "readings", "links"]
    step: int
    microbatch: int
    evidence: str
    action: str
    remedy: str


class AlarmWeighed(Event, frozen=True, kw_only=True, tag="alarm_weighed"):
    """What was done about an alarm of a host, because it is expected to cost least.

    `chance`: that the alarm is true; `delay_s`: how soon it comes true then, on average. `costs`: of each action, in
    seconds of the whole run's work. `replicas`: those that leave the host (`move`); `successors`: spares that are
    ready to take their places. `told_only`: the run's `on_alarm` is "tell", so nothing was done."""

    host: str
    alarm: str
    evidence: str
    chance: float
    delay_s: float
    action: Literal["wait", "save", "move"]
    costs: dict[str, float]
    replicas: list[str]
    successors: list[str]
    told_only: bool = False


class StateCertified(Event, frozen=True, kw_only=True, tag="certified"):
    """The state after `step` steps is finite, agreed by fingerprint, and passed its audits. `share`: probability that
    a single wrong gradient since the last certified state was seen; `audited`: microbatches computed twice so far."""

    step: int
    share: float
    audited: int


class FleetGone(Event, frozen=True, kw_only=True, tag="fleet_lost"):
    """Every replica that held the training state is gone; the run begins again from its newest checkpoint, or from
    the start if none was published. `step`: the last that was known to be committed."""

    step: int
    detail: str


class Refused(Event, frozen=True, kw_only=True, tag="refused"):
    """Connections at a listening socket of the run that did not prove that they belong to it; or (`stranger` false)
    that did, and said what they may not. `place`: whose socket; `peer`: the first of them; `count`: so far, of this
    place and reason. Written at 1, 10, 100 … and at the end."""

    reason: str
    peer: str
    count: int
    place: str = "the coordinator's port"
    stranger: bool = True


class Notice(Event, frozen=True, kw_only=True, tag="notice"):
    level: Literal["info", "warning", "error"]
    text: str


class TrainingEnded(Event, frozen=True, kw_only=True, tag="training_ended"):
    """The last step is done, and the scripts go on. `writer`: whose `run.is_writer` is true since then; told again
    when another one takes its place."""

    steps: int
    writer: str


class Asked(Event, frozen=True, kw_only=True, tag="asked"):
    """Somebody who knows the run's secret asked for something while it trained. `about`: a number of replicas (scale),
    a host, or a replica. `text`: what follows, or (`accepted` false) why nothing does; `replicas`: those that leave."""

    what: Literal["scale", "drain", "undrain", "evict"]
    about: str
    accepted: bool
    text: str
    replicas: list[str]


class RunFinished(Event, frozen=True, kw_only=True, tag="run_finished"):
    outcome: Literal["finished", "failed", "stopped"]
    steps: int
    detail: str
    exit_code: int
    seconds: dict[str, float]  # the accounting identity: productive, recovery, … sum to wall


class RunEnded(Event, frozen=True, kw_only=True, tag="run_ended"):
    """The launcher's last word: every process of the run has ended, and this is what it exits with. `at_s`: with the
    time that its disk takes to keep it, as far as that can be told before."""

    exit_code: int


AnyEvent = (
    RunStarted | CoordinatorStarted | CoordinatorLost | AgentStarted | AgentLost | ReplicaStarted | ReplicaExited
    | ViewInstalled | ViewFormed | Recovery | Suspected | JoinerServed | JoinerCaughtUp | ProgressMade | Refused
    | Notice | FleetGone | CheckpointBegan | CheckpointSaved | CheckpointFailed | CheckpointDelayed | CheckpointRetried
    | CheckpointLoaded | CheckpointSkipped | CheckpointDiffers | CheckpointPruned | CheckpointDrained
    | CheckpointInterval | RunFinished | RunEnded | Stall | RowsAdmitted | ReducerAccused | VerdictReached
    | AuditMismatch | StateCertified | TrainingEnded | DeviceFinding | DataTrouble | AlarmWeighed | Asked | StepAnatomy
    | SparesHeld | VacancyDecided
)  # fmt: skip

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def encode(event: AnyEvent) -> bytes:
    """JSON, with the event's `kind`."""
    return _encoder.encode(event)


def decode(data: bytes | str) -> AnyEvent:
    """Inverse of `encode`. Raises `msgspec.ValidationError` for anything else."""
    return _decoder.decode(data)
