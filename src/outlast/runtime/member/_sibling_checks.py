"""The checks of a replica's ranks: what the lead has the others look at, and how one of these does.

Every rank looks at its own microbatch, its own sums and its own part of the state, when the lead does; the lead folds
what they say (`checks/lane_checks.py`) and alone speaks for the replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from outlast.core.policy import Culprit
from outlast.core.protocol.step.verdict import PartRows
from outlast.runtime.checks.audits import FollowedAudits
from outlast.runtime.checks.guards import Guarding
from outlast.runtime.checks.inspection import Inspection
from outlast.runtime.checks.lane_checks import LaneChecks, RankLook
from outlast.runtime.checks.reproducibility import FollowedRepeat
from outlast.runtime.member._siblings import Siblings
from outlast.runtime.training.engine import Engine
from outlast.runtime.transport.rank_check_words import (
    AskRows,
    AuditLeaf,
    LaneLooked,
    LaneRepeated,
    LeafPrinted,
    LookCloser,
    RepeatLeaf,
    RowsSaid,
)
from outlast.runtime.view.port import Bench

__all__ = ["FollowedChecks", "SiblingChecks"]


class SiblingChecks(LaneChecks):
    """The lead's. No view ends a wait in here: the others compute what the lead does, and answer when it is done."""

    some = True

    def __init__(self, siblings: Siblings) -> None:
        self._siblings = siblings

    def _asked(self, word: Callable[[int], Any]) -> list[LaneLooked]:
        self._siblings.ask(word)
        return self._siblings.gather(LaneLooked)

    def suspects(self, step: int) -> set[int]:
        told = self._asked(lambda number: LookCloser(number, "suspects", step))
        return {leaf for rank in told for leaf in rank.leaves}

    def look(self, step: int, leaf: int, *, watched: bool) -> None:
        self._siblings.ask(lambda number: LookCloser(number, "watch" if watched else "again", step, leaf))

    def looked(self) -> list[RankLook]:
        told: list[LaneLooked] = self._siblings.gather(LaneLooked)
        return [RankLook(culprit, rank.hit) for rank in told for culprit in rank.culprits]

    def unlike(self, step: int) -> list[Culprit]:
        told = self._asked(lambda number: LookCloser(number, "compare", step))
        return [culprit for rank in told for culprit in rank.culprits]

    def audit(self, step: int, leaf: int) -> None:
        self._siblings.tell(AuditLeaf(step, leaf))

    def printed(self) -> list[int]:
        return self._siblings.printed()

    def repeat(self, rounds: int) -> None:
        self._siblings.ask(lambda number: RepeatLeaf(number, rounds))

    def repeated(self) -> list[Sequence[PartRows]]:
        told: list[LaneRepeated] = self._siblings.gather(LaneRepeated)
        return [rank.rounds for rank in told]

    def rows(self, step: int) -> list[PartRows]:
        self._siblings.ask(lambda number: AskRows(number, step))
        told: list[RowsSaid] = self._siblings.gather(RowsSaid)
        return [rank.rows for rank in told]


class FollowedChecks:
    """The part in checks of a rank that is not its replica's lead. `audit`, `critical`: as of `Auditing`; `active`: a
    backward now belongs to a check."""

    def __init__(
        self,
        bench: Bench,
        engine: Engine,
        guards: Guarding,
        say: Callable[[Any], None],
        audit: float | str,
        critical: Sequence[str],
    ) -> None:
        self._engine, self._guards, self._say = engine, guards, say
        self._inspection, self._repeat = Inspection(bench, engine, guards), FollowedRepeat(bench, engine)
        self._audits = FollowedAudits(bench, engine, guards, lambda value: say(LeafPrinted(value)), audit, critical)

    @property
    def active(self) -> bool:
        return self._inspection.active or self._audits.active or self._repeat.active

    def batches(self, word: LookCloser | AuditLeaf | RepeatLeaf) -> Iterator[Any]:
        """Batches that the lead's word is about, each to see one backward."""
        look = self._inspection
        if isinstance(word, AuditLeaf):
            yield from self._audits.follow(word.step, word.leaf)
        elif isinstance(word, RepeatLeaf):
            yield from self._repeat.follow(word.rounds)
            self._say(LaneRepeated(word.number, tuple(self._repeat.rows)))
        elif word.what in ("watch", "again"):
            yield from look.follow(word.step, word.leaf, watched=word.what == "watch")
            if word.what == "watch" and look.seen is not None:
                self._say(LaneLooked(word.number, culprits=(look.seen.culprit,), hit=look.seen.hit))
        elif word.what == "suspects":
            self._say(LaneLooked(word.number, leaves=tuple(look.overflowing())))
        else:
            self._say(LaneLooked(word.number, culprits=tuple(look.unlike())))

    def backward(self, loss: Tensor) -> None:
        """The loop's backward of the microbatch that is looked at."""
        beside = (self._audits, self._repeat)
        next((each for each in beside if each.active), self._inspection).backward(loss)

    def computed(self) -> None:
        """A microbatch of ours is in my sums: say its fingerprint, if it was taken."""
        if self._engine.sums.printing:
            self._say(LeafPrinted(self._engine.sums.print))

    def rows(self, word: AskRows) -> None:
        """Say what my part of the state is, tensor by tensor."""
        rows = tuple(self._engine.parts()) if word.step < 0 else self._guards.own_rows(word.step)
        self._say(RowsSaid(word.number, rows))
