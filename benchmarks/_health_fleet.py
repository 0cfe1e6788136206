"""Readings' cost, known answers against faults of known rate, links of simulated fabrics."""

from __future__ import annotations

import itertools
import math
import random
import time
from typing import Any

import numpy as np
import torch

from benchmarks._common import Bounds, Table, spread
from outlast.core.reliability import localise_links
from outlast.health import QuestionsInTurn, ask_device
from outlast.health.sources import Sampler, default_sources
from outlast.runtime.faults.flips import flip_bit

__all__ = ["fabrics_of", "links", "named", "readings", "tests"]

READINGS_LIMIT = 0.002  # of a core
INTERVAL_S = 30.0
SIDE = 64  # of the matrices that devices are asked about
RATES = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10)
FAULTS = 20


def readings(bounds: Bounds, data: list[Any]) -> Table:
    """Processor time of a look at all sources, beside the time between two looks."""
    sampler = Sampler(default_sources(), say=lambda text: None)
    sampler.start()
    looks = 0
    deadline = time.monotonic() + 4
    while time.monotonic() < deadline and looks < 50:
        sampler.ask()
        looks += 1
        rest = time.monotonic() + 0.05
        while time.monotonic() < rest:
            sampler.collect()
            time.sleep(0.01)
    cost = sampler.cpu_s / looks / INTERVAL_S
    sampler.close()
    bounds.check("readings: share of a core", cost, READINGS_LIMIT, "of a core")
    data.append({"looks": looks, "cpu_s": sampler.cpu_s})
    return Table(
        title=f"Readings every {INTERVAL_S:g} s", columns=["looks", "processor ms a look", "share of a core"],
        rows=[[str(looks), f"{sampler.cpu_s / looks * 1e3:.2f}", f"{cost:.2e}"]],
    )  # fmt: skip


