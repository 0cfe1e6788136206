"""What members, agents and the coordinator tell each other, and what the coordinator asks its driver to do.

Frozen tagged records; the wire is msgpack of `ToCoordinator` and `FromCoordinator`. Gradients never pass here.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from outlast.core.policy.guard_records import Verdict
from outlast.core.protocol.agent_messages import (
    AgentContinued,
    AgentGone,
    AgentHello,
    Cause,
    Continued,
    Examined,
    Exited,
    Spawned,
    SpawnFailed,
    Stop,
    Unjoined,
)
from outlast.core.protocol.data_messages import DataNoted
from outlast.core.protocol.delta import ViewDelta
from outlast.core.protocol.disputes import AuditFinding
from outlast.core.protocol.driver_events import Departing, Resumed, SavePublished, Superseded, Timer
from outlast.core.protocol.fleet_record import Ending, FleetRecord
from outlast.core.protocol.host_messages import HostEvent
from outlast.core.protocol.operator_messages import Answered, DrainAsked, EvictAsked, ScaleAsked
from outlast.core.protocol.types import Order, ServeId, View, ViewId
from outlast.core.protocol.vacancy_events import ReplacementsBelieved, SaveAwaited, SparesWorth

__all__ = [
    "Accused", "Action", "Admitted", "AgentContinued", "AgentGone", "AgentHello", "Amend", "Audited", "BeginServe",
    "Cause", "Close", "Continue", "Continued", "Departing", "DeviceNoted", "Done", "Ended", "Ending", "Event", "Evict",
    "Examine", "Examined", "Exited", "Failed", "Finish", "Formed", "FromCoordinator", "Hello", "Install",
    "JournalEntry", "Judged", "Kill", "Leaving", "Left", "Notify", "Persist", "ProbePaths", "Ready", "FleetRecord",
    "Rejoin", "ReplacementsBelieved", "Resumed", "Rows", "SaveAwaited", "SavePublished", "SetTimer", "Spawn",
    "SpawnFailed", "SparesWorth", "Spawned", "Stalled", "Stop", "Superseded", "Take", "Tell", "Timer", "DataNoted",
    "ToCoordinator", "Unjoined", "Welcome", "Whole",
]  # fmt: skip

DEPARTED = "left as planned"


class Wire(msgspec.Struct, frozen=True, kw_only=True, tag=True, repr_omit_defaults=True):
    """Base: a tagged frozen record."""


# --- to the coordinator: from members -------------------------------------------------------------------------------
class Hello(Wire, frozen=True, kw_only=True, tag=True):
    """A member (re)connects. Also says what it is in the middle of, so that a restarted coordinator knows."""

    member: str
    agent: str
    epoch: int  # highest epoch seen
    view: View | None = None  # the view I act in
    left: bool = False  # ... and have left
    formed: bool = False
    heard: int = 0
    committed: int = 0
    state: Literal["fresh", "joining", "ready", "member"] = "fresh"
    done: bool = False
    leaving: bool = False  # I was asked to go
    serve: ServeId = (0, 0)  # the attempt to serve me that I follow
    facts: dict[str, str] = {}  # numerics and run facts; equal on all members or refused
    address: str = ""  # where donors reach me
    store: str = ""  # my c10d store
    device: str = ""  # what I train on, for people
    told: Formed | None = None  # what I said when my view had formed: whoever it was said to may not live


class Left(Wire, frozen=True, kw_only=True, tag=True):
    """I take no further part in any view up to `view`. Asked for by Notify, or my own finding."""

    member: str
    view: ViewId
    cause: str = ""
    suspects: tuple[str, ...] = ()  # peers whose connection to me ended without a goodbye
    stale: tuple[str, ...] = ()  # members that the roll call showed more than one step behind
    at_s: float = 0.0  # when I noticed (the host's monotonic clock)


class Formed(Wire, frozen=True, kw_only=True, tag=True):
    """The roll call and any hand-over are complete here; I compute again."""

    member: str
    view: ViewId
    step: int
    recomputed: int = 0  # microbatches of the dead that the plan computes again, over all members
    left_at_s: float = 0.0
    formed_at_s: float = 0.0


class Ready(Wire, frozen=True, kw_only=True, tag=True):
    """A joiner is at most one step behind and has run one optimizer step on a clone."""

    member: str
    step: int
    serve: ServeId = (0, 0)


class Rejoin(Wire, frozen=True, kw_only=True, tag=True):
    """Both ways. Joiner: serve me again; or I have no state to act in `view` with. Coordinator: wait to be served."""

    member: str
    epoch: int = 0
    view: ViewId = ViewId(epoch=0, n=0)


class Leaving(Wire, frozen=True, kw_only=True, tag=True):
    """I was asked to go (SIGTERM): plan a view without me."""

    member: str


class Done(Wire, frozen=True, kw_only=True, tag=True):
    """I passed the closing barrier of the last step."""

    member: str
    view: ViewId
    steps: int
    fingerprint: str = ""


class Failed(Wire, frozen=True, kw_only=True, tag=True):
    """User code raised; I exit after this, and act in no view any more. `alike`: what, and at which line; two replicas
    that say the same in one step met one bug, at whichever microbatches. `final`: found once, it is so on each."""

    member: str
    step: int
    microbatch: int
    error: str
    alike: str = ""
    code: int = 5  # the exit code that it stands for (reference/errors)
    final: bool = False
    at_s: float = 0.0  # when, by the host's monotonic clock


class Admitted(Wire, frozen=True, kw_only=True, tag=True):
    """What a robust rule makes of a view that has formed (`outlast.core.policy.AdmissionPolicy`)."""

    member: str
    view: ViewId
    step: int
    action: Literal["go", "wait", "stop"]
    tolerated: int
    most_rows: int
    trim_count: int
    lowered: bool
    reason: str


class Accused(Wire, frozen=True, kw_only=True, tag=True):
    """`accuser` found a slice that `reducer` reduced to be false. I looked for myself: `culprit` is who is wrong."""

    member: str
    view: ViewId
    step: int
    bucket: int
    reducer: str
    accuser: str
    culprit: str
    members: tuple[str, ...]
    at_s: float = 0.0


class Judged(Wire, frozen=True, kw_only=True, tag=True):
    """What the guards decided about a step, other than to apply it: every member says so, and one of them is heard."""

    member: str
    step: int
    verdict: Verdict
    against: tuple[str, ...] = ()  # members whose state or numbers were wrong


class Stalled(Wire, frozen=True, kw_only=True, tag=True):
    """I am inside the exchange and wait for `missing` longer than the learned deadline."""

    member: str
    view: ViewId
    phase: int
    missing: tuple[str, ...]
    waited_s: float
    deadline_s: float


class Rows(Wire, frozen=True, kw_only=True, tag=True):
    """Answer to ProbePaths: the peers of the view whose connection answers, to the rank in this place of mine."""

    member: str
    view: ViewId
    reached: tuple[str, ...]
    place: int = 0


class Audited(Wire, frozen=True, kw_only=True, tag=True):
    """Audits found something; every member of the view says the same."""

    member: str
    view: ViewId
    findings: tuple[AuditFinding, ...]


class DeviceNoted(Wire, frozen=True, kw_only=True, tag=True):
    """What a member, or an agent (`member` is its name then), found out about a device (`events.DeviceFinding`)."""

    member: str
    device: str
    source: Literal["checks", "test", "readings", "links"]
    evidence: str
    action: str
    remedy: str
    step: int = -1
    microbatch: int = -1


class Whole(Wire, frozen=True, kw_only=True, tag=True):
    """I cannot apply the difference that leads to this view: tell it whole."""

    member: str
    view: ViewId


# --- to the coordinator: from agents and the launcher ----------------------------------------------------------------


# --- from the coordinator --------------------------------------------------------------------------------------------
# Each carries its sender's epoch; members and agents drop what is older than the newest that they have seen (rule 1).
class Welcome(Wire, frozen=True, kw_only=True, tag=True):
    """The first answer to every Hello: from here on, older coordinators are ignored by who reads it."""

    epoch: int


class Install(Wire, frozen=True, kw_only=True, tag=True):
    """Act in this view. Told only after it is durable."""

    view: View
    addresses: dict[str, str] = {}
    hosts: dict[str, str] = {}
    store: str = ""
    cause: str = ""
    epoch: int = 0  # of the coordinator that says so: a later one may repeat an earlier one's view


class Amend(Wire, frozen=True, kw_only=True, tag=True):
    """As Install, to members of the view before it: how the next one differs from that."""

    delta: ViewDelta
    addresses: dict[str, str] = {}  # of who was not in the view before
    hosts: dict[str, str] = {}  # likewise
    store: str = ""
    cause: str = ""
    epoch: int = 0


class Notify(Wire, frozen=True, kw_only=True, tag=True):
    """Every view up to `view` is over: leave and acknowledge."""

    epoch: int
    view: ViewId
    cause: str


class Take(Wire, frozen=True, kw_only=True, tag=True):
    """A planned change for the view's members (rule 6). `delta`: what makes the order's next view out of this one."""

    order: Order
    delta: ViewDelta | None = None
    addresses: dict[str, str] = {}
    hosts: dict[str, str] = {}
    store: str = ""
    epoch: int = 0


class BeginServe(Wire, frozen=True, kw_only=True, tag=True):
    """To a joiner: `donors` will come to you; expect all of them."""

    epoch: int
    donors: tuple[str, ...]
    serve: ServeId = (0, 0)


class Evict(Wire, frozen=True, kw_only=True, tag=True):
    """You are not part of this run (any more)."""

    epoch: int
    reason: str
    remedy: str = ""


class Close(Wire, frozen=True, kw_only=True, tag=True):
    """The run is over, or your planned departure is complete: exit."""

    epoch: int
    reason: str = ""


class Ended(Wire, frozen=True, kw_only=True, tag=True):
    """Training has ended: all members of the last view passed its closing barrier, and their scripts go on. `writer`
    writes what only one should. `settled`: a writer's script has ended, so nobody has to take its place any more."""

    epoch: int
    writer: str
    settled: bool = False


