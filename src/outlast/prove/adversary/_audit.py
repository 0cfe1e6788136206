"""Audits in the simulated world: replicas that compute something else than they should, and the seconds that see it.

A wrong gradient is an expression that nobody else computes; so is a sum that changed, or a slice that was reduced
wrongly. Whoever is alone in its view cannot be audited: there all of it is out of the rule's reach, and is taken back
so that the oracle judges the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from outlast.core.protocol import Evidence, Node, split
from outlast.prove.adversary import _algebra as algebra
from outlast.prove.adversary._surroundings import Owner

__all__ = ["Auditor"]

_MASK = (1 << 64) - 1


class Auditor:
    """One replica's part. `wrong`, `wrong_sums`, `wrong_slices`: how many of the next computations, sums and slices are
    spoilt; inf: all of them. `made`: what spoilt sums were."""

    def __init__(self, replica: Owner, host: str) -> None:
        self.replica, self.wrong, self.wrong_sums, self.wrong_slices = replica, 0.0, 0.0, 0.0
        self.made: dict[Node, algebra.Gradient] = {}
        audits = replica.member.audits
        audits.share, audits.host = replica.world.scenario.audit, host

    @property
    def active(self) -> bool:
        return self.replica.member.audits.active

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
        self.made.clear()

    # --- what happens to sums and slices -------------------------------------------------------------------------
    def strike(self, nodes: Sequence[Node]) -> None:
        """Memory: a sum that was made right is not what is read of it. What it was stays known: `made`."""
        sums = self.replica.sums
        if self.wrong_sums and nodes and nodes[0] in sums:
            self.wrong_sums -= 1
            node, was = nodes[0], sums[nodes[0]]
            self.made[node] = was
            sums[node] = (*was[:-1], algebra.garbage(self.replica.name, node, "sum"))
            self.replica.world.note(f"a sum of {self.replica.name} changes: {node}")

    def keep(self, nodes: Collection[Node]) -> None:
        """The others are forgotten."""
        if self.made:
            self.made = {node: was for node, was in self.made.items() if node in nodes}

    def taken(self, node: Node) -> algebra.Gradient:
        """A sum that another is added to. What has changed in it would be fingerprinted anew: that is out of the rule's
        reach, and taken back."""
        sums, made = self.replica.sums.pop(node), self.made.pop(node, None)
        return sums if made is None else made

    def reduced(self, step: int, bucket: int, blocks: list[int]) -> list[int]:
        """A slice, as this replica reduces it now."""
        if self.wrong_slices > 0 and blocks:
            self.wrong_slices -= 1
            self.replica.world.note(f"{self.replica.name} reduces a slice of bucket {bucket} wrongly")
            return [algebra.garbage(self.replica.name, step, bucket), *blocks[1:]]
        return blocks

    def evidence(self, unlike: Sequence[str] = (), false: Sequence[tuple[int, str, int]] = ()) -> Evidence:
        """See `Audits.evidence`."""
        audits = self.replica.member.audits
        return audits.evidence(unlike, false) if audits.active else Evidence()


def _true(step: int, node: Node) -> algebra.Gradient:
    if node[1] - node[0] == 1:
        return algebra.leaf(step, node[0])
    left, right = split(node)
    return algebra.add(_true(step, left), _true(step, right))
