"""Words between the ranks of one replica: its lead says what is next, the others say what they found.

Records, and nothing else. What they mean is `member/_siblings.py`'s and `member/follower.py`'s matter.
"""

from __future__ import annotations

from typing import Any

import msgspec

from outlast.core.policy import GuardNote
from outlast.core.protocol import Node, RowsNote, ServeId, View, ViewId
from outlast.core.protocol.data_messages import DataNoted
from outlast.runtime.transport.rank_check_words import (
    AskRows,
    AuditLeaf,
    LaneGrams,
    LaneLooked,
    LaneRepeated,
    LeafPrinted,
    LookAgain,
    LookCloser,
    RepeatLeaf,
    RowsChosen,
    RowsSaid,
    SlicesSaid,
)
from outlast.runtime.transport.rank_path_words import LaneAnswers, LaneStalled, ProbeLane
from outlast.runtime.transport.save_messages import FromMember, ToMember

__all__ = [
    "ApplyOutcome", "AreYouThere", "AskFingerprint", "BeginRun", "BeginStep", "CloseStreams", "ComputeLeaf",
    "DECODER", "DrainLane", "DropLane", "EndRun", "EndStep", "EvaluateBatches", "Evaluated", "ExpectLeaves",
    "FeedJoiners", "FeedWhole", "FingerprintSaid", "FlushStreams", "FormLane", "GiveOutcome", "HereIAm",
    "JoinedView", "LaneBroken", "LaneDrained", "LaneEvaluated", "LaneHas", "LaneReduced", "LaneTaken", "LaneTask",
    "LiveOutcome", "LoadShares", "LoopLeft", "OpenWorld", "RankFailed", "RankLeft", "RankReady", "ReduceLane",
    "ReplayOutcome", "RunBegun", "SaveStable", "SavesHear", "SavesSay", "ServeJoiner", "ServedAs", "SettleOutcome",
    "TakeFingerprint", "TakeOutcome", "TakeSave", "ViewOver",
]  # fmt: skip


class OpenWorld(msgspec.Struct, frozen=True, tag=True):
    """Lead: the replica's torch world meets in this store (host:port)."""

    store: str


class BeginStep(msgspec.Struct, frozen=True, tag=True):
    """Lead: my loop has been given this step."""

    step: int


class ExpectLeaves(msgspec.Struct, frozen=True, tag=True):
    """Lead: what this replica computes in `step`, and from `since` on."""

    first: tuple[int, ...]
    share: tuple[int, ...]
    step: int
    since: int
    index: int = 0
    donors: int = 0  # have memory ready for joiners, as member `index` of so many


class LaneTask(msgspec.Struct, frozen=True):
    """An exchange in your lane. `nodes`: each replica's sums, in the view's order."""

    step: int
    nodes: tuple[tuple[Node, ...], ...]
    with_norms: bool
    printing: bool = False  # sums are compared with what was said of them when they were made


class ComputeLeaf(msgspec.Struct, frozen=True, tag=True):
    """Lead: the next leaf, of which everybody computes one microbatch. `ahead`: it is the last one before this
    exchange, which begins under its backward; `ReduceLane` follows all the same."""

    step: int
    leaf: int
    ahead: LaneTask | None = None
    printing: bool = False  # say the gradient's fingerprint


class FormLane(msgspec.Struct, frozen=True, tag=True):
    """Lead: a view has formed. `addresses`: of the ranks in your lane, by replica; `held`: the sums that count."""

    number: int
    view: View
    addresses: dict[str, str]
    held: tuple[Node, ...]
    compare: bool = False  # the state, in the view's first step


class ReduceLane(msgspec.Struct, frozen=True, tag=True):
    """Lead: exchange this step's sums in your lane."""

    number: int
    task: LaneTask


class DropLane(msgspec.Struct, frozen=True, tag=True):
    """Lead: the view is over."""

    number: int


class ViewOver(msgspec.Struct, frozen=True, tag=True):
    """Lead, from the thread that hears the coordinator: this view is over. `DropLane` follows, in its order."""

    view: ViewId


class FeedJoiners(msgspec.Struct, frozen=True, tag=True):
    """Part of `ApplyOutcome`: hand your slices of it to joiners, as member `index` of `count`. `last`: of the view."""

    index: int
    count: int
    last: bool