def tests(minutes: float, seed: int, bounds: Bounds, data: list[Any]) -> list[Table]:
    """Known answers: none is wrong where nothing is; faults of a rate an operation are found after so long."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    calm = ask_device(device, seconds=60 * minutes, size=SIDE)
    bounds.check(f"known answers: wrong in {calm.num_asked} clean ones", calm.num_wrong, 0, "answers")
    found = {rate: [_until_found(device, rate, seed + i) for i in range(FAULTS)] for rate in RATES}
    data.append({"asked": calm.num_asked, "operations": calm.operations, "seconds": calm.seconds, "found": found})
    rows = []
    for rate, each in found.items():
        rows.append([
            f"{rate:g}", f"{np.mean([one[0] for one in each]):.4g}", f"{_expected(device, rate):.4g}",
            spread(one[1] for one in each).show(1e3, 1), f"{sum(one[2] for one in each)}",
        ])  # fmt: skip
    measured = Table(
        title=f"Known answers: until a fault was found, {FAULTS} seeded ones a row", rows=rows,
        columns=["rate, an operation", "answers, mean", "by arithmetic", "ms", "flips that were not seen"],
        notes=[f"Clean: {calm.num_wrong} wrong of {calm.num_asked}; 95 % bound {3 / calm.num_asked:.1e} an answer, "
               f"{3 / calm.operations:.1e} an operation."],
    )  # fmt: skip
    a_minute, rows = calm.operations / calm.seconds * 60, []
    for rate in (1e-9, 1e-10, 1e-11, 1e-12, 1e-13):
        cells = [f"{-math.expm1(-a_minute * m * rate):.1%}" for m in (1, 10, 60, 600)]
        rows.append([f"{rate:g}", f"{1 / rate / a_minute:.3g}", *cells])
    predicted = Table(
        title="Known answers: chance of finding a device that is wrong at this rate, by arithmetic", rows=rows,
        columns=["rate, an operation", "minutes to the first, mean", "1 min", "10 min", "1 h", "10 h"],
        notes=[f"{a_minute:.3g} operations in answers that are checked, a minute of this processor's, of side {SIDE}."],
    )  # fmt: skip
    return [measured, predicted]


def _expected(device: torch.device, rate: float) -> float:
    """Answers until the first that a fault of this rate an operation has struck, in the mean over where it begins."""
    right = [math.exp(-rate * each) for each in QuestionsInTurn(device, SIDE).operations.values()]
    survived, mean = 1.0, 0.0
    for chance in right:  # the first round; every later one begins after all of it was right
        mean += survived
        survived *= chance
    return mean / (1.0 - survived)


def _until_found(device: torch.device, rate: float, seed: int) -> tuple[int, float, int]:
    """(answers until the first was found wrong, its seconds, flips that were not seen before it)."""
    draw, struck = random.Random(seed), 0

    def strike(name: str, out: torch.Tensor) -> None:
        nonlocal struck
        if draw.random() < -math.expm1(-rate * asking.operations[name]):
            struck += 1
            flip_bit(out, draw.randrange(out.numel()), draw.randrange(8 * out.element_size()))

    asking, start = QuestionsInTurn(device, SIDE, strike), time.monotonic()
    while True:
        before = struck
        if asking.ask() is not None:
            return asking.num_asked, time.monotonic() - start, before


def _fat_tree(hosts: int, under: int, spines: int) -> tuple[list[list[int]], int]:
    leaves = hosts // under
    paths = []
    for host in range(hosts):
        for spine, step in itertools.product(range(spines), (1, max(2, leaves // 2))):
            other = (host // under + step) % leaves
            mine, theirs = host // under * spines + spine, other * spines + spine
            paths.append([host, hosts + mine, hosts + theirs, other * under + host % under])
    return paths, hosts + leaves * spines


def _rail(hosts: int, rails: int) -> tuple[list[list[int]], int]:
    steps = (1, 3, 7)
    return [
        [a * rails + r, (a + d) % hosts * rails + r] for a in range(hosts) for r in range(rails) for d in steps
    ], hosts * rails


def _ring(hosts: int) -> tuple[list[list[int]], int]:
    return [[(i + j) % hosts for j in range(step)] for i in range(hosts) for step in (1, 2, 3)], hosts


def fabrics_of(hosts: int) -> dict[str, tuple[list[list[int]], int]]:
    """Paths and the number of links, by kind of fabric."""
    return {"fat tree": _fat_tree(hosts, 16, 8), "rail": _rail(hosts, 4), "ring": _ring(hosts)}


def named(paths: list[list[int]], sent: int, lost: list[int], num: int) -> set[int]:
    """The links that are named bad."""
    return {s.link for s in localise_links(paths, [sent] * len(paths), lost, num_links=num).suspects}


def links(seed: int, rounds: int, bounds: Bounds, data: list[Any]) -> Table:
    """Precision and recall on simulated fabrics."""
    rows = []
    worst = {"precision": 1.0, "recall": 1.0}
    for hosts in (64, 512, 4096):
        for name, (paths, num) in fabrics_of(hosts).items():
            for rate, sent in ((0.001, 10_000), (0.001, 2_000), (0.01, 200), (0.1, 20)):
                right = told = there = 0
                start = time.perf_counter()
                for number in range(rounds):
                    draw = np.random.default_rng((seed, hosts, number))
                    count = (1, 3, 10)[number % 3]
                    bad = {int(link) for link in draw.choice(num, count, replace=False)}
                    good = np.full(num, 1 - 1e-5)
                    good[list(bad)] = 1 - rate
                    lost = [int(draw.binomial(sent, 1 - good[path].prod())) for path in paths]
                    found = named(paths, sent, lost, num)
                    right, told, there = right + len(found & bad), told + len(found), there + count
                precision, recall = right / max(told, 1), right / there
                worst["precision"] = min(worst["precision"], precision)
                if rate * sent >= 10:
                    worst["recall"] = min(worst["recall"], recall)
                seconds = (time.perf_counter() - start) / rounds
                rows.append([name, str(hosts), f"{rate:.1%}", str(sent), f"{precision:.3f}", f"{recall:.3f}",
                             f"{seconds:.2f}"])  # fmt: skip
                data.append({"fabric": name, "hosts": hosts, "rate": rate, "precision": precision, "recall": recall})
    bounds.check("links: worst share of named links that are good", 1 - worst["precision"], 0.05, "of links")
    bounds.check("links: worst share of bad links not named, ten losses a path", 1 - worst["recall"], 0.05, "of links")
    return Table(
        title=f"Links: 1, 3 and 10 bad ones, {rounds} draws a row", rows=rows,
        columns=["fabric", "hosts", "loss", "probes a path", "precision", "recall", "s"],
        notes=["Paths are known; healthy links lose 1e-5. Seconds are of one localisation with its simulation."],
    )  # fmt: skip
