"""An evaluation that the members of a view share, and that outlives any of them.

Each computes a contiguous range of batches and tells all what it has; a few times, so that little is lost with it.
Nobody waits at a barrier: who has everything goes on. Whoever forms a view tells what it knows of the evaluations
since the last commit, so one that is still inside gets the rest from who has left, and what nobody knows is shared out
anew. An evaluation before the step's inner loop belongs to the step's outcome, because a replica which joins in that
step goes through the same lines, with a state that is newer. What the numbers mean is `training/evaluation.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from outlast.core.phases import Phase
from outlast.errors import LoopUnrepeatable, StepMisuse, ViewAbandoned
from outlast.runtime.training.evaluation import Evaluation, Rows
from outlast.runtime.transport.connections import decoded
from outlast.runtime.transport.mesh import Mesh
from outlast.runtime.transport.peer_messages import Extra, Final, SumsReady
from outlast.runtime.transport.rank_words import EvaluateBatches, Evaluated, LaneEvaluated
from outlast.runtime.view.rounds import EVALUATED

if TYPE_CHECKING:
    from outlast.core.protocol import View
    from outlast.runtime.member.driver import Replica

__all__ = ["SharedEvaluations"]

_LOOK_S = 1.0
_TOLD = 16  # times that a member tells what it has of its range


class _Table(msgspec.Struct, frozen=True, array_like=True):
    """How many batches there are, and what its sender knows: (batch, rows)."""

    batches: int
    known: tuple[tuple[int, Rows], ...]


class SharedEvaluations:
    """A replica's part in the evaluations that all members share. `closed`: called when the run is over for this
    replica; it raises."""

    def __init__(self, replica: Replica, closed: Callable[[], None]) -> None:
        self._replica, self._closed = replica, closed
        self._step = -1  # steps that were committed when the tables were made
        self._tables: dict[int, tuple[int, dict[int, Rows]]] = {}  # by number: (batches, what is known)
        self._lived = 0  # evaluations that were taken from an outcome
        self._before = False
        replica.on_formed = self._tell_all

    def given(self) -> None:
        """The loop is given a step; its inner loop has not begun."""
        self._lived, self._before = 0, True
        self._replica.engine.evaluated.clear()

    def inner(self) -> None:
        """The step's inner loop begins."""
        self._before = False

    def run(self, wanted: Evaluation) -> dict[str, float]:
        """The means, the same on every member. Raises StepMisuse where others do not evaluate, or something else."""
        engine = self._replica.engine
        late = engine.late
        if late is not None:
            self._lived += 1
            if self._lived > len(late.evaluated):
                raise LoopUnrepeatable(
                    f"this replica evaluates before the inner loop of step {late.step}, and the others did not",
                    did="nothing more was committed",
                    remedy="evaluate on every replica, by the step's number alone",
                )
            return self._told(dict(late.evaluated[self._lived - 1]))
        if self._step != self._replica.member.committed:
            self._step = self._replica.member.committed
            self._tables.clear()
        number = len(self._tables)
        self._tables[number] = wanted.num_batches, {}
        with wanted.quiet():
            self._gather(wanted, number)
        engine.restore_buffers()
        found = wanted.result(self._tables[number][1])
        if self._before:
            engine.evaluated.append(tuple(found.items()))
        self._replica.enter(Phase.BODY)
        return self._told(found)

    def _told(self, found: dict[str, float]) -> dict[str, float]:
        """To the other ranks of this replica, whose loops are in the same call."""
        self._replica.siblings.tell(Evaluated(found))
        return found

    def _gather(self, wanted: Evaluation, number: int) -> None:
        """Until every batch is known, through as many views as it takes."""
        known = self._tables[number][1]
        mesh: Mesh | None = None
        while len(known) < wanted.num_batches:
            try:
                if self._replica.resume() is None:
                    self._closed()
                with self._replica.lock:
                    view, _ = self._replica.member.standing()
                mesh = self._replica.mesh
                if mesh is None:
                    raise ViewAbandoned("the view is closed")
                self._compute(wanted, number, view, mesh)
                self._replica.enter(Phase.IDLE)
                mesh.until(lambda m=mesh, v=view: self._complete(m, v, number), mesh.peers, Phase.IDLE)  # type: ignore[misc]
            except ViewAbandoned as reason:
                if mesh is not None:  # what was said before it ended counts
                    self._hear(mesh, number)
                self._replica.abandon(reason)

    def _compute(self, wanted: Evaluation, number: int, view: View, mesh: Mesh) -> None:
        known = self._tables[number][1]
        self._hear(mesh, number)
        mine = [i for i in self._range(view, self._replica.env.me, wanted.num_batches) if i not in known]
        width = self._replica.env.at_a_time
        groups = [tuple(mine[at : at + width]) for at in range(0, len(mine), width)]
        every = -(-len(groups) // _TOLD)
        for count, group in enumerate(groups, 1):
            self._replica.enter(Phase.BODY)
            known.update(zip(group, self._rows(wanted, group, mesh), strict=False))
            if self._replica.member.over(view.id):
                raise ViewAbandoned("told to leave")
            if not count % every or count == len(groups):
                self._tell(mesh, number)
                mesh.rest(0.0)

    def _rows(self, wanted: Evaluation, group: tuple[int, ...], mesh: Mesh) -> list[Rows]:
        """One batch on each rank of this replica, or on those that compute it together."""
        siblings = self._replica.siblings
        siblings.ask(lambda number: EvaluateBatches(number, group, wanted.num_batches))
        mine = wanted.compute(group[0])
        rows = [mine, *(told.rows for told in siblings.gather(LaneEvaluated, lambda: mesh.rest(_LOOK_S)))]
        return rows[:: self._replica.env.tensor_parallel]  # whose ranks have computed the same

    @staticmethod
    def _range(view: View, name: str, batches: int) -> range:
        place, size = view.members.index(name), len(view.members)
        return range(batches * place // size, batches * (place + 1) // size)

    # --- telling -------------------------------------------------------------------------------------------------
    def _tell(self, mesh: Mesh, number: int) -> None:
        batches, known = self._tables[number]
        mesh.broadcast(
            Extra(self._step, EVALUATED + number, msgspec.msgpack.encode(_Table(batches, tuple(known.items()))))
        )

    def _tell_all(self) -> None:
        """A view has formed."""
        mesh = self._replica.mesh
        if mesh is not None and self._step == self._replica.member.committed:
            for number in self._tables:
                self._tell(mesh, number)

    def _hear(self, mesh: Mesh, number: int) -> None:
        batches, known = self._tables[number]
        box = mesh.boxes.pop((Extra, self._step, EVALUATED + number), {})
        for name, message in box.items():
            told = decoded(name, message.body, _Table)
            if told.batches != batches:
                raise StepMisuse(
                    f"replicas evaluate different things at step {self._step}: {name} has {told.batches} batches, "
                    f"{self._replica.env.me} {batches}",
                    did="nothing more was committed",
                    remedy="the same dataset and batch_size everywhere; what a replica shall see of it outlast decides",
                )
            known.update(told.known)

    def _complete(self, mesh: Mesh, view: View, number: int) -> bool:
        """Whether everything is known. StepMisuse if it never will be: a member went on without telling its part."""
        self._hear(mesh, number)
        batches, known = self._tables[number]
        if len(known) >= batches:
            return True
        for name in mesh.peers:
            on = any(name in mesh.boxes.get((kind, self._step, 0), ()) for kind in (SumsReady, Final))
            if on and any(batch not in known for batch in self._range(view, name, batches)):
                raise StepMisuse(
                    f"{name} went on in step {self._step} without taking part in an evaluation",
                    where=f"replica {self._replica.env.me}",
                    did="nothing more was committed",
                    remedy="call training.evaluate on every replica, not under `if run.is_writer`; it is the call "
                    "itself that shares the work",
                )
        return False
