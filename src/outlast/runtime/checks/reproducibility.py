"""In the first step: is a microbatch's gradient a function of the microbatch (protocol, 16)?

In the first view the first member computes microbatch 0 twice and the second member once more, beside the real one;
every parameter's gradient is fingerprinted and thrown away. What differs is named before anything is trained with it.
Who is alone does the first member's part, after the step's own microbatches: what it draws from a generator of its own
it would not draw again when it goes on from a checkpoint. The ranks of a replica compute the first leaf together, one
microbatch each, as their lead says, and a fingerprint is of the replica, the sum of its ranks' (`lane_checks.py`); also
alone before the step's own, under the last of which their lanes begin the exchange. The loop sees these batches as
extra iterations of step 0; losses, sums, buffers, random state and registered state are as if they had not been. Not
done with bitwise = false.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from outlast.core.phases import Phase
from outlast.core.protocol.step.verdict import PartRows, first_difference
from outlast.errors import LoopUnrepeatable, StateDiverged
from outlast.runtime.checks._extra_batches import apart, gradients, prepare
from outlast.runtime.checks.lane_checks import LaneChecks, rows_of_ranks
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.losses import missing_backward, second_backward
from outlast.runtime.training.samples import Samples, batch_digest, unlike_samples
from outlast.runtime.transport.peer_messages import Parts
from outlast.runtime.view.port import Bench, ViewPort
from outlast.tensors import fingerprint

__all__ = ["FollowedRepeat", "Repeat", "check_alike", "printed", "samples_of"]

_CHECK = -2  # the "step" under which these fingerprints travel
_FIRST = "the run's first samples"


class FollowedRepeat:
    """The part of one rank. `rows`: what it found each time; `active`: a backward now belongs to the check."""

    def __init__(self, bench: Bench, engine: Engine) -> None:
        self._bench, self._engine = bench, engine
        self.rows: list[PartRows] = []
        self._wanted = 0  # rows, once the batch under way has seen its backward
        self._samples = "", 0
        self.active = False

    def follow(self, rounds: int, *, beside_others: bool = True) -> Iterator[Any]:
        """My microbatch of the first leaf so often, each time to see one backward. `beside_others`: ranks of one
        replica do, and the first time each says which samples it is given as the run's first."""
        engine = self._engine
        mine = engine.mine(0)
        self.rows, self.active = [], True
        with apart(engine, paused=True):
            first = [(_FIRST, engine.samples.first())] if beside_others else []
            if rounds == 1:  # who has fetched them at another place before gets the same
                engine.samples.fetch_otherwise(0, mine)
            for number in range(rounds):
                batch = prepare(self._bench, engine, 0, 0, Phase.LOAD)
                self._samples, self._wanted = (samples_of(mine), batch_digest(batch)), number + 1
                yield batch
                if len(self.rows) != self._wanted:
                    raise missing_backward(0, mine)
        self.rows = [(*first, *rows) for rows in self.rows[:1]] + self.rows[1:]
        self.active = False

    def backward(self, loss: Tensor) -> None:
        """Fingerprint the gradients and forget them."""
        engine = self._engine
        if len(self.rows) == self._wanted:
            raise second_backward()
        weight = 1.0 if engine.shards.width == 1 else engine.weight(0, engine.mine(0))
        self.rows.append((self._samples, *printed(engine.state.names, gradients(engine, loss, weight))))


