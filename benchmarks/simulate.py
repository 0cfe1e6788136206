"""How fast the planner's simulator is, beside SimPy and heapq versions of the same model in the same run.

    python -m benchmarks.simulate [--json]

Figures: replications a minute of the full model (10,000 accelerators, 30 days) on one thread; seconds of one run of
1,000,000 accelerators; the same reduced model (two classes, one tier, repairs and spares) on all three engines, and
their ETTRs, which must agree; peak memory. The engines differ only in how they carry time.
"""

from __future__ import annotations

import argparse
import heapq
import json
import platform
import resource
import sys
import time
from typing import Any, cast

import numpy as np

from outlast.plan._model import FailureClass, Hardware, Job, Tier
from outlast.plan._simulate import BLOCK, simulate

SEED = 7


def full_model(accelerators: int = 10_000) -> Job:
    """All at once: masking, prediction, silent errors, stragglers, preemption, bursts, repair, three tiers."""
    classes = (
        FailureClass(
            name="hardware", node_mtbf_h=25_568.0, masked=0.5, predicted=0.3, precision=0.8, repair=0.6, severity=1
        ),
        FailureClass(name="software", node_mtbf_h=55_215.0, coverage=0.9),
        FailureClass(name="rack", node_mtbf_h=900_000.0, nodes=8, repair=1.0, severity=2),
        FailureClass(name="silent", node_mtbf_h=450_000.0, silent=True, masked=0.3),
        FailureClass(name="straggler", node_mtbf_h=225_000.0, slow_factor=0.7, slow_s=3600.0),
        FailureClass(name="preemption", node_mtbf_h=450_000.0, predicted=1.0, notice_s=120.0, shape=0.7),
    )
    tiers = (
        Tier(name="peers", write_s=2.0, lag_s=20.0, recovery_s=120.0),
        Tier(name="disk", write_s=10.0, recovery_s=300.0, every=4),
        Tier(name="store", write_s=60.0, recovery_s=900.0, every=16),
    )
    return Job(
        classes=classes,
        accelerators=accelerators,
        days=30.0,
        tiers=tiers,
        spares=20 * accelerators // 10_000,
        min_share=0.9,
        burst_variance=0.3,
        hardware=(Hardware(share=0.8), Hardware(share=0.2, rate=1.5, speed=0.95)),
        balanced=True,
    )


def reduced_model() -> Job:
    """What SimPy and heapq versions run too: two classes, one tier, repairs, spares."""
    classes = (
        FailureClass(
            name="hardware",
            node_mtbf_h=25_568.0,
            detection_s=30.0,
            repair=1.0,
            repair_median_h=20.4,
            repair_mean_h=40.0,
        ),
        FailureClass(name="software", node_mtbf_h=55_215.0, detection_s=30.0),
    )
    tier = Tier(name="store", write_s=60.0, recovery_s=600.0)
    return Job(
        classes=classes, accelerators=10_000, days=30.0, tiers=(tier,), spares=200, interval="fixed", interval_s=3600.0
    )


def heapq_run(job: Job, rng: np.random.Generator) -> tuple[float, int]:
    """(ETTR, events) of one replication of the reduced model on a heap: every write, failure and repair an event."""
    end, tier = job.days * 86400, job.tiers[0]
    rates = [job.fleet_rate_h(c) / 3600 for c in job.classes]
    sigma = [np.sqrt(2 * np.log(c.repair_mean_h / c.repair_median_h)) for c in job.classes]
    heap: list[tuple[float, int, str, int]] = []
    tie = events = epoch = 0
    for k, rate in enumerate(rates):
        heapq.heappush(heap, (rng.exponential(1 / rate), k, "fail", k))
    heapq.heappush(heap, (job.interval_s, 9, "write", 0))
    work = saved = 0.0
    since, spares, training = 0.0, job.spares, True
    tie = 10
    while heap:
        now, _, what, value = heapq.heappop(heap)
        if now >= end:
            break
        events, tie = events + 1, tie + 1
        if what == "fail":
            work, training = saved, False
            epoch += 1
            item = job.classes[value]
            if item.repair and spares:
                spares -= 1
                heapq.heappush(
                    heap, (now + rng.lognormal(np.log(item.repair_median_h * 3600), sigma[value]), tie, "back", 0)
                )
            heapq.heappush(heap, (now + item.detection_s + tier.recovery_s, tie + 100_000, "train", epoch))
            heapq.heappush(heap, (now + rng.exponential(1 / rates[value]), tie + 200_000, "fail", value))
        elif what == "back":
            spares += 1
        elif value == epoch:
            if what == "train":
                training, since = True, now
                heapq.heappush(heap, (now + job.interval_s, tie, "write", epoch))
            elif what == "write":
                work, training = work + job.interval_s, False
                heapq.heappush(heap, (now + tier.write_s, tie, "saved", epoch))
            else:
                saved, training, since = work, True, now
                heapq.heappush(heap, (now + job.interval_s, tie, "write", epoch))
    return (work + (end - since if training else 0.0)) / end, events


