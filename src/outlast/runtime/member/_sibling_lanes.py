"""A replica that joins, rank by rank: what its lead tells the others, and what they say has come.

Each rank is fed in its own lane (`joining/inflow.py`). The lead asks for nothing: each says when what it holds has
changed, and the lead loads, replays and joins as soon as all lanes can.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from outlast.core.protocol import ServeId, View
from outlast.errors import ViewAbandoned
from outlast.runtime.joining.inflow import NOTHING, Inflow
from outlast.runtime.joining.other_lanes import OtherLanes
from outlast.runtime.member._siblings import Siblings
from outlast.runtime.transport import rank_words as say
from outlast.runtime.transport.rank_channel import RankPipe

__all__ = ["NOTHING", "SiblingLanes", "what_has_come"]

_UNFIT = -2


def what_has_come(inflow: Inflow) -> say.LaneHas:
    """What a rank says of what it holds."""
    if inflow.loaded:
        return say.LaneHas(inflow.serving, inflow.committed, inflow.until(inflow.committed))
    shares = inflow.tiles()
    if not shares:
        return say.LaneHas(inflow.serving, -1, 0)
    committed = shares[0][0].committed if inflow.fit(shares) else _UNFIT
    return say.LaneHas(inflow.serving, committed, inflow.until(committed))


class SiblingLanes(OtherLanes):
    """Tells the other ranks of a joining replica what to do, and keeps what they say has come."""

    def __init__(self, siblings: Siblings) -> None:
        self._siblings, self._has = siblings, dict[int, say.LaneHas]()
        self._serving = NOTHING
        for pipe in siblings.pipes:
            self._listen(pipe)

    def _listen(self, pipe: RankPipe) -> None:
        def heard(has: say.LaneHas) -> None:
            self._has[pipe.place] = has

        pipe.on_has = heard

    def _told(self) -> list[say.LaneHas]:
        """What the other ranks have said of this serving, one each of those that have said something."""
        return [has for has in list(self._has.values()) if has.serve == self._serving]

    def serve(self, serving: ServeId) -> None:
        self._serving = serving
        self._siblings.tell(say.ServedAs(serving))

    def whole(self, serving: ServeId) -> bool:
        told = [has for has in self._told() if has.committed != -1]
        return serving == self._serving and len(told) == len(self._siblings.pipes)

    def steps(self) -> Collection[int]:
        return {has.committed for has in self._told()}

    def load(self, serving: ServeId) -> None:
        self._siblings.tell(say.LoadShares(serving))

    def has(self, step: int) -> bool:
        return sum(has.until > step for has in self._told()) == len(self._siblings.pipes)

    def replay(self, step: int) -> None:
        self._siblings.tell(say.ReplayOutcome(step))

    def drain(self, view: View, switched: bool) -> None:
        self._siblings.ask(lambda number: say.DrainLane(number, view, switched))

    def drained(self, view: View, over: Callable[[], bool]) -> None:
        def wait() -> None:
            if over():
                raise ViewAbandoned("the view ended while the joiner caught up")
            self._siblings.rest()

        try:
            self._siblings.gather(say.LaneDrained, wait)
        except ViewAbandoned:
            self._siblings.drop()

    def over(self) -> None:
        self._serving = NOTHING
        self._siblings.tell(say.JoinedView())

    def live(self) -> None:
        self._siblings.tell(say.LiveOutcome())
