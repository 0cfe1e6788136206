"""Useful time with its interval: what a stretch is, when there is none, and how often the truth lies inside."""

from __future__ import annotations

import math
import random

import pytest

from outlast.core import events as ev
from outlast.observe import UsefulTime
from outlast.observe._accounting import AccountingFold

START_S = 1_000_000.0


class _Run:
    """A run's journal in the making: `works` and `stands` let time pass, `fails` is the loss of all since a save."""

    def __init__(self) -> None:
        self.fold, self.now_s, self.step = AccountingFold(), START_S, 0
        self.fold.take(
            ev.RunStarted(at_s=START_S, run_id="r", command=[], num_replicas=1, num_spares=0, signature={}, config={})
        )

    def commit(self, steps: int, **seconds: float) -> None:
        """`steps` more are committed after so many seconds by use."""
        first, self.step = self.step, self.step + steps
        self.now_s += math.fsum(seconds.values())
        self.fold.take(
            ev.ProgressMade(
                at_s=self.now_s, view=[1, 1], stable=self.step, losses=[], step_s=1.0, first=first, committed=self.step,
                committed_at_s=self.now_s, seconds=seconds,
            )
        )  # fmt: skip

    def exits(self, replica: str, cause: str = "signal") -> None:
        self.fold.take(
            ev.ReplicaExited(at_s=self.now_s, replica=replica, cause=cause, detail="", noticed_by="a0")  # type: ignore[arg-type]
        )

    def recovers(self, replica: str, downtime_s: float = 1.0) -> None:
        self.fold.take(
            ev.Recovery(
                at_s=self.now_s, cause="signal", replica=replica, noticed_by="a0", detect_s=0.1, downtime_s=downtime_s,
                microbatches_recomputed=0, lost_steps=0, step=self.step, view=[1, 2],
            )
        )  # fmt: skip

    def loses_all(self, back_to: int) -> None:
        self.fold.take(ev.FleetGone(at_s=self.now_s, step=self.step, detail=""))
        self.step = back_to

    def useful(self, now_s: float | None = None) -> UsefulTime:
        return self.fold.useful(self.fold.accounting(now_s=now_s))


def _struck(cycles: list[tuple[float, float]]) -> _Run:
    """One that works so long, and then stands so long for a death, over and over."""
    run = _Run()
    for number, (work_s, stand_s) in enumerate(cycles):
        run.commit(10, productive=work_s)
        run.exits(f"r1.{number}")
        run.commit(1, recovery=stand_s)
        run.recovers(f"r1.{number}")
    run.commit(10, productive=50.0)
    return run


def test_with_fewer_than_two_failures_there_is_no_interval_yet() -> None:
    for cycles in ([], [(100.0, 5.0)]):
        useful = _struck(cycles).useful()
        assert (useful.ettr_95, useful.failures) == (None, len(cycles))
    assert _Run().useful() == UsefulTime(ettr=0.0)


def test_the_interval_is_around_the_ettr_of_the_accounts_and_within_0_and_1() -> None:
    cycles = [(100.0, 5.0), (30.0, 2.0), (300.0, 9.0), (80.0, 1.0), (120.0, 4.0)]
    for count in range(2, 6):
        run = _struck(cycles[:count])
        useful = run.useful()
        assert useful.ettr == run.fold.accounting().ettr
        assert useful.failures == count
        assert useful.ettr_95 is not None
        assert 0 <= useful.ettr_95[0] < useful.ettr < useful.ettr_95[1] < 1


def test_the_interval_is_that_of_the_ratio_over_stretches() -> None:
    """By hand: stretches end at the last commit before a death; what that cost belongs to the next one."""
    run = _struck([(100.0, 5.0), (30.0, 2.0), (300.0, 9.0), (80.0, 4.0), (90.0, 3.0)])
    walls, used = (100.0, 35.0, 302.0, 89.0, 94.0, 53.0), (100.0, 30.0, 300.0, 80.0, 90.0, 50.0)
    stretches = list(zip(walls, used, strict=True))
    wall_s = sum(wall for wall, _ in stretches)
    share = 1 - sum(used for _, used in stretches) / wall_s
    squares = sum((wall - used - share * wall) ** 2 for wall, used in stretches)
    reach = math.exp(2.776445 * math.sqrt(squares * 6 / 5) / (share * wall_s))  # Student's t with four degrees
    assert run.useful().ettr_95 == pytest.approx((1 - share * reach, 1 - share / reach), abs=1e-4)


