"""Replicas that lie, for tests and `prove`: what OUTLAST_LIES orders, done in the exchange of a real process.

A liar waits until every honest member has offered a bucket, reads their rows (it knows everything, as the literature's
adversary does), and offers a lie about each of its own rows (`outlast.tensors.ATTACKS`). Where the rule keeps momentum
for each row, the lie is chosen so that its momentum is what the attack wants. Over a network a liar knows its own rows
only. A lying reducer falsifies its slice of the result instead. In a normal run the variable is not set, and nothing of
this is imported.
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
from outlast.runtime.exchange.plane import ExchangeTask, Plane, Reduction, SharedPlane
from outlast.runtime.exchange.row_plane import RowSteps
from outlast.runtime.training.engine import Engine
from outlast.runtime.transport.peer_messages import SumsReady
from outlast.tensors import ATTACKS, inconsistent, lying_reducer, strongest

__all__ = ["Liar", "Lie", "lying"]

_FACTORS = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0)
_Held = tuple[str, int, tuple[int, ...]]  # a member, a row, and which of the member's sums are of this row


class Lie(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`replicas`: slots (r1) or incarnations (r1.2) that collude, each with all its ranks, or one rank of a slot (r1/1;
    r1/0 is the lead). `attack`: a name in `ATTACKS`, `inconsistent` or `lying_reducer`, with its `options`. `optimise`:
    take the factor that carries the rule furthest. `pattern`: lie only about the parameters of this pattern of the
    aggregation, so that one run can hold many cases; empty: about all."""

    replicas: tuple[str, ...]
    attack: str
    options: dict[str, Any] = {}
    first_step: int = 0
    optimise: bool = False
    pattern: str = ""

    def includes(self, member: str, place: int = 0) -> bool:
        """Whether this rank of a member lies."""
        slot = member.partition(".")[0]
        return not {member, slot, f"{slot}/{place}"}.isdisjoint(self.replicas)


def lying(text: str, me: str, plane: Plane, engine: Engine, place: int) -> Plane:
    """The plane through which this member lies, or `plane` itself if it is honest."""
    try:
        lies = msgspec.json.decode(text, type=list[Lie])
    except msgspec.DecodeError as error:
        raise ConfigError(f"OUTLAST_LIES is no list of lies: {error}", remedy="see prove") from error
    mine = [lie for lie in lies if lie.includes(me, place)]
    for lie in mine:
        if lie.attack not in (*ATTACKS, "inconsistent", "lying_reducer"):
            raise ConfigError(f"no attack {lie.attack!r}", remedy=f"one of: {', '.join(ATTACKS)}")
    return Liar(mine, plane, engine, place) if mine else plane