def simpy_run(job: Job, rng: np.random.Generator) -> tuple[float, int]:
    """The same in SimPy: a training process that failures interrupt."""
    import simpy

    env, tier = simpy.Environment(), job.tiers[0]
    state = {"work": 0.0, "saved": 0.0, "since": 0.0, "training": False, "spares": job.spares, "events": 0}

    def fail(k: int) -> Any:
        item, rate = job.classes[k], job.fleet_rate_h(job.classes[k]) / 3600
        while True:
            yield env.timeout(rng.exponential(1 / rate))
            state["events"] += 1
            if item.repair and state["spares"]:
                state["spares"] -= 1
                env.process(repair(item))
            training.interrupt(item)

    def repair(item: FailureClass) -> Any:
        sigma = np.sqrt(2 * np.log(item.repair_mean_h / item.repair_median_h))
        yield env.timeout(rng.lognormal(np.log(item.repair_median_h * 3600), sigma))
        state["events"] += 1
        state["spares"] += 1

    def train() -> Any:
        pause = 0.0
        while True:
            try:
                yield env.timeout(pause)
                while True:
                    state["since"], state["training"] = env.now, True
                    yield env.timeout(job.interval_s)
                    state["work"], state["training"] = state["work"] + job.interval_s, False
                    yield env.timeout(tier.write_s)
                    state["saved"] = state["work"]
                    state["events"] += 2
            except simpy.Interrupt as struck:
                state["work"], state["training"] = state["saved"], False
                pause = cast("Any", struck.cause).detection_s + tier.recovery_s

    training = env.process(train())
    for k in range(len(job.classes)):
        env.process(fail(k))
    env.run(until=job.days * 86400)
    rest = env.now - state["since"] if state["training"] else 0.0
    return (state["work"] + rest) / env.now, int(state["events"])


def _timed(run: Any, job: Job, replications: int) -> dict[str, float]:
    rng = np.random.default_rng(SEED)
    start = time.perf_counter()
    results = [run(job, rng) for _ in range(replications)]
    seconds = time.perf_counter() - start
    ratios = [ratio for ratio, _ in results]
    events = sum(count for _, count in results)
    return {
        "replications": replications,
        "seconds": seconds,
        "per_minute": 60 * replications / seconds,
        "ettr": float(np.mean(ratios)),
        "ettr_error": float(np.std(ratios) / np.sqrt(replications)),
        "events_per_s": events / seconds,
    }


def measure(replications: int) -> dict[str, Any]:
    """All figures."""
    simulate(full_model(), 8, SEED)  # imports and first-call costs are not part of the rate
    start = time.perf_counter()
    outcome = simulate(full_model(), replications, SEED)
    seconds = time.perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    million = full_model(1_000_000)
    start = time.perf_counter()
    big = simulate(million, 1, SEED)
    one_s = time.perf_counter() - start
    reduced = reduced_model()
    start = time.perf_counter()
    ours = simulate(reduced, replications, SEED)
    ours_s = time.perf_counter() - start
    ettr = ours.ettr()
    return {
        "full_model": {
            "replications": replications,
            "seconds": seconds,
            "per_minute_one_thread": 60 * replications / seconds,
            "failures_a_run": float(outcome.failures.sum() / replications),
            "ettr": outcome.ettr().mean,
            "peak_memory_bytes": memory,
            "block": BLOCK,
        },
        "million_accelerators": {"seconds": one_s, "failures": int(big.failures.sum()), "ettr": big.ettr().mean},
        "same_model": {
            "outlast": {
                "replications": replications,
                "per_minute": 60 * replications / ours_s,
                "ettr": ettr.mean,
                "ettr_error": (ettr.high - ettr.low) / 3.92,
            },
            "heapq": _timed(heapq_run, reduced, 60),
            "simpy": _timed(simpy_run, reduced, 60),
        },
        "machine": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "cpu": platform.machine(),
            "seed": SEED,
        },
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--replications", type=int, default=20_480)
    args = parser.parse_args(argv)
    found = measure(args.replications)
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    full, big, same = found["full_model"], found["million_accelerators"], found["same_model"]
    print(f"full model, 10,000 accelerators x 30 days, one thread: {full['per_minute_one_thread']:,.0f} runs a minute")
    mib = full["peak_memory_bytes"] / 2**20
    print(f"  ({full['failures_a_run']:.0f} failures a run, ETTR {full['ettr']:.4f}, peak memory {mib:.0f} MiB)")
    print(f"1,000,000 accelerators x 30 days, one run: {big['seconds']:.2f} s, {big['failures']:,} failures")
    for name, row in same.items():
        rate = f"{row['per_minute']:12,.0f} replications a minute"
        print(f"same model, {name:8s} {rate}, ETTR {row['ettr']:.4f} +- {row['ettr_error']:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
