"""Robust rules against ByzFL's and against the memory floor, in one run.

    python benchmarks/aggregation.py                        n = 16, d = 1e6
    python benchmarks/aggregation.py --sizes 8x1e5,32x1e7   other sizes
    python benchmarks/aggregation.py --no-peer --json out.json

Floor: reading the n d elements once (torch's sum of a contiguous tensor), in turn with every rule's calls, so that both
meet the same machine and neither finds the other's rows in the cache. Times are medians of repeated calls after a
warm-up, in milliseconds, with the best beside; `x floor`, `x ByzFL` are of medians, `x floor` of the floor in turn.
`extra` is the peak of the process's resident memory during a call above what it was before, less the result itself.
ByzFL (pip install --no-deps byzfl==0.0.11) is imported without its own __init__, which needs torchvision.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import platform
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outlast.core.policy.rules_catalogue import largest_f
from outlast.tensors import Rule, make_rule

OURS: list[tuple[str, tuple[str, ...]]] = [
    ("mean", ()), ("median", ()), ("trimmed_mean", ()), ("mean_around_median", ()), ("krum", ()), ("multi_krum", ()),
    ("geometric_median", ()), ("centered_clipping", ()), ("bulyan", ()), ("minimum_diameter", ()),
    ("median", ("nnm",)), ("trimmed_mean", ("nnm",)), ("krum", ("nnm",)), ("multi_krum", ("nnm",)),
    ("geometric_median", ("nnm",)), ("trimmed_mean", ("bucketing",)), ("trimmed_mean", ("clip",)),
    ("trimmed_mean", ("clip", "nnm")),
]  # fmt: skip
PEERS = {
    "mean": lambda b, f: b.Average(), "median": lambda b, f: b.Median(), "trimmed_mean": lambda b, f: b.TrMean(f),
    "mean_around_median": lambda b, f: b.Meamed(f), "krum": lambda b, f: b.Krum(f),
    "multi_krum": lambda b, f: b.MultiKrum(f), "geometric_median": lambda b, f: b.GeometricMedian(),
    "centered_clipping": lambda b, f: b.CenteredClipping(), "minimum_diameter": lambda b, f: b.MDA(f),
}  # fmt: skip
BUDGET_S = 1.0  # for the repeats of one rule


def byzfl() -> Any:
    """ByzFL's aggregators without the package's __init__; None when it is not installed."""
    found = importlib.machinery.PathFinder.find_spec("byzfl")
    if found is None or found.submodule_search_locations is None:
        return None
    package = types.ModuleType("byzfl")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["byzfl"] = package
    return importlib.import_module("byzfl.aggregators")


def milliseconds(call: Callable[[], object]) -> tuple[float, float]:
    """Median and best time of a call, after one to warm up."""
    call()
    times: list[float] = []
    end = time.perf_counter() + BUDGET_S
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 51):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), min(times)


def in_turn(call: Callable[[], object], floor: Callable[[], object]) -> tuple[float, float, float]:
    """Median and best time of a call, and the floor's median, one after the other."""
    call()
    times: list[float] = []
    floors: list[float] = []
    end = time.perf_counter() + BUDGET_S
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 51):
        for kept, each in ((floors, floor), (times, call)):
            start = time.perf_counter()
            each()
            kept.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), min(times), statistics.median(floors)


def extra_bytes(call: Callable[[], torch.Tensor]) -> int:
    """Peak resident memory of a call above what was resident before, less its result."""
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    result = call()
    return max(0, _status("VmHWM") - before - result.numel() * result.element_size())


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return 0


def peer_call(peer: Any, name: str, pre: tuple[str, ...], f: int, stack: torch.Tensor) -> Callable[[], object] | None:
    steps = {"nnm": lambda: peer.NNM(f), "bucketing": lambda: peer.Bucketing(2), "clip": lambda: peer.ARC(f)}
    if peer is None or name not in PEERS:
        return None
    rule, before = PEERS[name](peer, f), [steps[step]() for step in pre]

    def call() -> object:
        rows = stack
        for step in before:
            rows = step(rows)
        return rule(rows)

    return call


def bench(n: int, d: int, f: int, peer: Any, seed: int) -> list[dict[str, Any]]:
    stack = torch.randn(n, d, generator=torch.Generator().manual_seed(seed))
    floor, floor_best = milliseconds(lambda: stack.sum())
    print(f"\nn = {n}, d = {d:.0e}, f = {f}, float32: floor {floor:.2f} ms (best {floor_best:.2f})")
    print(f"{'rule':<34}{'ms':>9}{'best':>9}{'eager':>10}{'x floor':>9}{'extra MB':>10}{'ByzFL ms':>10}{'x ByzFL':>9}")
    rows, found = list(stack), []
    for name, pre in OURS:
        allowed = min(f, largest_f(name, n, pre))
        if allowed < 0:
            continue
        rule = make_rule(name, num_rows=n, f=allowed, pre=pre)
        record = {"n": n, "d": d, "f": allowed, "rule": name, "pre": pre, **time_rule(rule, rows, stack)}
        fits = 30 * stack.numel() * 4 < 18e9 if "nnm" in pre else True  # NNM takes up to 25 times the stack there
        call = peer_call(peer, name, pre, allowed, stack) if fits else None
        record["peer_ms"] = milliseconds(call)[0] if call else None
        found.append(record)
        _print(record, " + ".join([*pre, name]) + (f" (f={allowed})" if allowed != f else ""))
    return found


def time_rule(rule: Rule, rows: list[torch.Tensor], stack: torch.Tensor) -> dict[str, Any]:
    small = len(rows) * rows[0].numel() <= 1 << 24
    eager = milliseconds(lambda: rule.aggregate(rows, compiled=False))[0] if small else None
    rule.prepare()
    ours, best, floor = in_turn(lambda: rule.aggregate(rows), lambda: stack.sum())
    extra = extra_bytes(lambda: rule.aggregate(rows))
    return {"ms": ours, "best_ms": best, "floor_ms": floor, "eager_ms": eager, "extra_bytes": extra}


def _print(record: dict[str, Any], name: str) -> None:
    peer, eager, ours = record["peer_ms"], record["eager_ms"], record["ms"]
    beside = (f"{peer:.0f}", f"{peer / ours:.0f}") if peer else ("-", "-")
    print(
        f"{name:<34}{ours:>9.2f}{record['best_ms']:>9.2f}{f'{eager:.1f}' if eager else '-':>10}"
        f"{ours / record['floor_ms']:>9.2f}{record['extra_bytes'] / 1e6:>10.1f}{beside[0]:>10}{beside[1]:>9}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="16x1e6", help="comma-separated NxD")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    peer = None if options.no_peer else byzfl()
    setting = {
        "machine": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability(), "seed": options.seed,
        "byzfl": "0.0.11" if peer else None,
    }  # fmt: skip
    print(setting)
    records = []
    for size in options.sizes.split(","):
        n, d = size.split("x")
        records += bench(int(n), int(float(d)), int(n) // 4, peer, options.seed)
    if options.json:
        options.json.write_text(json.dumps({"setting": setting, "records": records}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
