"""What prediction, checks and localisation are worth: policies on a fleet of known hazards, ETTR by simulation, what a
check catches for its time, and NetBouncer's published algorithm on the same fabrics."""

from __future__ import annotations

import functools
import math
import random
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from benchmarks._common import Bounds, Table, spread
from benchmarks._health_sums import Subject, recall
from outlast.core.policy import ActionCosts, Prognosis, choose_action
from outlast.health.sources import Sampler, default_sources
from outlast.plan import simulate
from outlast.plan.designs import job_from_options
from outlast.tensors import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["gain", "netbouncer", "policies", "trade_off", "undisturbed"]

COSTS = ActionCosts(failure_s=300.0, save_s=20.0, move_s=30.0, idle_s=120.0, period_s=120.0)
WORLDS = ((0.9, 600.0), (0.5, 1800.0), (0.2, 1800.0), (0.05, 3600.0), (0.02, 600.0))
OPTIMUM = 1.05
PENALTIES = (0.0, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)


def _cost_of(p: float, tau: float, unsaved_s: float, decide: Callable[[float, float], str]) -> float:
    """Seconds of work that an alarm is expected to cost if `decide(age, unsaved)` says what to do in each period: over
    all delays and both truths, without a die."""
    alive, false, total, age = p, 1 - p, 0.0, 0.0
    hit = -math.expm1(-COSTS.period_s / tau)
    while age < 32 * COSTS.period_s:
        action = decide(age, unsaved_s)
        if action == "move":
            return total + (alive + false) * COSTS.move_s + false * COSTS.idle_s
        if action == "save":
            total, unsaved_s = total + (alive + false) * COSTS.save_s, 0.0
        total += alive * hit * (COSTS.failure_s + COSTS.exposure * unsaved_s)
        alive, age, unsaved_s = alive * (1 - hit), age + COSTS.period_s, unsaved_s + COSTS.period_s
    return total


def _best(p: float, tau: float, age: float, left: float) -> str:
    return choose_action(p, tau, age, left, COSTS).action


def policies(num_alarms: int, seed: int, bounds: Bounds, data: list[Any]) -> Table:
    """Alarms of simulated fleets whose hazards are known, so that the best that can be done is, too. All policies meet
    the same alarms, each at its expected cost; the first 300 teach, and are not counted."""
    rows, worst = [], 0.0
    for p, tau in WORLDS:
        draw, spent = random.Random(seed), {"known": 0.0, "learned": 0.0, "always": 0.0, "never": 0.0, "save": 0.0}
        belief = Prognosis()
        for number in range(num_alarms + 300):
            truth, delay = draw.random() < p, draw.expovariate(1 / tau)
            unsaved, at_s = draw.uniform(0, 1800), number * 1e6
            belief = belief.alarm(f"d{number}", "xid", at_s)

            def learned(age: float, left: float, known: Prognosis = belief, name: str = f"d{number}") -> str:
                kind = known.kind("xid")
                return _best(kind.p, kind.delay_s, age, left) if name in known.open else "wait"

            if number >= 300:
                ways: dict[str, Callable[[float, float], str]] = {
                    "known": functools.partial(_best, p, tau),
                    "learned": learned, "always": lambda age, left: "move", "never": lambda age, left: "wait",
                    "save": lambda age, left: "save" if age == 0 else "wait",
                }  # fmt: skip
                for name, way in ways.items():
                    spent[name] += _cost_of(p, tau, unsaved, way) / num_alarms
            belief = belief.failed(f"d{number}", at_s + delay) if truth else belief.closed(at_s + 9e5)
        over = spent["learned"] / spent["known"]
        worst = max(worst, over)
        rows.append([f"{p:.0%}", f"{tau:g}", *(f"{spent[name]:.1f}" for name in spent), f"{over - 1:+.1%}"])
        data.append({"p": p, "tau_s": tau, **spent})
    bounds.check(f"alarms: learned policy over the optimum, {num_alarms} alarms", worst, OPTIMUM, "of its cost")
    return Table(
        title=f"Alarms of known hazards: seconds of work an alarm costs, {num_alarms} alarms", rows=rows,
        columns=["true", "delay s", "optimum", "learned", "move always", "never", "save always", "over optimum"],
        notes=["A failure costs 300 s and what is unsaved, a save 20 s, a move 30 s and 120 s if in vain."],
    )  # fmt: skip


