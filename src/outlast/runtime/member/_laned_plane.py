"""The exchange of all lanes of a replica as one plane, and what its lead folds of a robust rule's rows over them.

A lane that is complete says so with what its header would say; the lead folds that into its own header, which therefore
is said only when all lanes of the replica are complete (protocol, 37). Of a rule that measures distances each lane has
the part of its own shards: the lead sends all of them to the other replicas, adds up what all have sent, and tells what
the sum is, so that all ranks choose the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from outlast.core.protocol import RowsNote
from outlast.core.protocol.slices import in_lane, lane_and_bucket
from outlast.core.protocol.step.verdict import RowEvidence
from outlast.errors import StepMisuse
from outlast.runtime.exchange.plane import ExchangeTask, Plane, Reduction
from outlast.runtime.exchange.row_plane import OneRank, RowSteps
from outlast.runtime.member._siblings import LOOK_S, Siblings
from outlast.runtime.training.engine import Engine
from outlast.runtime.transport import rank_words as say
from outlast.runtime.transport.mesh import Mesh
from outlast.runtime.transport.rank_check_words import LaneGrams, LookAgain, RowsChosen, SlicesSaid
from outlast.tensors import combine

__all__ = ["LanedPlane"]


class _LeadRanks(OneRank):
    """The other ranks, to the plane of their lead's own lane. `wait`: as of `Siblings.gather`."""

    def __init__(self, siblings: Siblings, wait: Callable[[], None]) -> None:
        self._siblings, self._wait = siblings, wait

    def parts(self, mine: list[bytes]) -> list[list[bytes]]:
        told: list[LaneGrams] = self._siblings.gather(LaneGrams, self._wait)
        return [mine, *(list(lane.parts) for lane in told)]

    def tell(self, totals: list[bytes]) -> None:
        self._siblings.tell_of_question(lambda number: RowsChosen(number, tuple(totals)))


class LanedPlane:
    """The lead's plane, and with it those of the other lanes. While the lead waits for these, its own peers are heard
    and answered."""

    def __init__(
        self, own: Plane, siblings: Siblings, engine: Engine, mesh: Mesh, disguise: Callable[[Plane], Plane]
    ) -> None:
        self.siblings, self.engine, self.members = siblings, engine, mesh.view.members
        self._wait = lambda: mesh.rest(LOOK_S)
        if isinstance(own, RowSteps):
            own.ranks = _LeadRanks(siblings, self._wait)
        self.own = disguise(own)

    def begin(self, task: ExchangeTask) -> None:
        lane = say.LaneTask(task.step, task.nodes, task.with_norms, task.sent is not None)
        self.siblings.ask(lambda number: say.ReduceLane(number, lane))
        self.own.begin(task)

    def offer(self, bucket: int) -> None:
        self.own.offer(bucket)

    def finish(self) -> Reduction:
        """When every lane is complete: what all of them found. Raises ViewAbandoned, StepMisuse."""
        found = self.own.finish()
        told: list[say.LaneReduced] = self.siblings.gather(say.LaneReduced, self._wait)
        mine = self.engine.loop.digest(self.engine.loop.settings)
        if any(lane.settings != mine for lane in told):
            raise StepMisuse(
                "the loops of this replica's ranks set different learning rates or modes",
                did="nothing was committed",
                remedy="do the same on every rank: decide by what is equal everywhere, such as step.loss",
            )
        for lane in told:
            self.engine.take_in(lane.used, lane.losses, lane.metrics, lane.bad)
        self.siblings.state = [lane.state for lane in told]
        self.siblings.can_save = all(lane.can_save for lane in told)
        self.siblings.notes = [lane.guard for lane in told]
        found.fingerprint = combine([found.fingerprint, *(lane.fingerprint for lane in told)])
        found.others = tuple(part for lane in told for part in lane.norms)
        for place, lane in enumerate(told, 1):
            found.unlike.update(lane.unlike)
            found.false |= {(in_lane(place, bucket), reducer): value for bucket, reducer, value in lane.false}
            if self.engine.robust is not None:
                self.engine.robust.take_in(place, lane.rows)
        return found

    # --- rows of a robust rule ------------------------------------------------------------------------------------
    def refuse_bad_rows(self, notes: Sequence[RowsNote], leaves: Mapping[str, Sequence[int]]) -> None:
        """See `Robust`: the notes are of whole replicas."""
        cast(RowEvidence, self.own).refuse_bad_rows(notes, leaves)

    def false(self, bucket: int, reducer: int) -> bool | None:
        """As the rank in whose lane the slice is finds it."""
        key = bucket, self.members[reducer]
        told = self.look_again([key]).get(key)
        return told[0] != told[1] if told is not None else None

    def give(self, step: int, meta: bytes, to: Sequence[str]) -> None:
        self.siblings.ask(lambda number: say.GiveOutcome(number, step, tuple(to), self.siblings.joined))
        self.own.give(step, meta, to)

    def take(self, step: int, donor: str) -> bytes:
        """All lanes' parts of the outcome are here, or none counts."""
        self.siblings.ask(lambda number: say.TakeOutcome(number, step, donor))
        told = self.own.take(step, donor)
        self.siblings.gather(say.LaneTaken, self._wait)
        self.siblings.tell(say.SettleOutcome())
        return told

    def look_again(self, slices: Sequence[tuple[int, str]]) -> dict[tuple[int, str], tuple[int, int]]:
        of_lane: dict[int, list[tuple[int, str]]] = {place: [] for place in range(len(self.siblings.pipes) + 1)}
        for number, reducer in slices:
            place, bucket = lane_and_bucket(number)
            of_lane[place].append((bucket, reducer))
        self.siblings.ask_each(lambda number, place: LookAgain(number, tuple(of_lane[place])))
        found = self.own.look_again(of_lane[0])
        for place, told in enumerate(self.siblings.gather(SlicesSaid, self._wait), 1):
            found |= {(in_lane(place, bucket), name): (old, new) for bucket, name, old, new in told.rows}
        return found

    def close(self) -> None:
        self.own.close()
