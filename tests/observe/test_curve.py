"""The loss as text."""

from __future__ import annotations

import math
from typing import Any

import pytest

from outlast.observe import losses, plot, sparkline


def test_losses_are_by_step_and_each_once(story: Any) -> None:
    assert losses(story.whole) == [(19, 4.0), (20, 3.0), (60, 2.0), (90, 1.0)]
    assert losses([*story.whole, *story.whole]) == losses(story.whole)


def test_a_falling_loss_falls() -> None:
    assert sparkline([4.0, 3.0, 2.0, 1.0]) == "█▆▃▁"
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▅▅"


def test_many_points_become_means_within_the_width() -> None:
    line = sparkline([float(value) for value in range(1000)], width=10)
    assert len(line) == 10
    assert list(line) == sorted(line)
    assert (line[0], line[-1]) == ("▁", "█")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_a_cross_and_does_not_spoil_the_rest(bad: float) -> None:
    assert sparkline([1.0, bad, 2.0]) == "▁×█"
    assert "×" in plot([(1, 1.0), (2, bad), (3, 2.0)])
    assert plot([(1, bad)]) == "no losses to plot"


def test_a_plot_keeps_to_its_size_and_shows_its_range() -> None:
    text = plot([(step, 4.0 - step / 50) for step in range(150)], width=60, height=8)
    rows = text.splitlines()
    assert len(rows) == 10
    assert max(map(len, rows)) <= 60
    assert rows[0].startswith("   4 ┤")
    assert rows[7].startswith("1.02 ┤")
    assert rows[-1].split() == ["0", "step", "149"]
    top, bottom = rows[0].split("┤")[1], rows[7].split("┤")[1]
    assert len(top.strip()) > 0
    assert len(top) < len(bottom)  # it starts high on the left and ends low on the right


def test_no_points_are_said_to_be_none() -> None:
    assert plot([]) == "no losses to plot"


def test_values_over_many_decades_are_drawn_by_their_logarithms() -> None:
    decades = [10.0**-exponent for exponent in range(8)]
    assert sparkline(decades) == "█▇▆▅▄▃▂▁"
    text = plot(list(enumerate(decades)), width=40, height=8)
    assert "log scale, step 7" in text
    assert all(line.partition("┤")[2].strip() for line in text.splitlines()[:8])
    assert "log scale" not in plot([(0, 0.0), (1, 5.0)])
    assert "log scale" not in plot([(0, 1.0), (1, 5.0)])