class Spawn(Wire, frozen=True, kw_only=True, tag=True):
    """To an agent: start this member after a delay. `tested`: its device, on probation, is asked before it joins."""

    member: str
    after_s: float
    epoch: int = 0
    tested: bool = False


class Kill(Wire, frozen=True, kw_only=True, tag=True):
    member: str
    reason: str
    epoch: int = 0


class Examine(Wire, frozen=True, kw_only=True, tag=True):
    """To an agent: look at this member and say what you find."""

    member: str
    epoch: int = 0


class Continue(Wire, frozen=True, kw_only=True, tag=True):
    """To an agent: continue this member, which is stopped."""

    member: str
    epoch: int = 0


class ProbePaths(Wire, frozen=True, kw_only=True, tag="Probe"):
    """To the members of a view in which all wait: ping each other and report who answers."""

    view: ViewId
    epoch: int = 0


FromCoordinator = (
    Welcome | Install | Amend | Notify | Take | BeginServe | Evict | Close | Ended | Spawn | Kill | Continue | Examine
    | ProbePaths | Stop | Rejoin
)  # fmt: skip


# --- to the driver ---------------------------------------------------------------------------------------------------


class Persist(Wire, frozen=True, kw_only=True, tag=True):
    """Write durably, conditional on the epoch, before any later action of the list."""

    record: FleetRecord


