"""A replica's microbatches: what each begins with, what it leaves in the partial sums, and what headers tell of it.

All that a replica trains with is put together here, once. What becomes of a step's gradient is `engine.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from outlast.core.position import position_seed
from outlast.core.protocol import partials
from outlast.errors import StepMisuse
from outlast.health import CheckedSums
from outlast.runtime.exchange.plane import Reduction
from outlast.runtime.exchange.robust_rows import Robust
from outlast.runtime.exchange.second_reduction import Checks
from outlast.runtime.exchange.shard_sums import ShardSums
from outlast.runtime.exchange.slots import Memory
from outlast.runtime.training._partial_sums import Accumulator
from outlast.runtime.training._staging import Staging
from outlast.runtime.training.frozen import raw
from outlast.runtime.training.loop_state import Lived, LoopState
from outlast.runtime.training.metrics import Metrics
from outlast.runtime.training.opening import KEY, Opening
from outlast.runtime.training.random_state import seed_everything
from outlast.runtime.training.samples import Samples
from outlast.runtime.training.state import State
from outlast.runtime.training.step_checks import Meta, StepChecks
from outlast.runtime.training.warm_memory import Warm
from outlast.runtime.training.witness import Witness
from outlast.tensors import Layout, is_shard, prepare_fold

__all__ = ["Microbatches"]


class Microbatches:
    """Computes a step's microbatches into partial sums. `clip_norm`: None, or the largest global gradient norm applied.
    `shards`: which rank of its replica this process is. A leaf is what all its ranks compute at a time: one microbatch
    each."""

    def __init__(
        self,
        state: State,
        samples: Samples,
        layout: Layout,
        memory: Memory,
        clip_norm: float | None,
        seed: int,
        robust: Robust | None = None,
        shards: ShardSums | None = None,
    ) -> None:
        self.state, self.samples, self.layout, self.memory = state, samples, layout, memory
        self.clip_norm, self.seed, self.robust = clip_norm, seed, robust
        self.shards = shards if shards is not None else ShardSums()
        self.num_leaves = samples.num_leaves // self.shards.width  # each `width` microbatches
        self.num_rows = robust.num_rows if robust is not None else 1
        self.sharded = any(map(is_shard, state.params))
        self.device = state.params[0].device  # that computes; sums may lie elsewhere (`layout.device`)
        self.step_checks = StepChecks()
        self.staging = Staging.between(state.params, layout)
        self.sums = Accumulator(
            state.params, layout, memory, self.num_leaves, self.num_rows, self.step_checks, self.staging, state.stages
        )
        self.out = Memory(layout, 1, shared=False).flats(0) if self.staging is None else self.staging.outcome()
        """The outcome, a flat tensor a bucket. A plane may put another in a tensor's place."""
        self.opening = state.extra[KEY] = Opening(samples.steps_per_epoch if samples.known_length else 0)
        self.losses: dict[int, tuple[float, float]] = {}
        self.metrics = Metrics()
        self.evaluated: list[tuple[tuple[str, float], ...]] = []  # before the step's inner loop
        self.stop_wanted = ""  # why this replica's loop wants the step under way to be the last
        self.stopped = ""  # why the last step was the last
        self.on_stop: Callable[[int], None] = lambda steps: None  # told after how many
        self.after_step: list[Callable[[], object]] = []  # of the script: called with each step, by whoever applies it
        self.meta: Meta | None = None  # of the last step applied
        self.late: Meta | None = None  # of one whose step this process's loop has yet to go through
        self._lived: Lived | None = None
        self._settled = b""  # the settings after it, where it is applied already
        self.loop = LoopState(state)
        self.frozen: list[Any] = []  # copies under way, each with `wait`: `Frozen`, or a save's
        self.warm = Warm()  # what joiners are served from
        self._buffers = list(state.buffers.values())
        self._start_buffers = [b.clone() for b in self._buffers]
        self._end_buffers: tuple[bytes, ...] = ()
        self._used: bytes | None = None  # before a leaf without samples, which uses no parameter
        self.checks: Checks | None = None  # of what other members reduce
        self.checked: CheckedSums | None = None  # of the products of a microbatch
        self.witness: Witness | None = None  # for who proves something from outside
        if layout.device.type == "cpu":
            prepare_fold(wait=False)

    def prepare(self, step: int, leaf: int) -> Any:
        """Everything a microbatch starts from: its samples, the step's first buffers, its random state (15, 16)."""
        leaf = self.mine(leaf)
        batch = self.samples.fetch(step, leaf)
        if self.witness is not None:
            self.witness.fetched(batch)
        self.restore_buffers()
        seed_everything(self._seed_of(step, leaf))
        self.step_checks.flips.begin(step, leaf)
        self.step_checks.guards.microbatch_begins()
        return batch

    def mine(self, leaf: int) -> int:
        """The microbatch of a leaf that this rank computes."""
        return leaf * self.shards.width + self.shards.place

    def under(self, node: tuple[int, int]) -> range:
        """The microbatches that the ranks of a replica compute for these leaves."""
        return range(node[0] * self.shards.width, node[1] * self.shards.width)

    def is_empty(self, step: int, leaf: int) -> bool:
        """Whether a leaf has no samples (in the short last batch). With several ranks none is: all go through the model
        together, and who has none takes others, which count nothing."""
        return self.shards.width == 1 and self.samples.sizes(step)[leaf] == 0

    def expect(self, first: Sequence[int], share: Sequence[int], step: int, since: int) -> None:
        """Which leaves this process will compute in `step`, and in all others from `since` on."""
        now, later = [self.mine(leaf) for leaf in first], [self.mine(leaf) for leaf in share]
        self.samples.expect(lambda number: now if number == step else later, since)

    def _seed_of(self, step: int, leaf: int) -> int:
        return position_seed(self.seed, step, leaf, 2)

    def restore_buffers(self) -> None:
        """Module buffers as they are between two steps."""
        for buffer, start in zip(self._buffers, self._start_buffers, strict=True):
            buffer.copy_(start)

    def weight(self, step: int, leaf: int) -> float:
        """Share of a microbatch in the step's gradient if the batch is short, else 1 (then 1/G at the root)."""
        if self.robust is not None:
            return self.robust.weight(step, leaf)
        sizes = self.samples.sizes(step)
        return 1.0 if len(set(sizes)) == 1 else sizes[leaf] / sum(sizes)

    def scale(self, step: int) -> float:
        """Applied once at the root."""
        mean = 1.0 / self.samples.num_leaves if len(set(self.samples.sizes(step))) == 1 else 1.0
        return mean / self.state.scaling.factor

    def begin(self, step: int, leaf: int, on_bucket: Callable[[int], None] | None, beside: bool = False) -> None:
        weight, alone = self.weight(step, self.mine(leaf)), self.shards.width == 1
        sizes, first = self.samples.sizes(step), leaf * self.shards.width
        self._used = None if any(sizes[first : first + self.shards.width]) else bytes(self.sums.used)
        counts = sizes[self.mine(leaf)] > 0
        self.shards.begin(weight if counts else 0.0)  # the ranks' microbatches are added up before they come here
        self.sums.begin(leaf, weight if alone else 1.0, on_bucket, beside)

    def end(self, step: int, leaf: int, loss: float) -> None:
        """The backward is over: fold, and keep what microbatch 0 did to the buffers, if it has samples."""
        if self.shards.width > 1:
            self.shards.ended()
        self.sums.end()
        if self._used is not None:
            self.sums.used[:] = self._used
        self.step_checks.guards.microbatch_ends()
        leaf = self.mine(leaf)
        size = self.samples.sizes(step)[leaf]
        loss = loss if size else 0.0  # whatever went through the model in its place
        self.losses[leaf] = (loss, float(size))
        if self.witness is not None:
            self.witness.computed(step, leaf, loss)
        if leaf == 0 and self.state.stages is not None:
            self._check_constant()
        elif leaf == 0:
            ended = self._buffers if size else self._start_buffers
            self._end_buffers = tuple(raw(b.cpu()).numpy().tobytes() for b in ended)

    def _check_constant(self) -> None:
        """Headers are the lead's, so buffers of other stages could not be told to other replicas."""
        for name, buffer, start in zip(self.state.buffers, self._buffers, self._start_buffers, strict=True):
            if not torch.equal(raw(buffer), raw(start)):
                raise StepMisuse(
                    f"a microbatch changed {name}, a buffer of a stage of the pipeline",
                    did="the step was not committed",
                    remedy="layers without running statistics (LayerNorm, GroupNorm, not BatchNorm) in a pipeline",
                )

    def skip(self, step: int, leaf: int) -> None:
        """A microbatch without samples (the short last batch): a gradient of zeros."""
        for param in self.state.params:
            param.grad = None
        self.begin(step, leaf, None)
        self.end(step, leaf, 0.0)

    def evidence(
        self,
        leaves: Sequence[int],
        norms: dict[int, float],
        output: int,
        others: tuple[tuple[int, int, float], ...] = (),
    ) -> dict[str, Any]:
        """My part of the header; `others`: norms of the replica's other lanes."""
        width = self.shards.width
        mine = [leaf * width + place for leaf in leaves for place in range(width)]
        return {
            "losses": tuple((leaf, *self.losses[leaf]) for leaf in mine if leaf in self.losses),
            "metrics": self._metrics_of(mine),
            "stop": self.stop_wanted,
            "bad": self.samples.bad.told(mine),
            "used": bytes(self.sums.used),
            "norms": (*(partials(norms, self.layout.num_blocks) if norms else ()), *others),
            "output": output & ((1 << 64) - 1),
            **({"rows": self.robust.note} if self.robust is not None else {}),
        }

    def lane_evidence(self, found: Reduction) -> dict[str, Any]:
        """What a rank that is not the lead tells it of an exchange."""
        norms = partials(found.norms, self.layout.num_blocks) if found.norms else ()
        losses = tuple((leaf, *row) for leaf, row in sorted(self.losses.items()))
        return {
            "norms": norms,
            "used": bytes(self.sums.used),
            "losses": losses,
            "metrics": self._metrics_of(self.losses),
            "bad": self.samples.bad.met(),
            **({"rows": self.robust.note} if self.robust is not None else {}),
        }

    def _metrics_of(self, leaves: Iterable[int]) -> tuple[tuple[int, str, float, float], ...]:
        """Those of microbatches that have samples: the loop also gives some for what stands in for one."""
        return self.metrics.told(leaf for leaf in leaves if leaf in self.losses and self.losses[leaf][1])

    def take_in(
        self,
        used: bytes,
        losses: Sequence[tuple[int, float, float]],
        metrics: Sequence[tuple[int, str, float, float]],
        bad: Sequence[tuple[int, int, str]],
    ) -> None:
        """What another rank of this replica found in the step."""
        self.samples.bad.heard(bad)
        for index, byte in enumerate(used):
            self.sums.used[index] |= byte
        self.losses.update({leaf: (loss, weight) for leaf, loss, weight in losses})
        for leaf in {row[0] for row in metrics}:
            self.metrics.begin(leaf)
        for leaf, name, value, weight in metrics:
            self.metrics.put(leaf, name, value, weight)

    @property
    def end_buffers(self) -> tuple[bytes, ...]:
        """Buffers after microbatch 0, if it was computed here."""
        return self._end_buffers if 0 in self.losses else ()

    @property
    def with_norms(self) -> bool:
        """Whether reducers take the norms of their slices."""
        return self.clip_norm is not None or self.step_checks.guards.reads_norm or self.state.scaling.active