class ApplyOutcome(msgspec.Struct, frozen=True, tag=True):
    """Lead: the step is decided, in all lanes; commit it (37)."""

    meta: bytes
    feed: FeedJoiners | None = None
    tries: bool = False  # it is for this replica to rehearse the step, on all its ranks


class GiveOutcome(msgspec.Struct, frozen=True, tag=True):
    """Lead: hand your part of the outcome to these replicas, which are behind."""

    number: int
    step: int
    to: tuple[str, ...]
    joined: bool = False


class TakeOutcome(msgspec.Struct, frozen=True, tag=True):
    """Lead: take yours from this one."""

    number: int
    step: int
    donor: str


class SettleOutcome(msgspec.Struct, frozen=True, tag=True):
    """Lead: what was taken is complete in all lanes; apply it."""


class AskFingerprint(msgspec.Struct, frozen=True, tag=True):
    """Lead: how is your part of the state?"""

    number: int


class TakeFingerprint(msgspec.Struct, frozen=True, tag=True):
    """Lead: my script has asked for `training.fingerprint()`, for which all ranks gather what they hold."""


class EndStep(msgspec.Struct, frozen=True, tag=True):
    """Lead: my loop is through with the step's batches."""

    step: int


class EndRun(msgspec.Struct, frozen=True, tag=True):
    """Lead: training is over. `finished`: the script goes on."""

    finished: bool


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """I have reached `protect`. `address`: where my lane reaches me; `facts`: what must be equal on all ranks."""

    address: str
    facts: dict[str, str]


class LaneReduced(msgspec.Struct, frozen=True, tag=True):
    """My lane's buckets are complete. What my header would say."""

    number: int
    fingerprint: int
    norms: tuple[tuple[int, int, float], ...]
    used: bytes
    losses: tuple[tuple[int, float, float], ...]
    metrics: tuple[tuple[int, str, float, float], ...]
    state: int
    settings: int
    can_save: bool = True
    bad: tuple[tuple[int, int, str], ...] = ()
    guard: GuardNote = GuardNote()
    unlike: tuple[str, ...] = ()  # members whose sums were not what they had said
    false: tuple[tuple[int, str, int], ...] = ()  # (bucket, reducer, what I compute)
    rows: RowsNote = RowsNote()  # of a robust rule


class ServeJoiner(msgspec.Struct, frozen=True, tag=True):
    """Lead: freeze your share of the state, as member `index` of `count`, for a rank of a replica that joins.
    `address`: of all its ranks; `told`: what the newest step left is what the loops have, so say that step, too."""

    joiner: str
    address: str
    serve: ServeId
    index: int
    count: int
    told: bool


class FeedWhole(msgspec.Struct, frozen=True, tag=True):
    """Lead: these spares hang on the new view. `whole`: they get the newest outcome from you."""

    addresses: dict[str, str]
    whole: bool


class FlushStreams(msgspec.Struct, frozen=True, tag=True):
    """Lead: nothing of before this view follows."""

    view: View


class CloseStreams(msgspec.Struct, frozen=True, tag=True):
    """Lead: say what is queued, and end all streams."""


class ServedAs(msgspec.Struct, frozen=True, tag=True):
    """Lead: this replica joins, and this is the attempt that counts; (0, 0) for none."""

    serve: ServeId


class LaneHas(msgspec.Struct, frozen=True, tag=True):
    """What has come of the state and of outcomes: the snapshot is whole and of `committed` (-1: it is not), and the
    outcomes before step `until` are."""

    serve: ServeId
    committed: int
    until: int


class LoadShares(msgspec.Struct, frozen=True, tag=True):
    """Lead: all lanes' snapshots are whole; become them."""

    serve: ServeId


class ReplayOutcome(msgspec.Struct, frozen=True, tag=True):
    """Lead: all lanes have this step's outcome; it takes its place, and the one before is applied."""

    step: int


class DrainLane(msgspec.Struct, frozen=True, tag=True):
    """Lead: this replica becomes a member of the view; take in all that was sent before it."""

    number: int
    view: View
    switched: bool