def gain(measured: list[tuple[str, float, float]], runs: int, seed: int, data: list[Any]) -> Table:
    """ETTR of the profile llama3 by simulation, with no prediction and with each that was measured: (name, share of
    failures foretold, share of alarms that come true). An hour's notice."""
    job, _ = job_from_options(None, profile="llama3")
    rows = []
    for name, told, true in [("none", 0.0, 1.0), *measured]:
        changed = {"predicted": told, "precision": max(true, 1e-3), "notice_s": 3600.0}
        classes = tuple(msgspec.structs.replace(c, **changed) for c in job.classes)
        found = simulate(msgspec.structs.replace(job, classes=classes), runs, seed).ettr()
        rows.append([name, f"{told:.1%}", f"{true:.1%}", f"{found.mean:.3%}", f"{found.low:.3%} to {found.high:.3%}"])
        data.append({"prediction": name, "share": told, "precision": true, "ettr": found.mean})
    return Table(
        title=f"ETTR of llama3 with what was measured, {runs} simulated runs",
        columns=["prediction", "foretold", "true alarms", "ETTR", "95 %"], rows=rows,
        notes=["At a precision near the base rate false alarms cost more than foretold failures save."],
    )  # fmt: skip


def trade_off(subject: Subject, tries: int, rounds: int, seed: int, name: str, data: list[Any]) -> Table:
    """What checked sums and audits of 5 % catch of flips in products, and what each percent of time buys."""
    found = recall(subject, tries, seed)
    flips = [sum(row[i] for by_bit in found.values() for row in by_bit.values()) for i in range(3)]
    high = set(range(8 * next(subject.model.parameters()).element_size() // 2, 64))
    upper = [sum(row[i] for by in found.values() for bit, row in by.items() if bit in high) for i in range(2)]
    plain: list[float] = []
    checked: list[float] = []
    audited: list[float] = []
    for number in range(rounds + 2):
        for times, step, share in ((plain, None, False), (checked, 10**7 + number, False), (audited, None, True)):
            start = time.process_time()
            for leaf in range(20):
                grads = subject.compute(leaf, step)
                if share and leaf == 0:  # one of twenty, as a share of 5 % has it
                    first = [fingerprint(g) for g in grads]
                    assert first == [fingerprint(g) for g in subject.compute(leaf, None)]
            if number >= 2:
                times.append(time.process_time() - start)
    base = spread(plain).median
    costs = [spread(each).median / base - 1 for each in (checked, audited)]
    shares = [(flips[1] / flips[0], upper[1] / max(upper[0], 1)), (0.05, 0.05)]
    rows = []
    for what, cost, (all_, top) in zip(('checks="abft"', "audit=0.05"), costs, shares, strict=True):
        each = f"{all_ / max(cost, 1e-4):.1f}" if cost > 0 else "-"
        rows.append([what, f"{cost:+.1%}", f"{all_:.0%}", f"{top:.0%}", each])
        data.append({"model": name, "what": what, "cost": cost, "caught": all_, "caught_upper_half": top})
    return Table(
        title=f"{name}: flips in products caught, and what a percent of time buys",
        columns=["check", "time", "of all flips", "of flips in the upper half of bits", "points of recall a percent"],
        rows=rows, notes=[
            "An audit's recall is its share by design, for everything in those microbatches, products or not; bits are "
            "as of the clean run in "
            f"{flips[2]} of {flips[0]} flips under checks (also where a flip that it did not see changed nothing).",
        ],
    )  # fmt: skip


def undisturbed(subject: Subject, rounds: int, data: list[Any]) -> Table:
    """Steps while readings are taken, beside steps without: wall time, in turns, with a look at each step (at 30 s
    between looks it is a thousandth of that)."""
    sampler = Sampler(default_sources(), say=lambda text: None)
    sampler.start()
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * rounds + 4):
        if number % 2:
            sampler.collect()
            sampler.ask()
        start = time.perf_counter()
        for leaf in range(4):
            subject.compute(leaf, None)
        if number >= 4:
            times[number % 2].append(time.perf_counter() - start)
    sampler.close()
    without, with_ = spread(times[0]), spread(times[1])
    data.append({"steps_without": times[0], "steps_with": times[1]})
    return Table(
        title="Steps with and without readings", columns=["readings", "ms a step"],
        rows=[["none", without.show(1e3, 2)], ["one look at all sources in each step", with_.show(1e3, 2)]],
    )  # fmt: skip


def netbouncer(
    fabrics: dict[str, tuple[list[list[int]], int]], rounds: int, seed: int,
    ours: Callable[[list[list[int]], int, list[int], int], set[int]], data: list[Any],
) -> Table:  # fmt: skip
    """The algorithm of its paper (coordinate descent on squared errors with the penalty x (1 - x)) beside ours on the
    same losses. It is given what it cannot know: the best of six penalties, half the true loss as its threshold."""
    rows = []
    for name, (paths, num) in fabrics.items():
        for rate, sent in ((0.001, 10_000), (0.01, 200), (0.1, 20)):
            score: dict[str, list[int]] = {"ours": [0, 0], **{f"{w:g}": [0, 0] for w in PENALTIES}}
            there = 0
            for number in range(rounds):
                draw = np.random.default_rng((seed, num, number))
                bad = {int(link) for link in draw.choice(num, (1, 3, 10)[number % 3], replace=False)}
                good = np.full(num, 1 - 1e-5)
                good[list(bad)] = 1 - rate
                lost = [int(draw.binomial(sent, 1 - good[path].prod())) for path in paths]
                there += len(bad)
                found = {"ours": ours(paths, sent, lost, num)}
                for weight in PENALTIES:
                    found[f"{weight:g}"] = _descended(paths, 1 - np.array(lost) / sent, num, weight, 1 - rate / 2)
                for who, links in found.items():
                    score[who][0] += len(links & bad)
                    score[who][1] += len(links)
            best = max((w for w in score if w != "ours"), key=lambda w: _f1(score[w][0], score[w][1], there))
            for who, label in (("ours", "localise_links"), (best, f"NetBouncer's, penalty {best}")):
                right, named = score[who]
                rows.append([name, f"{rate:.1%}", label, f"{right / max(named, 1):.3f}", f"{right / there:.3f}"])
                data.append({"fabric": name, "rate": rate, "who": label, "right": right, "named": named, "bad": there})
    return Table(
        title=f"Links: beside NetBouncer's algorithm, {rounds} draws a row",
        columns=["fabric", "loss", "algorithm", "precision", "recall"], rows=rows,
        notes=["Tan et al., NSDI 2019, algorithm 1, from the paper; its own table is of other fabrics."],
    )  # fmt: skip


def _f1(right: int, named: int, there: int) -> float:
    return 2 * right / max(named + there, 1)


def _descended(paths: list[list[int]], seen: Any, num: int, weight: float, threshold: float) -> set[int]:
    """Links whose success falls below the threshold."""
    crossing: list[list[int]] = [[] for _ in range(num)]
    for row, path in enumerate(paths):
        for link in path:
            crossing[link].append(row)
    x = np.array([float(np.mean(seen[rows])) if rows else 1.0 for rows in crossing])
    whole = np.array([x[path].prod() for path in paths])
    for _ in range(30):
        before = x.copy()
        for link, rows in enumerate(crossing):
            if not rows:
                continue
            rest = whole[rows] / max(x[link], 1e-12)
            square, cross = float(rest @ rest), float(seen[rows] @ rest)
            if square > weight:
                new = (2 * cross - weight) / (2 * (square - weight))
            else:  # concave: one of the ends
                new = 1.0 if square - 2 * cross <= 0 else 0.0
            x[link] = min(max(new, 1e-6), 1.0)
            whole[rows] = rest * x[link]
        if float(np.abs(x - before).max()) < 1e-7:
            break
    return {link for link in range(num) if x[link] < threshold}
