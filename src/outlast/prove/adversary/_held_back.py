"""One turn of waiting in a view in which a robust rule must not be used: the counterpart of `wait_for_rows`.

A member rests until it knows an order; then all tell each other which orders they know, and carry out what all do.
"""

from __future__ import annotations

from typing import Any

from outlast.prove.adversary._donor import SimulatedDonor
from outlast.prove.adversary._surroundings import Owner

__all__ = ["HeldBack"]

_HOLD = "W"


class HeldBack:
    """See the module."""

    def __init__(self, owner: Owner, donor: SimulatedDonor) -> None:
        self.owner, self.donor = owner, donor
        self._said: tuple[Any, int] | None = None  # under which key, and how many orders

    def advance(self) -> bool:
        """Whether the turn is over. Raises ViewAbandoned."""
        mesh, member = self.owner.in_view(), self.owner.member
        if self._said is None:
            if member.heard == member.carried_out:
                return False
            self._said = (_HOLD, member.committed, member.carried_out), member.heard
            self.owner.awaiting(self._said[0])
            mesh.broadcast(*self._said)
        key, heard = self._said
        if not mesh.whole(key):
            return False
        agreed, members = min([heard, *mesh.take(key).values()]), mesh.view.members
        for order in member.carry_out(agreed):
            if order.kind == "serve":
                self.donor.serve(order, members.index(self.owner.name), len(members))
        return True
