"""What a joining lead needs of the other ranks of its replica; nothing, where the replica is one rank.

Each rank is fed by the ranks of equal place in the replicas that train (`inflow.py`); the lead loads, replays and joins
when all of them can.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from outlast.core.protocol import ServeId, View

__all__ = ["OtherLanes"]


class OtherLanes:
    """There are none."""

    def serve(self, serving: ServeId) -> None:
        """This attempt to serve counts from now on."""

    def whole(self, serving: ServeId) -> bool:
        """Whether all of them have all shares of it."""
        return True

    def steps(self) -> Collection[int]:
        """The steps that their shares are of; -1 for shares that fit no state."""
        return ()

    def load(self, serving: ServeId) -> None:
        """Have them become what the shares tile."""

    def has(self, step: int) -> bool:
        """Whether all of them have this step's outcome, and each before it."""
        return True

    def replay(self, step: int) -> None:
        """Have them take it."""

    def drain(self, view: View, switched: bool) -> None:
        """Have them take in all that was sent before this view."""

    def drained(self, view: View, over: Callable[[], bool]) -> None:
        """Wait until they have, or the view is over."""

    def over(self) -> None:
        """No stream is of use any more."""

    def live(self) -> None:
        """Have them apply the outcome whose step their loops are in."""