class Liar:
    """A plane that offers its buckets last, and falsely. Everything else is the honest plane's."""

    def __init__(self, lies: Sequence[Lie], plane: Any, engine: Engine, place: int = 0) -> None:
        self.lies, self.plane, self.engine, self._place = lies, plane, engine, place
        self._earlier: dict[int, Tensor] = {}
        self._task: ExchangeTask | None = None
        self._held_back: list[int] = []
        if isinstance(plane, RowSteps) and any(lie.attack == "lying_reducer" for lie in lies):
            plane.tamper = self._tamper

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plane, name)

    def _lie_about(self, bucket: int) -> Lie | None:
        """What I lie about this bucket in this step, as a computer of gradients."""
        assert self._task is not None
        for lie in self.lies:
            if lie.attack != "lying_reducer" and self._task.step >= lie.first_step and self._covers(lie, bucket):
                return lie
        return None

    def _covers(self, lie: Lie, bucket: int) -> bool:
        robust = self.engine.robust
        if not lie.pattern or robust is None:
            return not lie.pattern
        return lie.pattern == robust.settings.groups[robust.group_of[bucket]].pattern

    def begin(self, task: ExchangeTask) -> None:
        self._task, self._held_back = task, []
        self.plane.begin(task)

    def offer(self, bucket: int) -> None:
        """The honest ones first; what I know alone I say at once. Buckets keep their order, as reducing them does."""
        lie = self._lie_about(bucket)
        if isinstance(self.plane, SharedPlane) and (lie is not None or self._held_back):
            self._held_back.append(bucket)
        elif lie is None:
            self.plane.offer(bucket)
        else:
            mine = self._rows_of([self.plane.mesh.me])
            self._falsify(lie, bucket, torch.stack([self._mean_of(row, bucket) for row in mine]), mine, mine)
            self.plane.offer(bucket)

    def finish(self) -> Reduction:
        for bucket in self._held_back:
            lie = self._lie_about(bucket)
            if lie is not None:
                self._lie_last(lie, bucket)
            self.plane.offer(bucket)
        found: Reduction = self.plane.finish()
        return found

    def _lie_last(self, lie: Lie, bucket: int) -> None:
        members, task = self.plane.members, self._task
        assert task is not None
        liars = [name for name in members if lie.includes(name, self._place)]
        honest = [name for name in members if name not in liars]
        self.plane.mesh.collect(SumsReady, task.step, bucket, Phase.SCATTERED, honest)
        false, mine = self._rows_of(liars), self._rows_of([self.plane.mesh.me])
        rows = torch.stack([self._mean_of(row, bucket) for row in self._rows_of(honest) or mine])
        self._falsify(lie, bucket, rows, false, mine)

    def _rows_of(self, members: Sequence[str]) -> list[_Held]:
        """Each row that these hold something of, once a holder; without rows, all that each holds."""
        assert self._task is not None
        robust, found = self.engine.robust, []
        for name in members:
            nodes = self._task.nodes[self.plane.members.index(name)]
            bounds = robust.roots if robust is not None else [(0, self._task.num_leaves)]
            for number, (lo, hi) in enumerate(bounds):
                places = tuple(i for i, node in enumerate(nodes) if lo <= node[0] < hi)
                if places:
                    found.append((name, number, places))
        return found

    def _mean_of(self, held: _Held, bucket: int) -> Tensor:
        """The row's mean gradient, or its momentum, of what its holder has of it."""
        total = torch.zeros_like(self.engine.out[bucket])
        share = 0.0
        for node, flat in self._sums(held, bucket):
            total += flat
            share += self._share(node)
        mean, known = total / share if share else total, self._momentum(held, bucket)
        return mean if known is None else known[0] * known[1] + (1.0 - known[0]) * mean

    def _sums(self, held: _Held, bucket: int) -> list[tuple[Node, Tensor]]:
        task, (name, _, places) = self._task, held
        assert task is not None
        nodes = task.nodes[self.plane.members.index(name)]
        if name == self.plane.mesh.me:
            return [(nodes[i], self.engine.memory.flats(task.slots[i])[bucket]) for i in places]
        slots = self.plane.mesh.boxes[SumsReady, task.step, bucket][name].slots
        return [(nodes[i], self.plane.peers[name].flats(slots[i])[bucket]) for i in places]

    def _share(self, node: Node) -> float:
        assert self._task is not None
        return sum(self.engine.weight(self._task.step, leaf) for leaf in self.engine.under(node))

    def _momentum(self, held: _Held, bucket: int) -> tuple[float, Tensor] | None:
        robust = self.engine.robust
        if robust is None or not robust.settings.momentum:
            return None
        return robust.settings.momentum, robust.memory.now[held[1]][bucket]

    def _falsify(self, order: Lie, bucket: int, honest: Tensor, liars: list[_Held], mine: list[_Held]) -> None:
        lies = self._made(order, bucket, honest, len(liars))
        for held in mine:
            lie, known = lies[liars.index(held)], self._momentum(held, bucket)
            if known is not None:
                lie = (lie - known[0] * known[1]) / (1.0 - known[0])
            for node, flat in self._sums(held, bucket):
                flat.copy_(lie * self._share(node))
        self._earlier[bucket] = honest.clone()

    def _made(self, order: Lie, bucket: int, honest: Tensor, num_liars: int) -> Tensor:
        """The liars' rows, one after another."""
        options = dict(order.options)
        if order.attack == "inconsistent":
            ranges = self.plane.ranges[bucket]
            told = inconsistent(honest, num_liars, num_peers=len(ranges), **options)
            return torch.cat([told[peer][:, lo:hi] for peer, (lo, hi) in enumerate(ranges)], dim=1)
        family = ATTACKS[order.attack]
        if order.attack == "stale":
            options["earlier"] = self._earlier.get(bucket, honest)
        if order.attack == "random_bits":
            assert self._task is not None
            options["seed"] = self._task.step
        if order.optimise:
            return strongest(family, honest, num_liars, self._rule(bucket), _FACTORS)[0]
        return family(honest, num_liars, **options)

    def _rule(self, bucket: int) -> Callable[[Tensor], Tensor]:
        robust = self.engine.robust

        def aggregate(stack: Tensor) -> Tensor:
            rule = None if robust is None else robust.rule_of(bucket)
            if rule is None or rule.name == "mean" or len(stack) != rule.num_rows:
                return stack.mean(dim=0)
            return rule.aggregate(list(stack))

        return aggregate

    def _tamper(self, bucket: int, target: Tensor) -> None:
        for lie in self.lies:
            if lie.attack == "lying_reducer" and self._task is not None and self._task.step >= lie.first_step:
                target.copy_(lying_reducer(target, **lie.options))

    def give(self, step: int, meta: bytes, to: Sequence[str]) -> None:
        self.plane.give(step, meta, to)

    def take(self, step: int, donor: str) -> bytes:
        data: bytes = self.plane.take(step, donor)
        return data

    def close(self) -> None:
        self.plane.close()
