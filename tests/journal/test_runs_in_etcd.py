"""Which of several runs under one secret lives, by signs that change while a clock jumps."""

from __future__ import annotations

import pytest

from outlast.errors import ConfigError
from outlast.journal import CoordinatorClaim, RunsInEtcd, _runs_in_etcd, access_of
from outlast.journal._turn import TurnSeen


class Told(RunsInEtcd):
    """`beats`: the runs that are not over, and how often each has given a sign; those in `living` go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(access_of("etcd://127.0.0.1:1", {}), b"s" * 32)
        self.beats, self.living, self.now_s = dict[str, int](), set[str](), 100.0
        monkeypatch.setattr(_runs_in_etcd.time, "monotonic", lambda: self.now_s)

    def _claimed(self, within_s: float) -> dict[str, TurnSeen]:
        return {
            run: TurnSeen(CoordinatorClaim(epoch=1, token=run, seat=run, host=run, address="h:1"), b"", beat, None)
            for run, beat in self.beats.items()
        }

    def found(self, asks: int = 30) -> str | None:
        """The host of the run that is found, asking each second."""
        for _ in range(asks):
            claim = self.coordinator(1.0)
            if claim is not None:
                return claim.host
            self.now_s += 1.0
            for run in self.living:
                self.beats[run] += 1
        return None


def test_a_run_that_lived_then_is_not_one_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent asks for long: one run is lost without an end, and hours later another begins under its secret."""
    runs = Told(monkeypatch)
    runs.beats, runs.living = {"left": 7, "first": 0}, {"first"}
    assert runs.found() == "first"
    runs.beats["first"] += 50  # it went on while nobody asked, and is lost
    runs.living, runs.now_s = set(), runs.now_s + 3600.0
    assert runs.found(1) == "first"  # who calls there finds out
    assert runs.found() is None
    runs.beats["second"], runs.living = 0, {"second"}
    assert runs.found() == "second"
    runs.beats["third"] = 0
    runs.living.add("third")
    with pytest.raises(ConfigError, match="second and third are runs with the same secret"):
        runs.found()
    runs.close()


def test_one_that_ends_as_another_begins_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Told(monkeypatch)
    runs.beats, runs.living = {"left": 7, "first": 0}, {"first"}
    assert runs.found() == "first"
    runs.beats |= {"first": 9, "second": 0}  # both have given signs since
    runs.living, runs.now_s = {"second"}, runs.now_s + 5.0
    assert runs.found() == "second"
    runs.close()
