"""What a follower of a curve is told makes its copy the curve, whatever was added, done again, or merged."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from outlast.core import events as ev
from outlast.observe._history import CurveRow, LossCurve, TimeCurve


class Follower:
    """A copy of a curve, from its news alone. `whole`: how often the news were all of it."""

    def __init__(self, curve: LossCurve | TimeCurve) -> None:
        self.curve, self.rows, self.head = curve, list[CurveRow](), curve.head
        self.whole = self.told = 0

    def look(self) -> None:
        first, rows = self.curve.news()
        assert first == 0 or self.head == self.curve.head, "rows of another width are not added to"
        assert first <= len(self.rows)
        self.rows[first:] = rows
        self.head = self.curve.head
        self.whole += first == 0
        self.told += len(rows)
        assert self.rows == self.curve.rows()


def losses(curve: LossCurve, chance: random.Random) -> Callable[[], None]:
    at = 0

    def add() -> None:
        nonlocal at
        at = max(0, at + chance.choice([1, 1, 1, 1, 1, 0, 5, -3]))
        curve.add(at, chance.choice([chance.random(), 3.0, math.nan, math.inf]))

    return add


def times(curve: TimeCurve, chance: random.Random) -> Callable[[], None]:
    end_s = 0.0

    def add() -> None:
        """Also what is told late, of a time before."""
        nonlocal end_s
        end_s += chance.choice([0.1, 0.4, 1.0, 7.0])
        used_s = chance.choice([0.0, 0.1, 0.5, 9.0])
        curve.add(
            ev.ProgressMade(
                at_s=100 + end_s, view=[1, 1], stable=0, losses=[], step_s=0.1, first=0, committed=chance.randrange(9),
                committed_at_s=100 + end_s - chance.choice([0.0, 0.0, 2.0]),
                seconds={"productive": used_s, "idle": 0.1},
            ),
            100.0,
        )  # fmt: skip

    return add


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["losses", "times"])
def test_a_copy_that_is_told_what_is_new_is_the_curve(kind: str, seed: int) -> None:
    chance = random.Random(f"{kind} {seed}")
    points = chance.choice([4, 30])
    loss, time = LossCurve(points), TimeCurve(points)
    curve, add = (loss, losses(loss, chance)) if kind == "losses" else (time, times(time, chance))
    follower = Follower(curve)
    for _ in range(300):
        for _ in range(chance.choice([0, 1, 1, 3])):
            add()
        follower.look()
    assert follower.whole >= 3, "neighbours were merged meanwhile"
    before = follower.told
    follower.look()
    assert follower.told == before, "of nothing new nothing is told"


def test_a_long_run_s_news_are_a_few_rows() -> None:
    curve = LossCurve()
    for step in range(100_000):
        curve.add(step, 1.0)
    follower = Follower(curve)
    follower.look()
    before = follower.told
    for step in range(100_000, 101_000):
        curve.add(step, 2.0)
        follower.look()
    assert follower.told - before <= 1_100 < len(curve.rows()) * 1000


def test_a_curve_that_was_kept_is_told_whole() -> None:
    loss, time = LossCurve(), TimeCurve()
    loss.add(1, 2.0)
    for curve in (loss, time):
        curve.news()
        curve.load(curve.dump())
        assert curve.news() == (0, curve.rows())