class Repeat(FollowedRepeat):
    """One replica's part in the check. `others`: its other ranks, where it has several."""

    def __init__(self, port: ViewPort, engine: Engine, others: LaneChecks | None = None) -> None:
        super().__init__(port, engine)
        self._port, self._others = port, others if others is not None else LaneChecks()
        self._pending = False

    def rounds(self, *, computed: bool) -> int:
        """How often this replica computes the first leaf for the check. `computed`: the step's own microbatches are."""
        member, config = self._port.member, self._port.env.config
        view = member.view
        if view is None or not view.start or not member.formed or member.committed or not config.bitwise:
            return 0
        alone = len(view.members) == 1
        if (alone and not self._others.some) is not computed:
            return 0
        self._pending = not alone
        return dict(zip(view.members, (2, 1), strict=False)).get(member.me, 0)

    def batches(self, rounds: int) -> Iterator[Any]:
        """The extra batches; each must see one backward. All ranks of the replica enter its collectives together."""
        port = self._port
        if not rounds:
            return
        self._others.repeat(rounds)
        yield from self.follow(rounds, beside_others=self._others.some)
        lanes: list[Sequence[PartRows]] = [self.rows, *self._others.repeated()]
        if self._others.some:
            lanes = _given_alike(lanes)
        self.rows = [rows_of_ranks(tables) for tables in zip(*lanes, strict=True)]
        if self._pending and port.mesh is not None:
            port.mesh.broadcast(Parts(_CHECK, self.rows[0]))
        self._compare({f"{port.env.me}, time {i + 1}": rows for i, rows in enumerate(self.rows)})

    def conclude(self) -> None:
        """Before the first exchange: compare the two members. ViewAbandoned if the view ends; it is not repeated."""
        mesh, pending = self._port.mesh, self._pending
        self._pending = False
        if not pending or mesh is None or not mesh.view.start:
            return
        names = [name for name in mesh.view.members[:2] if name != mesh.me]
        found = mesh.collect(Parts, _CHECK, 0, Phase.HEADER, names)
        rows = {name: found[name].rows for name in names}
        if self.rows:
            rows[mesh.me] = self.rows[0]
        self._compare(rows)

    def _compare(self, rows: dict[str, PartRows]) -> None:
        check_alike(rows, self._engine.samples, self._engine.under((0, 1)))


def _given_alike(lanes: Sequence[Sequence[PartRows]]) -> list[Sequence[PartRows]]:
    """What ranks say of each time, without the run's first samples; raises LoopUnrepeatable if these are others on one
    rank than on another: each computes its own microbatches of what all are given."""
    firsts = [dict(tables[0])[_FIRST] for tables in lanes]
    for rank, first in enumerate(firsts):
        if first and firsts[0] not in {0, first}:
            raise LoopUnrepeatable(
                f"rank {rank} of this replica is given other samples than rank 0: the dataset, or stream, is another",
                did="nothing was trained with it",
                remedy="give protect all samples on every rank, and leave out what splits them by rank (split_by_node, "
                "split_dataset_by_node, shard(), a distributed sampler): outlast shares them out among the ranks",
            )
    return [[tuple(row for row in rows if row[0] != _FIRST) for rows in tables] for tables in lanes]


def check_alike(rows: dict[str, PartRows], samples: Samples, microbatches: Iterable[int]) -> None:
    """Raises LoopUnrepeatable or StateDiverged where computations of the first leaf, by name, have found different
    things. `microbatches`: under it."""
    if len(set(rows.values())) == 1:
        return
    name, count = first_difference(rows)
    for microbatch in microbatches:
        if name == samples_of(microbatch):
            how = f"whoever fetches them, and after whatever ({'; '.join(rows)})"
            raise unlike_samples(0, microbatch, samples.indices(0, microbatch), how)
    more = f" and of {count - 1} more" if count > 1 else ""
    raise StateDiverged(
        f"the gradient of {name}{more} differs between computations of one microbatch ({'; '.join(rows)})",
        where="before the first step",
        did="nothing was trained with it",
        remedy="torch.use_deterministic_algorithms(True) names the operation; draw random numbers from torch, "
        "numpy or random, which are seeded by position; or allow it with bitwise = false (OUTLAST_BITWISE)",
    )


def printed(names: Iterable[str], grads: Iterable[Tensor | None]) -> PartRows:
    """A fingerprint of each gradient, by the parameter's name."""
    return tuple((name, 0 if grad is None else fingerprint(grad)) for name, grad in zip(names, grads, strict=True))


def samples_of(microbatch: int) -> str:
    """What its samples are called among the names of parameters."""
    return f"the samples of microbatch {microbatch}"
