"""How long a step takes, by how many make it. Does not know what a step is made of."""

from __future__ import annotations

import math

__all__ = ["UsualStep"]

_FEW = 3  # steps after which it is known how long they usually take
_USUAL = 3.0  # times the usual, and
_SLACK_S = 0.1  # so much: what a step takes beyond both is no step's work
_OF_FEW, _SLACK_OF_FEW_S = 10.0, 0.5  # the same before that


class UsualStep:
    """`seconds`: a running mean in a view of `members`; 0 before the first step."""

    def __init__(self) -> None:
        self.seconds, self.members, self._count = 0.0, 0, 0
        self._known: dict[int, float] = {}  # what `seconds` was when the view had so many members

    @property
    def known(self) -> bool:
        """Whether enough steps were seen."""
        return self._count >= _FEW

    @property
    def limit_s(self) -> float:
        """What takes longer is held up."""
        return _USUAL * self.seconds + _SLACK_S

    @property
    def surely_s(self) -> float:
        """What takes longer is held up, however few steps were seen; where none was, nothing is known."""
        of_few_s = _OF_FEW * self.seconds + _SLACK_OF_FEW_S if self.seconds else math.inf
        return self.limit_s if self.known else of_few_s

    def learn(self, seconds: float, members: int) -> None:
        """One that took far too long teaches little, many of them what is usual now."""
        held_up = self.known or seconds > self.surely_s
        self._count += 1
        seconds = min(seconds, self.limit_s) if held_up else seconds
        self.seconds = 0.8 * self.seconds + 0.2 * seconds if self.seconds else seconds
        self._known[members], self.members = self.seconds, members

    def expected_s(self, members: int) -> float:
        """How many seconds one takes among `members`: as it was, and no longer than if all work were shared."""
        shared_s = self.seconds * max(1.0, self.members / members)
        return min(shared_s, self._known.get(members, shared_s))

    def changed(self, members: int) -> None:
        """The view has `members` now."""
        if self.members:
            self.seconds = self.expected_s(members)
        self.members = members
