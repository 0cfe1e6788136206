"""Audits in the simulated world: replicas that compute something else than they should, and the seconds that see it.

A wrong gradient is an expression that nobody else computes. Whoever is alone in its view cannot be audited: there a
wrong gradient is out of the rule's reach, and is taken back so that the oracle judges the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from outlast.core.protocol import Evidence, Exchange, Header, Node, Said, split
from outlast.prove.adversary import _algebra as algebra
from outlast.prove.adversary._mesh import SimulatedMesh
from outlast.prove.adversary._surroundings import Owner

__all__ = ["Auditor", "Exchanging"]

_MASK = (1 << 64) - 1


class Exchanging:
    """How far the exchange of a step is."""

    __slots__ = ("gathered", "header", "mine", "nodes", "norms", "owed", "reduced", "said", "todo")

    def __init__(self, todo: Exchange, mine: list[algebra.Gradient]) -> None:
        self.todo, self.mine = todo, mine
        self.nodes = tuple(node for nodes in todo.nodes for node in nodes)
        self.norms: list[tuple[int, int]] = []
        self.reduced = self.gathered = 0
        self.header: Header | None = None
        self.said: Said | None = None
        self.owed: list[int] | None = None


class Auditor:
    """One replica's part. `wrong`: how many of the next computations are spoilt; inf: all of them."""

    def __init__(self, replica: Owner, host: str) -> None:
        self.replica, self.wrong = replica, 0.0
        audits = replica.member.audits
        audits.share, audits.host = replica.world.scenario.audit, host

    def computed(self, step: int, leaf: int, beside: bool = False) -> algebra.Gradient:
        """The gradient of a microbatch, as this replica computes it."""
        value = algebra.leaf(step, leaf)
        if self.wrong > 0:
            self.wrong -= 1
            value = (algebra.garbage(self.replica.name, step, leaf), *value[1:])
            self.replica.world.note(f"{self.replica.name} computes microbatch {leaf} of step {step} wrongly")
        audits = self.replica.member.audits
        if audits.active:
            audits.computed(leaf, hash(value) & _MASK, beside=beside)
        return value

    def beside(self, step: int, leaf: int) -> None:
        """A microbatch that another replica owns is computed."""
        self.computed(step, leaf, beside=True)

    def alone(self, step: int) -> None:
        """Nobody is there who could see it."""
        sums = self.replica.sums
        for node in sums:
            sums[node] = _true(step, node)

    def advance(self, mesh: SimulatedMesh, ex: Exchanging) -> bool:
        """Commit, draw, compute what I owe. Whether the header is next; else something is still awaited."""
        replica = self.replica
        audits, plan = replica.member.audits, replica.member.plan
        if not audits.active or plan is None:
            return True
        key = ("P", ex.todo.step, 0)
        if ex.said is None:
            ex.said = {replica.name: audits.commitment(plan)}
            mesh.broadcast(key, ex.said[replica.name])
        if ex.owed is None:
            replica.awaiting(key)
            if not mesh.whole(key):
                return False
            said = ex.said | mesh.take(key)
            ex.said = {name: said[name] for name in ex.todo.view.members}
            ex.owed = list(audits.owed(plan, ex.said))
        if ex.owed:
            replica.occupy_beside(ex.todo.step, ex.owed.pop())
            return False
        return True

    def judge(self, headers: Sequence[Header], ex: Exchanging) -> None:
        """Raises ViewAbandoned if a mismatch holds the step."""
        if ex.said is not None and self.replica.world.variant.compares:
            self.replica.member.audit(headers, ex.said)

    def evidence(self) -> Evidence:
        audits = self.replica.member.audits
        return audits.evidence() if audits.active else Evidence()


def _true(step: int, node: Node) -> algebra.Gradient:
    if node[1] - node[0] == 1:
        return algebra.leaf(step, node[0])
    left, right = split(node)
    return algebra.add(_true(step, left), _true(step, right))
