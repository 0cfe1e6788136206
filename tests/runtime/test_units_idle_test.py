"""A spare asks its device one known answer a turn: that disturbs nobody, and a broken one ends before it is needed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from outlast.errors import DeviceFault
from outlast.health import QuestionsInTurn
from outlast.runtime.faults.flips import flip_bit
from outlast.runtime.joining._idle_test import IdleTest


class Line:
    def __init__(self) -> None:
        self.said: list[Any] = []

    def send(self, messages: Any) -> None:
        self.said += messages


def spare(strike: Any = None) -> tuple[IdleTest, Line, list[float]]:
    line, now = Line(), [0.0]
    ask = functools.partial(QuestionsInTurn, strike=strike)
    return IdleTest(torch.device("cpu"), line, "r2.1", clock=lambda: now[0], questions=ask), line, now  # type: ignore[arg-type]


def test_one_question_a_second_and_a_right_device_says_nothing() -> None:
    test, line, now = spare()
    test.turn()
    assert test._questions is None, "nothing is made before it is time"
    state = torch.random.get_rng_state()
    for second in range(1, 150):
        now[0] = float(second)
        test.turn()
        test.turn()
    assert test._questions is not None
    assert test._questions.num_asked == 149
    assert line.said == []
    assert torch.equal(torch.random.get_rng_state(), state), "the loop's own randomness is untouched"


@pytest.mark.parametrize("times", [1, 10**6])
def test_a_flip_is_told_and_a_stuck_unit_ends_the_spare(times: int) -> None:
    left = [times]

    def strike(name: str, out: torch.Tensor) -> None:
        if name == "sort" and left[0]:
            left[0] -= 1
            flip_bit(out, 3, 5)

    test, line, now = spare(strike)

    def wait() -> None:
        for second in range(1, 100):
            now[0] = float(second)
            test.turn()

    if times == 1:
        wait()
        assert [note.action for note in line.said] == ["suspected"]
    else:
        with pytest.raises(DeviceFault, match="sort persistent"):
            wait()
        assert [note.action for note in line.said] == ["failed"]