def test_an_exit_and_its_recovery_are_one_failure_and_so_are_two_deaths_before_a_commit() -> None:
    run = _Run()
    run.commit(10, productive=100.0)
    run.recovers("r1.0")  # told before its process had ended
    run.commit(1, recovery=1.0)
    run.exits("r1.0")
    run.commit(10, productive=60.0)
    assert run.useful().failures == 1
    run.exits("r0.0")
    run.exits("r2.0")
    run.commit(1, recovery=1.0)
    for name in ("r0.0", "r2.0"):
        run.recovers(name)
    run.commit(10, productive=60.0)
    assert run.useful().failures == 2


@pytest.mark.parametrize("cause", ["finished", "left"])
def test_who_leaves_has_not_failed(cause: str) -> None:
    run = _Run()
    run.commit(10, productive=100.0)
    run.exits("r1.0", cause)
    run.commit(10, productive=60.0)
    assert run.useful().failures == 0


def test_what_no_commit_followed_ended_no_stretch() -> None:
    run = _struck([(100.0, 5.0), (30.0, 2.0)])
    run.exits("r3.0")
    assert run.useful().failures == 2


def test_it_goes_on_from_what_was_kept() -> None:
    run, again = _struck([(100.0, 5.0), (30.0, 2.0), (70.0, 3.0)]), AccountingFold()
    run.exits("r3.0")
    again.load(run.fold.dump())
    assert again.useful(again.accounting()) == run.useful()
    first = run.fold
    run.commit(10, productive=20.0)
    run.fold, run.now_s, run.step = again, run.now_s - 20.0, run.step - 10
    run.commit(10, productive=20.0)
    assert again.useful(again.accounting()) == first.useful(first.accounting())
    assert run.useful().failures == 4


SAVE_S, RESTART_S, INTERVAL_S = 2.0, 20.0, 60.0


def _simulated(rng: random.Random, mtbf_s: float, wall_s: float) -> UsefulTime:
    """Saves every `INTERVAL_S`, exponential failures that take what was not saved, also during restarts."""
    run = _Run()
    end_s = START_S + wall_s
    fails_s = START_S + rng.expovariate(1 / mtbf_s)
    stood_s, saved = 0.0, 0
    while run.now_s + stood_s < end_s:
        until_s = min(fails_s, end_s)
        worked_s = min(INTERVAL_S, max(0.0, until_s - run.now_s - stood_s))
        whole = run.now_s + stood_s + INTERVAL_S + SAVE_S <= until_s
        stood_s = min(stood_s, until_s - run.now_s)
        if whole:
            run.commit(100, productive=INTERVAL_S, recovery=stood_s, checkpoint=SAVE_S)
            stood_s, saved = 0.0, run.step
            continue
        if worked_s > 0:
            left_s = until_s - run.now_s - stood_s - worked_s
            run.commit(max(1, int(worked_s)), productive=worked_s, recovery=stood_s, checkpoint=left_s)
            stood_s = 0.0
        if until_s == end_s:
            break
        run.loses_all(saved)
        stood_s = fails_s - run.now_s + RESTART_S  # what passed since the last commit, where it stood then, too
        fails_s += rng.expovariate(1 / mtbf_s)
    return run.useful()


@pytest.mark.parametrize("failures", [4, 12, 40])
def test_the_truth_is_inside_in_95_of_100_runs(failures: int) -> None:
    """The truth is Daly's exact segment. A fixed seed: with 400 runs a share of 0.95 is seen within 0.93 and 0.97."""
    mtbf_s, rng = 1000.0, random.Random(20)
    segment_s = mtbf_s * math.exp(RESTART_S / mtbf_s) * math.expm1((INTERVAL_S + SAVE_S) / mtbf_s)
    truth = INTERVAL_S / segment_s
    seen: list[UsefulTime] = []
    while len(seen) < 400:
        useful = _simulated(rng, mtbf_s, failures * mtbf_s)
        seen += [useful] if useful.ettr_95 is not None else []
    inside = sum(low <= truth <= high for low, high in (useful.ettr_95 for useful in seen if useful.ettr_95))
    assert 0.90 <= inside / len(seen) <= 0.98
    if failures >= 12:  # the first stretch has no restart, and the last one is cut short: in short runs a point or so
        assert sum(useful.ettr for useful in seen) / len(seen) == pytest.approx(truth, abs=0.005)