class Tell(Wire, frozen=True, kw_only=True, tag=True):
    """Send to members or agents by name; who is not connected misses it and is told when it says Hello."""

    to: tuple[str, ...]
    message: FromCoordinator | Answered


class SetTimer(Wire, frozen=True, kw_only=True, tag=True):
    """Deliver Timer(name) after `after_s`; setting it again moves it."""

    name: str
    after_s: float


class JournalEntry(Wire, frozen=True, kw_only=True, tag="Journal"):
    """A fact for the record, as the name and fields of an event in `core/events` (the driver adds the time)."""

    kind: str
    fields: dict[str, object]


class Finish(Wire, frozen=True, kw_only=True, tag=True):
    """The run is over."""

    outcome: Literal["finished", "failed", "stopped"]
    exit_code: int
    steps: int
    detail: str


ToCoordinator = (
    Hello | Left | Formed | Ready | Rejoin | Leaving | Done | Failed | Stalled | AgentHello | AgentGone | Spawned
    | SpawnFailed | Unjoined | Exited | Examined | Continued | Rows | Audited | Whole | Stop | Admitted | Accused
    | Judged | DeviceNoted | DataNoted | AgentContinued
)  # fmt: skip
Driven = Timer | Departing | ReplacementsBelieved | Resumed | SaveAwaited | SavePublished | SparesWorth | Superseded
Event = ToCoordinator | HostEvent | ScaleAsked | DrainAsked | EvictAsked | Driven
Action = Persist | Tell | SetTimer | JournalEntry | Finish
