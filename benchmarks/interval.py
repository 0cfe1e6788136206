"""The adaptive checkpoint interval beside fixed ones, replaying failures that were recorded and ones that were drawn.

A job of so many hours of training meets failures; a save costs seconds of training, a failure what was trained since
the last save. Waste: wall time less training, restarts aside. Fixed intervals know the scenario in hindsight: the best
of a fine grid over all its jobs. Every job of the adaptive policy starts from the prior alone. Young's interval is
given the same wrong prior. An ablated policy lacks one input: the time since the last failure, training's stability,
or the time left. The difference is taken job by job.

    python -m benchmarks interval --record
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import os
import random
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._common import Bounds, Table, environment, options, publish
from benchmarks._unknowing import Game
from outlast.core.policy import Losses, next_save_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["main"]

DATA = Path(os.environ.get("OUTLAST_TRACES", Path(__file__).resolve().parents[2] / "shared" / "data"))
GRID = [1.12**i for i in range(-40, 41)]  # fixed intervals, times Young's for the scenario's own mean
WRONG = (0.1, 10.0)  # the prior's mean time between failures over the true one
SHORT = "Weibull(0.6), short"
TELLING = {
    "Weibull(0.6), unstable, two means long": (2, 120.0, ("stability", "left")),
    "Weibull(0.6), unstable, four means long": (4, 30.0, ("stability", "age")),
}
"""(job's length in mean times, cost of a save, inputs that must tell): dear saves show the end of a job, cheap ones the
time since the last failure. Failures cluster in both, and the loss leaves its band now and then."""
TOLD: tuple[tuple[float, dict[float, float]], ...] = (
    (1440.0, {1440.0: 0.6, 14_400.0: 0.4}),
    (144_000.0, {14_400.0: 0.447, 144_000.0: 0.553}),
    (14_400.0, {1440.0: 0.53, 14_400.0: 0.11, 144_000.0: 0.36}),
)
"""A short job is told a mean time; the truth is one of these. Odds for which the least worst ratio is largest."""
UNSTABLE_S, STABLE_S, REWIND_S = 1200.0, 14_400.0, 900.0  # mean lengths of episodes; mean time to a rewind inside one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One replay. `fails`: wall seconds of the interruptions, ascending; `shaky`: wall spans in which the loss is out
    of its band; `rewinds`: wall seconds of the rewinds in them."""

    work_s: float
    cost_s: float
    fails: tuple[float, ...]
    shaky: tuple[tuple[float, float], ...] = ()
    rewinds: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Which inputs the adaptive policy sees."""

    prior_s: float
    age: bool = True
    stability: bool = True
    left: bool = True


class Ageless(Losses):
    """The same belief of a hazard that has no memory: what the record says without the time since the last failure."""

    def course(self, age_s: float, floor: float = 0.0) -> Any:
        course = super().course(age_s, floor)
        return course._replace(factors=(1.0,) * len(course.factors))


def waste(job: Job, decide: Callable[[float, float, float, bool], float], lost: Callable[[float], None]) -> float:
    """Wall seconds that were not training. decide(now, age, left, shaky) -> seconds from the last save (or from the
    return to it) to the next one; age: from the last failure to then; `lost(since)`: a failure, with the time since
    the one before."""
    now = done = saved = last = began = 0.0
    events = _events(job)
    at, shaky = next(events, (math.inf, ""))
    unstable = False
    due = decide(0.0, 0.0, job.work_s, False)
    while True:
        finish, save = now + job.work_s - done, now + due
        when = min(finish, save, at)
        done, due, now = done + when - now, due - (when - now), when
        if at <= when:
            if shaky in ("fail", "rewind"):
                done = saved
                if shaky == "fail":
                    lost(now - last)
                    last = now
            else:
                unstable = shaky == "begins"
            began = now if done == saved else began
            due = max(0.0, began + decide(now, began - last, job.work_s - saved, unstable) - now)
            at, shaky = next(events, (math.inf, ""))
        elif finish <= when:
            return now - job.work_s
        else:
            now, cost_end = now + job.cost_s, now + job.cost_s
            while at < cost_end and shaky in ("begins", "ends"):
                unstable = shaky == "begins"
                at, shaky = next(events, (math.inf, ""))
            if at < cost_end:  # it failed while it saved: the save is void
                now = at
                due = 0.0
                continue
            saved, began = done, now
            due = decide(now, now - last, job.work_s - done, unstable)


def _events(job: Job) -> Iterator[tuple[float, str]]:
    marks = [(t, "fail") for t in job.fails] + [(t, "rewind") for t in job.rewinds]
    for begin, end in job.shaky:
        marks += [(begin, "begins"), (end, "ends")]
    return iter(sorted(marks))


def fixed(job: Job, interval_s: float) -> float:
    return waste(job, lambda now, since, left, shaky: interval_s, lambda since: None)


def adaptive(job: Job, policy: Policy) -> float:
    losses = Losses(prior_s=policy.prior_s) if policy.age else Ageless(prior_s=policy.prior_s, shapes=(1.0,))
    episodes = {"rewinds": 1.0, "s": 3600.0, "since": 0.0, "shaky": False}  # prior: a rewind an hour of instability

    def decide(now: float, age: float, left: float, shaky: bool) -> float:
        if episodes["shaky"]:
            episodes["s"] += now - episodes["since"]
            episodes["rewinds"] += sum(episodes["since"] < t <= now for t in job.rewinds)
        episodes["since"], episodes["shaky"] = now, shaky
        extra = episodes["rewinds"] / episodes["s"] if shaky and policy.stability else 0.0
        left = left if policy.left else math.inf
        return next_save_s(losses, age_s=age, cost_s=job.cost_s, extra=extra, left_s=left)

    return waste(job, decide, losses.observe)


def drawn(rng: random.Random, *, shape: float, mean_s: float, work_s: float, cost_s: float, shaky: bool) -> Job:
    """Weibull times between failures; episodes of instability with rewinds in them."""
    scale, horizon = mean_s / math.gamma(1 + 1 / shape), 40 * work_s
    fails, now = [], 0.0
    while now < horizon:
        now += rng.weibullvariate(scale, shape)
        fails.append(now)
    spans, rewinds, now = [], [], rng.expovariate(1 / STABLE_S)
    while shaky and now < horizon:
        end = now + rng.expovariate(1 / UNSTABLE_S)
        spans.append((now, end))
        hit = now + rng.expovariate(1 / REWIND_S)
        while hit < end:
            rewinds.append(hit)
            hit += rng.expovariate(1 / REWIND_S)
        now = end + rng.expovariate(1 / STABLE_S)
    return Job(work_s=work_s, cost_s=cost_s, fails=tuple(fails), shaky=tuple(spans), rewinds=tuple(rewinds))


def recorded(times: Sequence[float], rng: random.Random, num: int, *, work_s: float, cost_s: float) -> list[Job]:
    """Jobs that start at random moments of a record; at its end it begins anew. Where it was kept by the minute, a
    failure lies anywhere in its minute: or else intervals that divide one would win by resonance."""
    length, jobs, note = times[-1], [], times
    coarse = all(t % 60 == 0 for t in note)
    for _ in range(num):
        start = rng.uniform(0, length)
        times = sorted(t + rng.uniform(0, 60) for t in note) if coarse else note
        later = [t - start for t in times if t > start]
        rounds = [t - start + length * (1 + i) for i in range(math.ceil(20 * work_s / length)) for t in times]
        jobs.append(Job(work_s=work_s, cost_s=cost_s, fails=tuple(later + rounds)))
    return jobs


def traces() -> dict[str, list[float]]:
    """Seconds of the interruptions of each record that is here: nodes going down or being taken away."""
    found: dict[str, set[float]] = {}
    hbd, spot = DATA / "infinitehbd_fault_events.csv", DATA / "bamboo_oobleck_node_events.csv"
    if hbd.exists():
        with hbd.open(encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["event"] == "down"]
        found["InfiniteHBD, 400 servers"] = {float(row["time_h"]) * 3600 for row in rows}
    if spot.exists():
        with spot.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["event"] == "remove":
                    found.setdefault(f"spot, {row['trace']}", set()).add(float(row["time_ms"]) / 1e3)
    merged = {name: _apart(sorted(times)) for name, times in found.items()}
    return {name: times for name, times in merged.items() if len(times) >= 20}


def _apart(times: Sequence[float]) -> list[float]:
    """Who goes within a minute of another interrupts nothing more: the job is not back yet."""
    kept: list[float] = []
    for t in times:
        if not kept or t - kept[-1] >= 60:
            kept.append(t)
    return kept


def scenarios(args: argparse.Namespace) -> dict[str, tuple[float, list[Job]]]:
    """(true mean time between failures, jobs) by name."""
    rng = random.Random(args.seed)
    mean = 4 * 3600.0
    every: dict[str, tuple[float, list[Job]]] = {}
    for name, shape, shaky in (
        ("Weibull(0.6)", 0.6, False), ("Weibull(0.6), unstable", 0.6, True), ("exponential", 1.0, False),
    ):  # fmt: skip
        every[name] = (
            mean,
            [
                drawn(rng, shape=shape, mean_s=mean, work_s=60 * mean, cost_s=30.0, shaky=shaky)
                for _ in range(args.jobs)
            ],
        )
    every[SHORT] = (
        mean,
        [drawn(rng, shape=0.6, mean_s=mean, work_s=mean / 2, cost_s=120.0, shaky=False) for _ in range(40 * args.jobs)],
    )
    for name, (means, cost_s, _) in TELLING.items():
        every[name] = (
            mean,
            [
                drawn(rng, shape=0.6, mean_s=mean, work_s=means * mean, cost_s=cost_s, shaky=True)
                for _ in range(60 * args.jobs)
            ],
        )
    for name, times in traces().items():
        mean_s = times[-1] / len(times)
        every[name] = mean_s, recorded(times, rng, args.jobs, work_s=60 * mean_s, cost_s=mean_s / 480)
    return every


def study(mean_s: float, jobs: Sequence[Job]) -> dict[str, list[float]]:
    """Waste of each policy, a figure a job."""
    young = math.sqrt(2 * mean_s * jobs[0].cost_s)
    grid = {factor * young: [fixed(job, factor * young) for job in jobs] for factor in GRID[::2]}
    best = min(grid, key=lambda interval: statistics.fmean(grid[interval]))
    found = {f"best fixed, {best:.0f} s": grid[best]}
    found["adaptive"] = [adaptive(job, Policy(prior_s=mean_s)) for job in jobs]
    for wrong in WRONG:
        found[f"adaptive, prior x {wrong:g}"] = [adaptive(job, Policy(prior_s=wrong * mean_s)) for job in jobs]
        interval = math.sqrt(2 * wrong * mean_s * jobs[0].cost_s)
        found[f"Young, prior x {wrong:g}"] = [fixed(job, interval) for job in jobs]
    for missing in ("age", "stability", "left") if jobs[0].shaky else ("age", "left"):
        found[f"adaptive without {missing}"] = [
            adaptive(job, dataclasses.replace(Policy(prior_s=mean_s), **{missing: False})) for job in jobs
        ]
    return found


def unknowing(args: argparse.Namespace, bounds: Bounds) -> Table:
    """The short job, told a mean time that may be ten times wrong: the policy's worst, and the least that any has."""
    rng, work_s, cost_s, rows = random.Random(args.seed + 1), 7200.0, 120.0, []
    for told, odds in TOLD:
        least, _ = Game(shape=0.6, means_s=tuple(odds), num_cells=60, cost_s=cost_s).least(tuple(odds.values()))
        ours = {}
        for mean_s in odds:
            jobs = [
                drawn(rng, shape=0.6, mean_s=mean_s, work_s=work_s, cost_s=cost_s, shaky=False)
                for _ in range(40 * args.jobs)
            ]
            grid = [[fixed(job, work_s / parts) for job in jobs] for parts in range(1, 16)]
            best = min(grid, key=statistics.fmean)
            ours[mean_s] = paired([adaptive(job, Policy(prior_s=told)) for job in jobs], best)
        each = ", ".join(f"{mean_s:.0f} s: {1 + d:.3f} ± {2 * e:.3f}" for mean_s, (d, e) in ours.items())
        worst = 1 + max(d for d, _ in ours.values())
        rows.append([f"{told:.0f} s", each, f"{worst:.3f}", f"{least:.3f}"])
        bounds.check(f"told {told:.0f} s: worst ratio / least possible", worst / least, 1.05, "times")
    title = "Weibull(0.6), 7200 s of work, a save costs 120 s: told a mean time that may be wrong"
    return Table(title=title, columns=["told", "adaptive / best fixed, by truth", "worst", "least possible"], rows=rows)


def paired(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Mean of a over mean of b less 1, and its standard error (of the paired differences)."""
    base = statistics.fmean(b)
    differences = [x - y for x, y in zip(a, b, strict=True)]
    return statistics.fmean(differences) / base, statistics.stdev(differences) / math.sqrt(len(a)) / base


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--jobs", type=int, default=60, help="replays a scenario")
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    args = parser.parse_args(argv)
    machine, bounds, tables, raw = environment(args), Bounds(), [], {}
    for name, (mean_s, jobs) in scenarios(args).items():
        if args.only not in name:
            continue
        found = study(mean_s, jobs)
        raw[name] = {key: statistics.fmean(values) for key, values in found.items()}
        first = next(iter(found))
        rows = []
        for key, values in found.items():
            difference, error = paired(values, found[first])
            work = statistics.fmean(job.work_s for job in jobs)
            share = 100 * statistics.fmean(values) / work
            rows.append([key, f"{share:.2f} %", f"{1 + difference:.3f} ± {2 * error:.3f}"])
        title = f"{name}: {len(jobs)} jobs, a failure every {mean_s:.0f} s, a save costs {jobs[0].cost_s:.1f} s"
        tables.append(Table(title=title, columns=["policy", "waste over training", "over the best fixed"], rows=rows))
        for prior in ("adaptive", *(f"adaptive, prior x {w:g}" for w in WRONG)):
            bounds.check(f"{name}: {prior} / best fixed", 1 + paired(found[prior], found[first])[0], 1.05, "times")
        for wrong in WRONG:
            ratio = 1 + paired(found[f"adaptive, prior x {wrong:g}"], found[f"Young, prior x {wrong:g}"])[0]
            bounds.check(f"{name}: adaptive / Young, both with prior x {wrong:g}", ratio, 1.0, "times")
        for missing in TELLING[name][2] if name in TELLING else ():
            gain, error = paired(found["adaptive"], found[f"adaptive without {missing}"])
            bounds.check(f"{name}: with {missing} / without, upper end of 95 %", 1 + gain + 2 * error, 1.0, "times")
    if args.only in "not knowing":
        tables.append(unknowing(args, bounds))
    return publish("interval", args, machine, tables, bounds, raw)


if __name__ == "__main__":
    sys.exit(main())
