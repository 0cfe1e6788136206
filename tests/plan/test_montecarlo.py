"""The simulator against a Monte Carlo written from the documentation alone, and intervals counted on simulated truth.

`one_run` knows nothing of the planner: it follows docs/reference/plan.md in plain numbers, one failure after another.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outlast.core import reliability as rel
from outlast.plan import FailureClass, Job, Tier, simulate
from outlast.plan.traces import Failure, Trace, node_rate


def setting(rng: random.Random) -> dict[str, Any]:
    """Machines, clocks, shares and costs at random."""
    mtbf_s = 10 ** rng.uniform(3.6, 5.0)
    return {
        "nodes": rng.randrange(8, 2000), "mtbf_s": mtbf_s, "masked": rng.choice([0.0, 0.3, 0.9]),
        "foretold": rng.choice([0.0, 0.0, 0.4]), "write_s": 10 ** rng.uniform(0, 2),
        "recovery_s": 10 ** rng.uniform(1, 3),
        "detect_s": rng.uniform(0, 60), "stall_s": rng.uniform(0, 20), "planned_s": rng.uniform(0, 300),
        "interval_s": mtbf_s * rng.uniform(0.05, 0.5), "wall_s": mtbf_s * 60,
    }  # fmt: skip


def one_run(s: dict[str, Any], rng: random.Random) -> tuple[float, int]:
    """(useful time over wall time, failures) of one run: train, write, fail, go back."""
    now = kept = at = down = 0.0
    failures, cycle = 0, s["interval_s"] + s["write_s"]
    acts = s["planned_s"] < s["detect_s"] + s["recovery_s"] + s["interval_s"] / 2  # else the prediction is let be
    while True:
        gap = rng.expovariate(1 / s["mtbf_s"])
        span = min(gap, s["wall_s"] - now)
        waited = min(down, span)
        down, at, now = down - waited, at + span - waited, now + span
        whole, rest = divmod(at, cycle)
        saved, trained = whole * s["interval_s"], whole * s["interval_s"] + min(rest, s["interval_s"])
        if gap > span:
            return (kept + trained) / s["wall_s"], failures
        failures += 1
        if rng.random() < s["masked"]:
            down = max(down, s["stall_s"])
        elif rng.random() < s["foretold"] and acts:
            kept, at, down = kept + trained, 0.0, max(down, s["planned_s"])
        else:
            kept, at, down = kept + saved, 0.0, s["detect_s"] + s["recovery_s"]


def as_job(s: dict[str, Any]) -> Job:
    item = FailureClass(
        name="any", node_mtbf_h=s["mtbf_s"] * s["nodes"] / 3600, masked=s["masked"], predicted=s["foretold"],
        detection_s=s["detect_s"],
    )  # fmt: skip
    return Job(
        classes=(item,), accelerators=s["nodes"], accelerators_per_node=1, days=s["wall_s"] / 86_400,
        tiers=(Tier(name="store", write_s=s["write_s"], recovery_s=s["recovery_s"]),), interval="fixed",
        interval_s=s["interval_s"], mask_stall_s=s["stall_s"], planned_stop_s=s["planned_s"],
    )  # fmt: skip


SEED = 7


def compare(settings: int, runs: int) -> NDArray[np.float64]:
    """(settings, 4): the simulator's useful time less the Monte Carlo's, its time between failures over that one's less
    one, and four standard errors of each, of both counts."""
    rng, rows = random.Random(SEED), []
    for _ in range(settings):
        s = setting(rng)
        mine = np.array([one_run(s, rng) for _ in range(runs)])
        found = simulate(as_job(s), runs, seed=rng.randrange(1000))
        ratio, failures = mine.mean(axis=0)
        spread = 4 * float(mine[:, 0].std()) * (2 / runs) ** 0.5
        between = failures / (float(found.failures.sum()) / runs) - 1
        rows.append((found.ettr().mean - ratio, between, spread, 4 * (2 / (failures * runs)) ** 0.5))
    return np.array(rows)


def test_the_simulator_agrees_with_a_monte_carlo_from_the_documentation() -> None:
    gaps = compare(settings=24, runs=60)
    assert (abs(gaps[:, 0]) < 0.005 + gaps[:, 2]).all()
    assert (abs(gaps[:, 1]) < 0.02 + gaps[:, 3]).all()


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_it_agrees_on_two_hundred_settings() -> None:
    """So many runs that chance has hardly any part in the bounds. `-s` shows the figures."""
    gaps = compare(settings=200, runs=4000)
    points, percent = 100 * abs(gaps[:, 0]), 100 * abs(gaps[:, 1])
    print(f"\n{len(gaps)} settings, 4000 runs each on both sides, seed {SEED}")
    for name, found, bound, error in (
        ("ETTR, points apart", points, 0.5, 100 * gaps[:, 2] / 4),
        ("MTBF, percent apart", percent, 2.0, 100 * gaps[:, 3] / 4),
    ):
        figures = (np.median(found), np.quantile(found, 0.95), found.max(), np.median(error))
        print(f"{name}: median {figures[0]:.3f}, 95 of 100 below {figures[1]:.3f}, most {figures[2]:.3f}; "
              f"one standard error {figures[3]:.3f}; within {bound}: {int((found <= bound).sum())}")  # fmt: skip
    print(f"mean difference: ETTR {100 * gaps[:, 0].mean():+.4f} points, MTBF {100 * gaps[:, 1].mean():+.4f} percent")
    assert points.max() <= 0.5
    assert percent.max() <= 2.0


WEEKS, MACHINES, A_WEEK = 26, 50, 10.0


def fleet(variance: float, rng: np.random.Generator) -> Trace:
    """Half a year of machines that are alike, with incidents of one or two of them, in weeks that differ or do not."""
    rates = rng.gamma(1 / variance, variance, WEEKS) if variance else np.ones(WEEKS)
    starts = np.concatenate([w * 168 + rng.uniform(0, 168, rng.poisson(x * A_WEEK / 1.5)) for w, x in enumerate(rates)])
    both = np.sort(np.append(starts, starts[rng.random(len(starts)) < 0.5] + 0.001))
    failures = tuple(
        Failure(down_h=at, up_h=at + 1.0, node=f"n{i % MACHINES}", kind="x") for i, at in enumerate(both.tolist())
    )
    return Trace(name="t", hours=WEEKS * 168.0, num_nodes=MACHINES, failures=failures)


def covered(variance: float, trials: int) -> tuple[float, float]:
    """Shares of 95 % intervals that hold the true rate: as fitted, and if failures were taken as independent."""
    rng, rate_h, fitted, naive = np.random.default_rng(5), A_WEEK / 168 / MACHINES, 0, 0
    for _ in range(trials):
        trace = fleet(variance, rng)
        found, counted = node_rate(trace), rel.gamma_poisson(len(trace.failures), trace.exposure_h)
        fitted += found.low <= rate_h <= found.high
        naive += counted.low <= rate_h <= counted.high
    return fitted / trials, naive / trials


@pytest.mark.parametrize(("variance", "independent"), [(0.0, (0.8, 0.92)), (0.4, (0.4, 0.75))])
def test_the_interval_of_the_rate_holds_the_truth_as_often_as_it_says(
    variance: float, independent: tuple[float, float]
) -> None:
    """In 95 of 100 logs whether weeks differ or not; one standard error is 0.8 of 100 here. What takes the failures for
    independent does in neither."""
    fitted, naive = covered(variance, 800)
    assert 0.93 <= fitted <= 0.97, fitted
    assert independent[0] < naive < independent[1], naive


def test_the_interval_of_the_rate_is_neither_nothing_nor_as_wide_as_a_prior() -> None:
    """Failures at even distances: at least half of what independent ones have. A record of days: as its quarters."""
    even = tuple(Failure(down_h=168.0 * w + h, up_h=None, node="n", kind="x") for w in range(8) for h in (50.0, 100.0))
    found, counted = (
        node_rate(Trace(name="t", hours=8 * 168.0, num_nodes=9, failures=even)),
        rel.gamma_poisson(16, 12096.0),
    )
    assert 0.5 < np.log(found.high / found.low) / np.log(counted.high / counted.low) < 0.75
    assert found.low < found.mean < found.high
    days = tuple(Failure(down_h=float(h), up_h=None, node="n", kind="x") for h in range(0, 72, 6))
    short = node_rate(Trace(name="t", hours=72.0, num_nodes=9, failures=days))
    assert short.low < short.mean < short.high < 3 * short.mean


@pytest.mark.campaign
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Counted: a population's mean and spread. `python -m benchmarks coverage` counts fleets' rates."""
    rng, inside = np.random.default_rng(5), np.zeros(2)
    for _ in range(500):
        rates = rng.gamma(2.0, 20 / 168 / 2.0, 52)
        found = rel.hierarchical_rates(rng.poisson(rates * 168), np.full(52, 168.0))
        inside += [
            found.mean_interval[0] <= 20 / 168 <= found.mean_interval[1],
            found.shape_interval[0] <= 2.0 <= found.shape_interval[1],
        ]
    assert (inside / 500 >= 0.93).all()
    assert (inside / 500 <= 0.985).all()
