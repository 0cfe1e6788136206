"""Replicas that lie, for tests and `prove`: what OUTLAST_LIES orders, done in the exchange of a real process.

A liar waits until every honest member has offered a bucket, reads their rows (it knows everything, as the literature's
adversary does), and offers its lie (`outlast.tensors.ATTACKS`). Where the rule keeps momentum for each row, the lie is
chosen so that its momentum is what the attack wants. Over a network a liar knows its own gradient only. A lying reducer
falsifies its slice of the result instead. In a normal run the variable is not set, and nothing of this is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from outlast.core.phases import Phase
from outlast.core.protocol import Node
from outlast.errors import ConfigError
from outlast.runtime._engine import Engine
from outlast.runtime._mesh import Ready
from outlast.runtime._plane import Plane, Reduction, SharedPlane, Task
from outlast.runtime._row_planes import RowSteps
from outlast.tensors import ATTACKS, inconsistent, lying_reducer, strongest

__all__ = ["Liar", "Lie", "lying"]

_FACTORS = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0)


class Lie(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`replicas`: slots (r1) or incarnations (r1.2) that collude. `attack`: a name in `ATTACKS`, `inconsistent` or
    `lying_reducer`, with its `options`. `optimise`: take the factor that carries the rule furthest."""

    replicas: tuple[str, ...]
    attack: str
    options: dict[str, Any] = {}
    first_step: int = 0
    optimise: bool = False

    def includes(self, member: str) -> bool:
        return member in self.replicas or member.partition(".")[0] in self.replicas


def lying(text: str, me: str, plane: Plane, engine: Engine) -> Plane:
    """The plane through which this member lies, or `plane` itself if it is honest."""
    try:
        lies = msgspec.json.decode(text, type=list[Lie])
    except msgspec.DecodeError as error:
        raise ConfigError(f"OUTLAST_LIES is no list of lies: {error}", remedy="see prove") from error
    mine = [lie for lie in lies if lie.includes(me)]
    for lie in mine:
        if lie.attack not in (*ATTACKS, "inconsistent", "lying_reducer"):
            raise ConfigError(f"no attack {lie.attack!r}", remedy=f"one of: {', '.join(ATTACKS)}")
    return Liar(mine[0], plane, engine) if mine else plane


