"""What a member does and says in a step of the simulated world: all-to-all, reduce, all-gather, audits, its header.

The order, and what follows from what all say, is the course of `core/protocol/step/deciding.py`, for the runtime too.
Where microbatches are audited, whoever reduces also looks whether sums are what they were when they were made, and
slices that others reduced are reduced once more, as in the runtime (`runtime/exchange/plane.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outlast.core.protocol import Exchange, Header, RowsNote, Said
from outlast.core.protocol.slices import Slice, Words, checked_by
from outlast.core.protocol.step.effects import Act
from outlast.core.protocol.step.verdict import StepEvidence
from outlast.prove.adversary import _algebra as algebra
from outlast.prove.adversary._audit import Auditor
from outlast.prove.adversary._guards import MASK
from outlast.prove.adversary._surroundings import Owner

__all__ = ["Exchanging"]

_SCATTER, _GATHER = "S", "G"
_KINDS = {"sums": _SCATTER, "slices": _GATHER}
Parts = list[Sequence[int]]


class Exchanging:
    """One step, as `decide_step` asks for it. `evidence`: gives what my replica brings to its checks; `norms`: of all
    members, in the view's order, once they have told them."""

    def __init__(self, owner: Owner, auditor: Auditor, todo: Exchange, evidence: Callable[..., StepEvidence]) -> None:
        self.owner, self.auditor, self.todo, self.evidence = owner, auditor, todo, evidence
        self.members = todo.view.members
        self.index, self.step = self.members.index(owner.name), todo.step
        self.nodes = tuple(node for nodes in todo.nodes for node in nodes)
        self.num_rows = owner.world.scenario.num_rows
        self.checked = (auditor.active or self.num_rows > 1) and len(self.members) > 1
        self.order = owner.world.variant.order(algebra.BUCKETS, self)
        self.norms: list[Any] = []
        self.own_norms: list[tuple[int, int]] = []
        self._mine: Parts | None = None
        self._owed: list[int] | None = None
        self._unlike: set[str] = set()
        self._false: dict[Slice, int] = {}
        self._parts: list[dict[str, Parts]] = []  # of each bucket, whole, where it is checked
        self._own: list[tuple[Parts, Parts]] = []  # mine, as they are and as they were made

    def _offer(self) -> Parts:
        """My sums to whoever reduces them; all of them to all where they are checked, as in memory that all read."""
        owner, n = self.owner, len(self.members)
        mesh = owner.in_view()
        nodes = self.todo.nodes[self.index]
        if n == 1:
            self.auditor.alone(self.step)
        else:
            self.auditor.strike(nodes)
        mine: Parts = [owner.sums.get(node) or algebra.EMPTY for node in nodes]
        for bucket in range(algebra.BUCKETS):
            base, end = bucket * algebra.BLOCKS, (bucket + 1) * algebra.BLOCKS
            if self.checked:
                made: Parts = [self.auditor.made.get(node, total) for node, total in zip(nodes, mine, strict=True)]
                self._own.append((_cut(mine, base, end), _cut(made, base, end)))
            for index, name in enumerate(self.members):
                if name != owner.name:
                    lo, hi = algebra.slice_of(index, n)
                    part = self._own[bucket] if self.checked else _cut(mine, base + lo, base + hi)
                    mesh.send(name, (_SCATTER, self.step, bucket), part)
        owner.awaiting(*((_SCATTER, self.step, b) for b in range(algebra.BUCKETS)))
        return mine

    # --- the acts of the course ----------------------------------------------------------------------------------
    def exchange(self, _: Act) -> bool:
        """Go as far as possible; whether the gradient is whole. Raises ViewAbandoned."""
        if self._mine is None:
            self._mine = self._offer()
        mesh, order = self.owner.in_view(), self.order
        while order.awaits is not None:
            if not mesh.whole((_KINDS[order.awaits], self.step, order.bucket)):
                return False
            order.arrived()
        return True

    def audit(self, act: Act) -> bool:
        """Compute one after the other of those that I owe; whether all are."""
        if self._owed is None:
            self._owed = list(act.leaves)
        if self._owed:
            self.owner.occupy_beside(self.step, self._owed.pop())
            return False
        return True

    def header(self) -> tuple[Header, list[tuple[int, int]]]:
        owner = self.owner
        _, plan = owner.member.standing()
        false = tuple(sorted((*key, value) for key, value in self._false.items())) if self.num_rows == 1 else ()
        header = owner.member.header(
            losses=tuple((leaf, 0.0, 1.0) for leaf in plan.leaves[owner.name]),
            audit=self.auditor.evidence(sorted(self._unlike), false),
            state=owner.state_told(),
            save=owner.save_vote(self.step),
            rows=RowsNote(accused=tuple(sorted(self._false)) if self.num_rows > 1 else ()),
        )
        return header, self.own_norms

    def heard(self, said: Mapping[str, Any], commitments: Said | None) -> tuple[list[Header], StepEvidence]:
        self.norms = [norms for _, norms in said.values()]
        return [header for header, _ in said.values()], self.evidence(self, commitments)

    # --- the stages of the exchange ------------------------------------------------------------------------------
    def scattered(self) -> None:
        owner = self.owner
        owner.member.scattered()
        owner.world.oracle.scattered(owner, self.todo.view)
        owner.stable(self.todo.view)
        owner.world.point("scattered", owner)

    def reduce(self, bucket: int) -> None:
        owner, members, mesh = self.owner, self.members, self.owner.in_view()
        got = mesh.take((_SCATTER, self.step, bucket))
        lo, hi = algebra.slice_of(self.index, len(members))
        base = bucket * algebra.BLOCKS
        if self.checked:
            told = got | {owner.name: self._own[bucket]}
            self._parts.append({name: told[name][0] for name in members})
            self._unlike |= {name for name in members if _cut(told[name][0], lo, hi) != _cut(told[name][1], lo, hi)}
            reduced = self._again(bucket, self.index)
        else:
            got[owner.name] = _cut(self._mine or (), base + lo, base + hi)
            reduced = self._value([part for name in members for part in got[name]])
        owner.out[base + lo : base + hi] = reduced
        self.own_norms.extend(zip(range(base + lo, base + hi), reduced, strict=True))
        mesh.broadcast((_GATHER, self.step, bucket), reduced)

    def _value(self, parts: Sequence[Sequence[int]]) -> list[int]:
        num, rows = self.owner.member.num_microbatches, self.num_rows
        return [algebra.reduce_block(self.nodes, list(sums), num, rows) for sums in zip(*parts, strict=True)]

    def _again(self, bucket: int, reducer: int) -> list[int]:
        """Somebody's slice as I compute it, now."""
        lo, hi = algebra.slice_of(reducer, len(self.members))
        told = self._parts[bucket]
        return self.auditor.reduced(
            self.step, bucket, self._value([part for name in self.members for part in _cut(told[name], lo, hi)])
        )

    def _gathered(self, bucket: int, reducer: int) -> list[int]:
        lo, hi = algebra.slice_of(reducer, len(self.members))
        return self.owner.out[bucket * algebra.BLOCKS + lo : bucket * algebra.BLOCKS + hi]

    def choose(self) -> None:
        """All are reduced: what is awaited now is another thing."""
        self.owner.awaiting(*((_GATHER, self.step, b) for b in range(algebra.BUCKETS)))

    def gather(self, bucket: int) -> None:
        base = bucket * algebra.BLOCKS
        for name, blocks in self.owner.in_view().take((_GATHER, self.step, bucket)).items():
            lo, hi = algebra.slice_of(self.members.index(name), len(self.members))
            self.owner.out[base + lo : base + hi] = blocks

    def check(self) -> None:
        """What others reduced, of the slices that are mine to check."""
        for bucket in range(algebra.BUCKETS if self.checked else 0):
            reducer = checked_by(0, self.step, bucket, self.index, len(self.members))
            again = self._again(bucket, reducer)
            if again != self._gathered(bucket, reducer):
                self._false[bucket, self.members[reducer]] = _print(again)

    def refuse_bad_rows(self, notes: Sequence[RowsNote], leaves: Mapping[str, Sequence[int]]) -> None:
        """An expression is always finite."""

    def false(self, bucket: int, reducer: int) -> bool | None:
        """Whether a member reduced its slice to something else than I would."""
        return self._again(bucket, reducer) != self._gathered(bucket, reducer)

    def look_again(self, slices: Sequence[Slice]) -> Words:
        """See `Words`."""
        at = self.members.index
        return {(b, n): (_print(self._gathered(b, at(n))), _print(self._again(b, at(n)))) for b, n in slices}


def _cut(parts: Sequence[Sequence[int]], lo: int, hi: int) -> Parts:
    return [part[lo:hi] for part in parts]


def _print(blocks: Sequence[int]) -> int:
    return hash(tuple(blocks)) & MASK