class LaneDrained(msgspec.Struct, frozen=True, tag=True):
    number: int


class JoinedView(msgspec.Struct, frozen=True, tag=True):
    """Lead: no stream is of use any more."""


class LiveOutcome(msgspec.Struct, frozen=True, tag=True):
    """Lead: our loops are in the step whose outcome waits for them; apply it."""


class EvaluateBatches(msgspec.Struct, frozen=True, tag=True):
    """Lead: in the evaluation that our loops are in, compute the batch of your place among these, or the last of them:
    all ranks of a replica go through the model together. `of`: how many batches it has."""

    number: int
    batches: tuple[int, ...]
    of: int


class LaneEvaluated(msgspec.Struct, frozen=True, tag=True):
    number: int
    rows: tuple[tuple[str, float, float], ...]


class Evaluated(msgspec.Struct, frozen=True, tag=True):
    """Lead: what the evaluation has given."""

    means: dict[str, float]


class LaneTaken(msgspec.Struct, frozen=True, tag=True):
    number: int


class LaneBroken(msgspec.Struct, frozen=True, tag=True):
    """My lane's view cannot go on."""

    number: int
    suspects: tuple[str, ...]
    why: str


class BeginRun(msgspec.Struct, frozen=True, tag=True):
    """Lead: the run's first view; begin where it begins, from a checkpoint if there is one."""

    number: int
    view: View


class RunBegun(msgspec.Struct, frozen=True, tag=True):
    """So many steps are in my part of the state."""

    number: int
    step: int


class TakeSave(msgspec.Struct, frozen=True, tag=True):
    """Lead: save your part of the state as it is now. `wait`: for memory to do so; the loop is over."""

    view: ViewId
    step: int
    reason: str
    attempt: int
    wait: bool


class SaveStable(msgspec.Struct, frozen=True, tag=True):
    """Lead: all members of this view have committed so many steps, the last."""

    view: ViewId
    step: int


class LoopLeft(msgspec.Struct, frozen=True, tag=True):
    """Lead: my loop was left; what was to be saved of it has begun."""


class SavesSay(msgspec.Struct, frozen=True, tag=True):
    """For the coordinator, of my part of saves."""

    messages: tuple[FromMember, ...]


class SavesHear(msgspec.Struct, frozen=True, tag=True):
    """Lead: what the coordinator said of saves; none: say again what it may have missed."""

    message: ToMember | None


class FingerprintSaid(msgspec.Struct, frozen=True, tag=True):
    number: int
    value: int


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """User code raised here; I exit after this."""

    microbatch: int
    error: str
    alike: str
    code: int
    final: bool = False  # as of `Failed`


class RankLeft(msgspec.Struct, frozen=True, tag=True):
    """My loop was left early, and my script is over."""


class AreYouThere(msgspec.Struct, frozen=True, tag=True):
    """Lead: a collective may have failed because you are gone. The thread that reads answers, whatever you do."""


class HereIAm(msgspec.Struct, frozen=True, tag=True):
    """The answer to `AreYouThere`."""


_Word = (
    DataNoted | OpenWorld | BeginStep | ExpectLeaves | ComputeLeaf | FormLane | ReduceLane | DropLane | ApplyOutcome
    | GiveOutcome | TakeOutcome | SettleOutcome | AskFingerprint | EndStep | EndRun | RankReady | LaneReduced
    | LaneTaken | LaneBroken | LaneStalled | EvaluateBatches | LaneEvaluated | Evaluated | ServeJoiner
    | FeedWhole | FlushStreams | CloseStreams | ServedAs | LaneHas | LoadShares | ReplayOutcome | DrainLane
    | LaneDrained | JoinedView | LiveOutcome | BeginRun | RunBegun | TakeSave | SaveStable | LoopLeft
    | SavesSay | SavesHear | FingerprintSaid | RankFailed | RankLeft | AreYouThere | HereIAm
    | LookCloser | LaneLooked | AskRows | RowsSaid | AuditLeaf | LeafPrinted | LookAgain | SlicesSaid
    | LaneGrams | RowsChosen | RepeatLeaf | LaneRepeated | TakeFingerprint | ViewOver
    | ProbeLane | LaneAnswers
)  # fmt: skip
DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_Word)