class Liar:
    """A plane that offers its buckets last, and falsely. Everything else is the honest plane's."""

    def __init__(self, lie: Lie, plane: Any, engine: Engine) -> None:
        self.lie, self.plane, self.engine = lie, plane, engine
        self._earlier: dict[int, Tensor] = {}
        self._task: Task | None = None
        self._offered = 0
        if lie.attack == "lying_reducer" and isinstance(plane, RowSteps):
            plane.tamper = self._tamper

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plane, name)

    @property
    def _active(self) -> bool:
        return self._task is not None and self._task.step >= self.lie.first_step and self.lie.attack != "lying_reducer"

    def begin(self, task: Task) -> None:
        self._task, self._offered = task, 0
        self.plane.begin(task)

    def offer(self, bucket: int) -> None:
        """The honest ones first; what I know alone I say at once."""
        self._offered = bucket + 1
        if not self._active:
            self.plane.offer(bucket)
        elif not isinstance(self.plane, SharedPlane):
            self._falsify(bucket, self._mean_of(self.plane.mesh.me, bucket)[None], 1, 0)
            self.plane.offer(bucket)

    def finish(self) -> Reduction:
        if self._active and isinstance(self.plane, SharedPlane):
            for bucket in range(self._offered):
                self._lie_last(bucket)
        found: Reduction = self.plane.finish()
        return found

    def _lie_last(self, bucket: int) -> None:
        members, task = self.plane.members, self._task
        assert task is not None
        liars = [name for name in members if self.lie.includes(name)]
        honest = [name for name in members if name not in liars]
        self.plane.mesh.collect(Ready, task.step, bucket, Phase.SCATTERED, honest)
        rows = torch.stack([self._mean_of(name, bucket) for name in honest or liars[:1]])
        self._falsify(bucket, rows, len(liars), liars.index(self.plane.mesh.me))
        self.plane.offer(bucket)

    def _mean_of(self, member: str, bucket: int) -> Tensor:
        """Mean gradient of all that a member holds; with momentum, that of its first row."""
        total = torch.zeros_like(self.engine.out[bucket])
        share = 0.0
        for node, flat in self._held(member, bucket):
            total += flat
            share += self._share(node)
        return self._moved(member, bucket, total / share if share else total)

    def _held(self, member: str, bucket: int) -> list[tuple[Node, Tensor]]:
        task, me = self._task, self.plane.mesh.me
        assert task is not None
        nodes = task.nodes[self.plane.members.index(member)]
        if member == me:
            return [(n, self.engine.memory.flats(s)[bucket]) for n, s in zip(nodes, task.slots, strict=True)]
        slots = self.plane.mesh.boxes[Ready, task.step, bucket][member].slots
        return [(n, self.plane.peers[member].flats(s)[bucket]) for n, s in zip(nodes, slots, strict=True)]

    def _share(self, node: Node) -> float:
        assert self._task is not None
        return sum(self.engine.weight(self._task.step, leaf) for leaf in range(*node))

    def _momentum(self, member: str, bucket: int) -> tuple[float, Tensor] | None:
        robust, task = self.engine.robust, self._task
        if robust is None or not robust.settings.momentum or task is None:
            return None
        first = task.nodes[self.plane.members.index(member)][0][0]
        row = next(r for r, (lo, hi) in enumerate(robust.roots) if lo <= first < hi)
        return robust.settings.momentum, robust.memory.now[row][bucket]

    def _moved(self, member: str, bucket: int, mean: Tensor) -> Tensor:
        known = self._momentum(member, bucket)
        return mean if known is None else known[0] * known[1] + (1.0 - known[0]) * mean

    def _falsify(self, bucket: int, honest: Tensor, num_liars: int, place: int) -> None:
        lie = self._made(bucket, honest, num_liars, place)
        known = self._momentum(self.plane.mesh.me, bucket)
        if known is not None:
            lie = (lie - known[0] * known[1]) / (1.0 - known[0])
        self._earlier[bucket] = honest.clone()
        for node, flat in self._held(self.plane.mesh.me, bucket):
            flat.copy_(lie * self._share(node))

    def _made(self, bucket: int, honest: Tensor, num_liars: int, place: int) -> Tensor:
        options = dict(self.lie.options)
        if self.lie.attack == "inconsistent":
            ranges = self.plane.ranges[bucket]
            told = inconsistent(honest, num_liars, num_peers=len(ranges), **options)
            return torch.cat([told[peer][place, lo:hi] for peer, (lo, hi) in enumerate(ranges)])
        family = ATTACKS[self.lie.attack]
        if self.lie.attack == "stale":
            options["earlier"] = self._earlier.get(bucket, honest)
        if self.lie.attack == "random_bits":
            assert self._task is not None
            options["seed"] = self._task.step
        if self.lie.optimise:
            return strongest(family, honest, num_liars, self._rule(bucket), _FACTORS)[0][place]
        return family(honest, num_liars, **options)[place]

    def _rule(self, bucket: int) -> Callable[[Tensor], Tensor]:
        robust = self.engine.robust

        def aggregate(stack: Tensor) -> Tensor:
            if robust is None or len(stack) != robust.num_rows:
                return stack.mean(dim=0)
            return robust.rule_of(bucket).aggregate(list(stack), compiled=False)

        return aggregate

    def _tamper(self, bucket: int, target: Tensor) -> None:
        if self._task is not None and self._task.step >= self.lie.first_step:
            target.copy_(lying_reducer(target, **self.lie.options))

    def give(self, step: int, meta: bytes, to: Sequence[str]) -> None:
        self.plane.give(step, meta, to)

    def take(self, step: int, donor: str) -> bytes:
        data: bytes = self.plane.take(step, donor)
        return data

    def close(self) -> None:
        self.plane.close()
