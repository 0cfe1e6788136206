"""How long a run is followed: on a clock of the test's own, a tenth of a second a look, a step each so many looks."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.core import events as ev
from outlast.errors import ProveError
from outlast.prove import _drive
from outlast.prove._drive import Driven


class Paced(Driven):
    """A run whose `steps` steps take `step_s` each; after them it goes on for ever, or ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: float, steps: int, ends: bool) -> None:
        self.run_dir, self.events = Path("somewhere"), []
        self._now, self._step_s, self._steps, self._ends = 0.0, step_s, steps, ends
        self.process = type("Ended", (), {"returncode": 0})()  # type: ignore[assignment]
        monkeypatch.setattr(_drive.time, "monotonic", lambda: self._now)

    def wait(self, seconds: float) -> bool:
        self._now += 0.1
        return self._ends and self._now > self._step_s * self._steps + 1.0

    def poll(self) -> list[ev.AnyEvent]:
        done = min(int(self._now / self._step_s), self._steps) - 1
        if done <= self.step:
            return [ev.Notice(at_s=self._now, level="info", text="nothing new")]
        told = ev.ProgressMade(at_s=self._now, view=[1, 1], stable=done, losses=[(done, 1.0)], step_s=self._step_s)
        self.events.append(told)
        return [told]


def nothing() -> None:
    """Nobody watches."""


def test_a_slow_run_is_followed_for_as_long_as_it_makes_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Paced(monkeypatch, step_s=8.0, steps=50, ends=True).finish(10.0, nothing, renewed=True) == 0
    run = Paced(monkeypatch, step_s=8.0, steps=50, ends=True)
    run.until("the moment", lambda: run.step >= 40, 10.0, nothing, renewed=True)
    with pytest.raises(ProveError, match="within 10 s"):
        Paced(monkeypatch, step_s=8.0, steps=50, ends=True).finish(10.0, nothing)


def test_a_run_that_makes_no_step_any_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Paced(monkeypatch, step_s=1.0, steps=5, ends=False)
    with pytest.raises(ProveError, match="within 10 s after step 4"):
        stuck.finish(10.0, nothing, renewed=True)
    assert 14.0 < stuck._now < 16.0
    stuck = Paced(monkeypatch, step_s=1.0, steps=5, ends=False)
    with pytest.raises(ProveError, match="the moment did not happen within 10 s"):
        stuck.until("the moment", lambda: stuck.step >= 9, 10.0, nothing, renewed=True)
    never = Paced(monkeypatch, step_s=100.0, steps=5, ends=False)
    with pytest.raises(ProveError, match="within 10 s"):
        never.finish(10.0, nothing, renewed=True)
