"""What a checkpoint costs the training loop: outlast beside its peers and beside what the machine can do.

One run, every contender once a round, the order turned each round, each measurement held back until the machine is
quiet. State: bf16 parameters and fp32 AdamW moments of a GPT, 300 tensors. Reported: seconds blocked (call to return,
and until the state may be overwritten), seconds to durable (fsynced), the largest gap that a loop of short steps saw
while the save went on, seconds to load back in place.

Durable is measured twice, and so is the bare O_DIRECT write that it is held against: alone, with nothing else running,
and beside a training loop that keeps every core busy. The bounds compare like with like; the ratio of the mixed pair,
outlast beside the loop over the bare write alone, is printed too. The bare loops have one transfer in flight, as a
plain loop has; what the disk gives with as many in flight as outlast has is a row of its own.

    python -m benchmarks checkpoint --rounds 3 --out out.json
    python -m benchmarks checkpoint --only outlast,limits --rounds 5
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any

from benchmarks._common import Bounds, Table, alone, environment, options, publish
from benchmarks._savers import MAKERS, Result, gpt_state, leaves


def busy_share(span_s: float = 0.2) -> float:
    def read() -> tuple[int, int]:
        fields = [int(x) for x in pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        return sum(fields), fields[3] + fields[4]

    total, idle = read()
    time.sleep(span_s)
    total2, idle2 = read()
    return 1 - (idle2 - idle) / max(1, total2 - total)


def wait_quiet(limit_s: float, waits: list[float]) -> None:
    """Hold the next measurement back until others leave the processors alone, or the limit is reached."""
    began = time.perf_counter()
    while busy_share() > 0.15 and time.perf_counter() - began < limit_s:
        pass
    os.sync()
    waits.append(time.perf_counter() - began)


def stolen_s() -> float:
    """Processor time that a hypervisor has kept from this machine so far."""
    ticks = int(pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])
    return ticks / os.sysconf("SC_CLK_TCK")


def run_one(contender: Any, waits: list[float], *, load: bool) -> Result:
    contender.save()  # brings memory that lay idle while others had their turn back into reach, as training keeps it
    wait_quiet(5.0, waits)
    stolen = stolen_s()
    result: Result = dict(contender.save())
    result["stolen_s"] = stolen_s() - stolen
    if hasattr(contender, "alone"):
        wait_quiet(5.0, waits)
        result |= contender.alone()
    if load:
        wait_quiet(5.0, waits)
        result["load_s"] = contender.load()
    if hasattr(contender, "hidden"):
        wait_quiet(5.0, waits)
        result |= contender.hidden()
    return result


def split_of_four(state: Any, where: pathlib.Path) -> dict[str, float]:
    """Four replicas of the same state: how many bytes do they stage and write together?"""
    from outlast.checkpoint import CheckpointEngine

    engines = [CheckpointEngine(str(where), replica=r, num_replicas=4, num_slots=1) for r in range(4)]
    handles = [engine.save(1, state) for engine in engines]
    staged = [handle.staged_bytes for handle in handles if handle is not None]
    for handle in handles:
        assert handle is not None
        handle.durable.result()
    for engine in engines:
        engine.close()
    size = sum(t.nbytes for t in leaves(state))
    return {"state_bytes": size, "staged_bytes": sum(staged), "largest_share": max(staged) / size}


def medians_of(rows: dict[str, list[Result]]) -> dict[str, Result]:
    return {name: {key: statistics.median(r[key] for r in results) for key in results[-1]}
            for name, results in rows.items()}  # fmt: skip


def limit_rows(r: Result) -> list[list[str]]:
    rows: list[tuple[Any, ...]] = [
        ("limits: warm copy, bare O_DIRECT write and read", r["memcpy_s"], r["write_s"], r["write_beside_s"],
         r["write_gap_s"], r.get("load_s")),
        ("limits: the same with 2 writes, 4 reads in flight", None, r["write_deep_s"], None, None, r["load_deep_s"]),
        ("the loop with nothing beside it, as long as that write", None, None, None, r["undisturbed_gap_s"], None),
    ]  # fmt: skip
    return [cells(*row) for row in rows]


def cells(name: str, *seconds: float | None) -> list[str]:
    """One row; the fourth number is the gap, shown in milliseconds."""
    texts = ["" if s is None else f"{s:.3f}" for s in seconds]
    if seconds[3] is not None:
        texts[3] = f"{seconds[3] * 1e3:.1f}"
    return [name, *texts]


def tables(medians: dict[str, Result], stolen: dict[str, float], waits: list[float]) -> list[Table]:
    rows = []
    for name, r in medians.items():
        if name == "limits":
            rows += limit_rows(r)
            continue
        row = (r["blocked_s"], r.get("durable_alone_s"), r.get("durable_s"), r.get("gap_s"), r.get("load_s"))
        rows.append(cells(name, *row))
    columns = ["", "blocked, s", "durable alone, s", "durable beside a loop, s", "largest step gap, ms", "load, s"]
    notes = [
        "medians over the rounds; every contender saves twice a round, the second counts; the order turns each round",
        "blocked: until the state may be overwritten, with nothing to hide the copy; durable: fsynced",
        "alone: nothing else runs; beside a loop: one of short steps that keeps every core busy, which sees gaps",
        "loads: outlast reads around the page cache and checks every chunk; the peers' files are warm and unchecked",
        "stolen by the host, most in one save: " + ", ".join(f"{name} {s * 1e3:.0f} ms" for name, s in stolen.items()),
        f"waited {sum(waits):.1f} s in all for a quiet machine, longest {max(waits):.1f} s",
    ]
    if "limits" in medians and "outlast" in medians:
        mixed = medians["outlast"]["durable_s"] / medians["limits"]["write_s"]
        notes.insert(3, f"unlike pair: durable beside the loop / bare write alone = {mixed:.2f} ×")
    return [Table(title="A checkpoint beside its peers", columns=columns, rows=rows, notes=notes)]


def check(medians: dict[str, Result], share: dict[str, float], bounds: Bounds) -> None:
    limits, ours = medians.get("limits"), medians.get("outlast")
    if ours:
        bounds.check("largest step gap during a save", ours["gap_s"] * 1e3, 10, "ms")
        bounds.check("added to a step that is long enough to hide it", ours["added_s"] * 1e3, 5, "ms")
    if limits and ours:
        bounds.check("blocked / warm copy of the same bytes", ours["blocked_s"] / limits["memcpy_s"], 1.2, "×")
        bounds.check("durable / bare direct write, both alone", ours["durable_alone_s"] / limits["write_s"], 1.5, "×")
        beside = ours["durable_s"] / limits["write_beside_s"]
        bounds.check("durable / bare direct write, both beside a training loop", beside, 1.5, "×")
        if "load_s" in ours:
            bounds.check("load, verified / bare direct read", ours["load_s"] / limits["load_s"], 1.2, "×")
    if share:
        total = share["staged_bytes"] / share["state_bytes"]
        bounds.check("bytes that four replicas write / bytes of the state", total, 1.01, "×")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options((__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="comma-separated contenders")
    parser.add_argument("--no-load", action="store_true", help="leave the loads out")
    parser.add_argument("--dir", default=None, help="where to write; default: the temporary directory")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    warnings.simplefilter("ignore")
    names = [n for n in MAKERS if not args.only or n in args.only.split(",")]
    if importlib.util.find_spec("torchsnapshot") is None and "torchsnapshot" in names:
        names.remove("torchsnapshot")
        print("torchsnapshot is not installed: left out", file=sys.stderr)
    machine, bounds = environment(args, ("torch", "safetensors", "torchsnapshot")), Bounds()
    root = pathlib.Path(tempfile.mkdtemp(prefix="outlast-bench-", dir=args.dir))
    waits: list[float] = []
    try:
        state = gpt_state(args.gib, args.seed)
        rows: dict[str, list[Result]] = {name: [] for name in names}
        with alone(args.lock):
            contenders = {name: MAKERS[name](state, root / name) for name in names}
            for contender in contenders.values():
                contender.save()  # first saves start processes and allocate: not counted, for nobody
            for turn in range(args.rounds):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    rows[name].append(run_one(contenders[name], waits, load=not args.no_load))
            for contender in contenders.values():
                contender.close()
            share = split_of_four(state, root / "four") if "outlast" in names else {}
    finally:
        shutil.rmtree(root, ignore_errors=True)
    medians = medians_of(rows)
    check(medians, share, bounds)
    stolen = {name: max(r["stolen_s"] for r in results) for name, results in rows.items()}
    data = {"rounds": rows, "medians": medians, "four_replicas": share, "bytes": sum(t.nbytes for t in leaves(state))}
    return publish("checkpoint", args, machine, tables(medians, stolen, waits), bounds, data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
