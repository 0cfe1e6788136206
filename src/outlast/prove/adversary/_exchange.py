"""The exchange of one step in the simulated world: all-to-all, reduce, all-gather, audits, headers.

Where microbatches are audited, whoever reduces also looks whether sums are what they were when they were made, and
slices that others reduced are reduced once more, as in the runtime (`runtime/exchange/plane.py`). What headers then
come to is not decided here: `core/protocol/step/verdict.py` has that course, for the runtime too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outlast.core.protocol import Exchange, Header, RowsNote, Said
from outlast.core.protocol.slices import Slice, Words, checked_by
from outlast.prove.adversary import _algebra as algebra
from outlast.prove.adversary._audit import Auditor
from outlast.prove.adversary._guards import MASK, SimulatedGuards
from outlast.prove.adversary._surroundings import Owner, ViewMesh

__all__ = ["Exchanging"]

_SCATTER, _GATHER, _HEADER, _PRINTS = "S", "G", "H", "P"
_EMPTY = (0,) * (algebra.BUCKETS * algebra.BLOCKS)
Parts = list[Sequence[int]]


class Exchanging:
    """How far the exchange of a step is. `headers`, `norms`: of all members, in the view's order, when it is over."""

    def __init__(self, owner: Owner, auditor: Auditor, guards: SimulatedGuards, todo: Exchange) -> None:
        self.owner, self.auditor, self.guards, self.todo = owner, auditor, guards, todo
        self.members = todo.view.members
        self.index, self.step = self.members.index(owner.name), todo.step
        self.nodes = tuple(node for nodes in todo.nodes for node in nodes)
        self.num_rows = owner.world.scenario.num_rows
        self.checked = (auditor.active or self.num_rows > 1) and len(self.members) > 1
        self.reduced = self.gathered = 0
        self.norms: list[Any] = []
        self.headers: list[Header] = []
        self.said: Said | None = None
        self._norms: list[tuple[int, int]] = []
        self._owed: list[int] | None = None
        self._header: Header | None = None
        self._unlike: set[str] = set()
        self._false: dict[Slice, int] = {}
        self._parts: list[dict[str, Parts]] = []  # of each bucket, whole, where it is checked
        self._own: list[tuple[Parts, Parts]] = []  # mine, as they are and as they were made
        self._offer()

    def _offer(self) -> None:
        """My sums to whoever reduces them; all of them to all where they are checked, as in memory that all read."""
        owner, n = self.owner, len(self.members)
        mesh = owner.mesh
        assert mesh is not None
        nodes = self.todo.nodes[self.index]
        if n == 1:
            self.auditor.alone(self.step)
        else:
            self.auditor.strike(nodes)
        self._mine: Parts = [owner.sums.get(node) or _EMPTY for node in nodes]
        made: Parts = [self.auditor.made.get(node, total) for node, total in zip(nodes, self._mine, strict=True)]
        for bucket in range(algebra.BUCKETS):
            base, end = bucket * algebra.BLOCKS, (bucket + 1) * algebra.BLOCKS
            if self.checked:
                self._own.append((_cut(self._mine, base, end), _cut(made, base, end)))
            for index, name in enumerate(self.members):
                if name != owner.name:
                    lo, hi = algebra.slice_of(index, n)
                    part = self._own[bucket] if self.checked else _cut(self._mine, base + lo, base + hi)
                    mesh.send(name, (_SCATTER, self.step, bucket), part)
        owner.awaiting(*((_SCATTER, self.step, b) for b in range(algebra.BUCKETS)))

    def advance(self) -> bool:
        """Go as far as possible; whether all headers are there. Raises ViewAbandoned."""
        mesh, step, owner = self.owner.in_view(), self.step, self.owner
        while self.reduced < algebra.BUCKETS:
            if not mesh.whole((_SCATTER, step, self.reduced)):
                return False
            self._reduce(mesh, self.reduced)
            self.reduced += 1
        owner.awaiting(*((_GATHER, step, b) for b in range(algebra.BUCKETS)))
        while self.gathered < algebra.BUCKETS:
            if not mesh.whole((_GATHER, step, self.gathered)):
                return False
            self._gather(mesh, self.gathered)
            self.gathered += 1
        if self._header is None and not self._audited(mesh):
            return False
        key = (_HEADER, step, 0)
        owner.awaiting(key)
        if self._header is None:
            self._header = self._my_header()
            mesh.broadcast(key, (self._header, self._norms))
        if not mesh.whole(key):
            return False
        said = mesh.take(key) | {owner.name: (self._header, self._norms)}
        self.headers = [said[name][0] for name in self.members]
        self.norms = [said[name][1] for name in self.members]
        return True

    def _my_header(self) -> Header:
        owner = self.owner
        plan = owner.member.plan
        assert plan is not None
        if self.checked:
            self._check()
        false = tuple(sorted((*key, value) for key, value in self._false.items())) if self.num_rows == 1 else ()
        return owner.member.header(
            losses=tuple((leaf, 0.0, 1.0) for leaf in plan.leaves[owner.name]),
            audit=self.auditor.evidence(sorted(self._unlike), false),
            state=owner.state_told(),
            save=owner.save_vote(self.step),
            rows=RowsNote(accused=tuple(sorted(self._false)) if self.num_rows > 1 else ()),
        )

    # --- slices --------------------------------------------------------------------------------------------------
    def _reduce(self, mesh: ViewMesh, bucket: int) -> None:
        owner, members = self.owner, self.members
        got = mesh.take((_SCATTER, self.step, bucket))
        if bucket == 0:
            owner.member.scattered()
            owner.world.oracle.scattered(owner, self.todo.view)
            owner.stable(self.todo.view)
            owner.world.point("scattered", owner)
        lo, hi = algebra.slice_of(self.index, len(members))
        base = bucket * algebra.BLOCKS
        if self.checked:
            told = got | {owner.name: self._own[bucket]}
            self._parts.append({name: told[name][0] for name in members})
            self._unlike |= {name for name in members if _cut(told[name][0], lo, hi) != _cut(told[name][1], lo, hi)}
            reduced = self._again(bucket, self.index)
        else:
            own = [total[base + lo : base + hi] for total in self._mine]
            parts = [part for name in members for part in (own if name == owner.name else got[name])]
            reduced = self._value(parts)
        owner.out[base + lo : base + hi] = reduced
        self._norms.extend(zip(range(base + lo, base + hi), reduced, strict=True))
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

    def _gather(self, mesh: ViewMesh, bucket: int) -> None:
        base = bucket * algebra.BLOCKS
        for name, blocks in mesh.take((_GATHER, self.step, bucket)).items():
            lo, hi = algebra.slice_of(self.members.index(name), len(self.members))
            self.owner.out[base + lo : base + hi] = blocks

    def _check(self) -> None:
        """What others reduced, of the slices that are mine to check."""
        for bucket in range(algebra.BUCKETS):
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

    # --- audits --------------------------------------------------------------------------------------------------
    def _audited(self, mesh: ViewMesh) -> bool:
        """Commit, draw, compute what I owe. Whether the header is next; else something is still awaited."""
        owner = self.owner
        audits, plan = owner.member.audits, owner.member.plan
        if not audits.active or plan is None:
            return True
        key = (_PRINTS, self.step, 0)
        if self.said is None:
            self.said = {owner.name: audits.commitment(plan)}
            mesh.broadcast(key, self.said[owner.name])
        if self._owed is None:
            owner.awaiting(key)
            if not mesh.whole(key):
                return False
            said = self.said | mesh.take(key)
            self.said = {name: said[name] for name in self.members}
            self._owed = list(audits.owed(plan, self.said))
        if self._owed:
            owner.occupy_beside(self.step, self._owed.pop())
            return False
        return True


def _cut(parts: Sequence[Sequence[int]], lo: int, hi: int) -> Parts:
    return [part[lo:hi] for part in parts]


def _print(blocks: Sequence[int]) -> int:
    return hash(tuple(blocks)) & MASK
