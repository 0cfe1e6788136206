"""What members say of their steps becomes what a microbatch takes each: over two windows, and never by one word."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from outlast.core.protocol import Compute, View, ViewId
from outlast.core.protocol import host_messages as hm
from outlast.core.step_parts import StepParts
from outlast.runtime.coordinator._speed_watch import SpeedWatch
from outlast.runtime.member import step as _step
from outlast.runtime.member.step import StepCourse

VIEW = View(id=ViewId(1, 1), members=("r0.1", "r1.1"))


class Words:
    """Members that speak every second of ten steps, with sums since they joined."""

    def __init__(self, window_s: float = 5.0) -> None:
        self.told: list[dict[str, float]] = []
        self.watch = SpeedWatch(window_s, lambda said: self.told.append(said.leaf_s))
        self.sums = dict.fromkeys(VIEW.members, (0, 0.0))
        self.now = 0

    def seconds(self, num: int, *leaf_s: float, each: int = 20) -> list[dict[str, float]]:
        """What is told while so many pass."""
        before = len(self.told)
        for _ in range(num):
            self.now += 1
            for name, seconds in zip(VIEW.members, leaf_s, strict=True):
                number, total = self.sums[name]
                self.sums[name] = number + each, total + each * seconds
                word = StepParts(steps=10 * self.now, seconds={}, batches=self.sums[name])
                self.watch.heard(name, word, VIEW, float(self.now))
        return [{name: round(each, 6) for name, each in row.items()} for row in self.told[before:]]


def test_two_windows_have_to_agree() -> None:
    words = Words()
    assert words.seconds(10, 0.1, 0.1) == [], "one window"
    assert words.seconds(1, 0.1, 0.1) == [{"r0.1": 0.1, "r1.1": 0.1}]
    assert words.seconds(5, 0.1, 0.3) == [{"r0.1": 0.1, "r1.1": 0.1}], "it may have been busy"
    assert words.seconds(5, 0.1, 0.3) == [{"r0.1": 0.1, "r1.1": 0.3}]
    assert words.seconds(5, 0.1, 0.1) == [{"r0.1": 0.1, "r1.1": 0.1}], "it is as fast again"


def test_who_says_too_little_is_not_measured_and_nothing_is_where_it_is_off() -> None:
    assert Words().seconds(3, 0.1, 0.1, each=1) == []
    assert Words(window_s=0.0).seconds(30, 0.1, 0.3) == []


def test_a_member_that_joined_anew_is_compared_with_itself() -> None:
    words = Words()
    words.seconds(11, 0.1, 0.1)
    words.sums["r1.1"] = (0, 0.0)
    words.watch.heard("r1.1", StepParts(steps=1, seconds={}, batches=(2, 9.0)), VIEW, 12.0)
    assert words.told[-1] == hm.SpeedsMeasured(leaf_s=words.told[-1]).leaf_s
    assert all(row["r1.1"] < 0.2 for row in words.told)


def test_who_has_no_microbatches_is_left_out_until_it_has_some() -> None:
    words = Words()
    steps = 0

    def seconds(num: int, batches: tuple[int, float]) -> list[set[str]]:
        nonlocal steps
        before = len(words.told)
        for _ in range(num):
            words.now += 1
            steps += 10
            for name, each in (("r0.1", (2 * steps, 0.2 * steps)), ("r1.1", batches)):
                words.watch.heard(name, StepParts(steps=steps, seconds={}, batches=each), VIEW, float(words.now))
        return [set(row) for row in words.told[before:]]

    assert seconds(12, (0, 0.0)) == [{"r0.1"}]
    assert seconds(4, (5, 0.5)) == [], "too few so far"
    assert words.watch._idle == set()


def test_a_window_is_over_a_little_early() -> None:
    words = Words(window_s=1.1)
    words.seconds(4, 0.1, 0.1)
    assert len(words.told) == 2


def test_what_is_exchanged_under_a_backward_is_no_part_of_a_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    told: list[float] = []

    def passes(seconds: float) -> Any:
        def act(*_: Any) -> None:
            nonlocal now_s
            now_s += seconds

        return act

    monkeypatch.setattr(_step, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(_step, "watched", lambda *_: contextlib.nullcontext())
    replica: Any = SimpleNamespace(
        plane=SimpleNamespace(begin=passes(2.0), offer=passes(3.0)),
        pace=SimpleNamespace(parts=SimpleNamespace(computed=told.append)),
        siblings=SimpleNamespace(some=False, compute=lambda *_, **__: None),
    )
    course: Any = SimpleNamespace(
        replica=replica, _is_last=lambda _: True, _task=lambda: None, _ahead=lambda _: None, _computed=lambda _: None,
        _prepared=passes(0.25),
        engine=SimpleNamespace(metrics=SimpleNamespace(begin=lambda _: None), mine=lambda leaf: leaf,
                                   sums=SimpleNamespace(printing=False)),
    )  # fmt: skip
    for microbatch in (0, 1):
        todo = Compute(step=0, microbatch=microbatch, orphan=False)
        for _ in StepCourse._one(course, todo):
            announce = StepCourse._announcer(course, todo)
            assert announce is not None
            for bucket in range(2):
                passes(0.5)()
                announce(bucket)
            course._loss = 1.0
    assert told == [1.25, 1.25]
