"""The target's configurations as real fleets under compressed time: failures are injected with real signals.

    python -m benchmarks target --minutes 5 --slices 12 --mixtures 20/90,60/300,15/1e9 --dir target --out target.json
    outlast plan target-study --measured target.json

Fleets of four configurations, each struck by two classes of failure at drawn times: one replica killed, and all at
once; a mixture is a pair of rates. Fleets with even numbers teach the costs; from these alone the useful time of those
with odd numbers and their time between losses are predicted, and held beside what their journals say. With --dir the
same command goes on where it was stopped. Flips and lies are not injected here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from outlast.core import events as ev

__all__ = ["due", "main", "mixtures", "rows_of"]

_EVERY = 20  # steps between two saves where the interval is fixed
_Shape = tuple[str, int, tuple[str, ...]]  # name, replicas, lines of the run's settings
_CONFIGURATIONS: tuple[_Shape, ...] = (
    ("baseline", 1, (f"checkpoint_every = {_EVERY}",)),
    ("+ redundant gradients", 3, (f"checkpoint_every = {_EVERY}",)),
    ("+ adaptive checkpointing", 3, ()),
    ("+ Byzantine tolerance", 3, ('aggregation = "median"', "f = 1")),
)


def _fleet(where: Path, shape: _Shape, rates: dict[str, float], seconds: float, seed: int) -> dict[str, Any]:
    """The events of one fleet that is struck for so long from its first view on, and when it was struck by what."""
    import outlast.examples
    from outlast.prove import Driven

    _, replicas, settings = shape
    where.mkdir(parents=True)
    config = where / "run.toml"
    lines = ("restart_backoff_s = 0.0", "checkpoint_min_s = 0.5", "max_restarts = 100000", *settings)
    config.write_text("[run]\n" + "\n".join(lines) + "\n")
    script = Path(str(outlast.examples.__file__)).with_name("gpt.py")
    options = ["--config", str(config), "--replicas", str(replicas), "--checkpoint-dir", str(where / "checkpoints")]
    rng, strikes = random.Random(seed), []
    with Driven(where / "run", options, [str(script), "--steps", "100000000"]) as driven:
        driven.until(
            "training began", lambda: any(isinstance(e, ev.ViewFormed) for e in driven.events), 180.0, lambda: None
        )
        end = time.monotonic() + seconds
        due = {name: time.monotonic() + rng.expovariate(rate) for name, rate in rates.items() if rate}
        while time.monotonic() < end:
            name = min(due, key=lambda key: due[key])
            driven.wait(max(0.0, min(due[name], end) - time.monotonic()))
            driven.poll()
            if time.monotonic() < end:
                strikes.append([time.time(), name, _strike(name, driven.events, rng)])
                due[name] = time.monotonic() + rng.expovariate(rates[name])
        events = list(driven.events)
        driven.process.send_signal(signal.SIGTERM)
        driven.process.wait(120)
    return {"strikes": strikes, "events": events}


def _strike(name: str, events: list[Any], rng: random.Random) -> int:
    """Kill one replica, or all; returns how many were there to be killed."""
    live = {e.replica: e.pid for e in events if isinstance(e, ev.ReplicaStarted)}
    gone = {e.replica for e in events if isinstance(e, ev.ReplicaExited)}
    pids = [pid for replica, pid in sorted(live.items()) if replica not in gone]
    for pid in pids if name == "all" else rng.sample(pids, min(1, len(pids))):
        with contextlib.suppress(ProcessLookupError):  # it ended between its last event and this
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def _row(name: str, shape: _Shape, rates: dict[str, float], fleets: list[list[Any]], costs: Any) -> dict[str, Any]:
    """What the journals of some fleets say together, beside what others' costs predict for one of their length."""
    from outlast.observe import accounting
    from outlast.plan import simulate
    from outlast.plan._compiled import replace_job
    from outlast.plan.calibration import fleet_job

    _, replicas, settings = shape
    accounts = [accounting(events) for events in fleets]
    walls = [account.wall_s - account.idle_s for account in accounts]
    losses = sum(isinstance(e, ev.FleetGone) for events in fleets for e in events)
    faults = losses + sum(isinstance(e, ev.Recovery) for events in fleets for e in events)
    masked = {"one": 0.0 if replicas == 1 else 1.0, "all": 0.0}
    days = sum(walls) / len(walls) / 86_400
    job = fleet_job(costs, {k: v * 3600 for k, v in rates.items() if v}, replicas=replicas, days=days, masked=masked)
    if settings and settings[0].startswith("checkpoint_every"):
        job = replace_job(job, interval="fixed", interval_s=_EVERY * job.step_s)
    found = simulate(job, 400, seed=1)
    ettr, expected = found.ettr(), float(found.rollbacks.mean()) * len(fleets)
    spread = 1.0 / math.sqrt(len(fleets))  # of the mean of so many runs
    return {
        "name": name, "fleets": len(fleets), "faults": faults, "wall_s": sum(walls),
        "ettr": sum(account.productive_s for account in accounts) / sum(walls),
        "mtbr_s": sum(walls) / losses if losses else None, "predicted_ettr": ettr.mean,
        "predicted_ettr_runs_95": [
            max(0.0, ettr.mean + (ettr.run_low - ettr.mean) * spread),
            min(1.0, ettr.mean + (ettr.run_high - ettr.mean) * spread),
        ],
        "predicted_mtbr_s": sum(walls) / expected if expected else None,
    }  # fmt: skip


def mixtures(text: str) -> list[dict[str, float]]:
    """From `ONE/ALL,…`: mean seconds between deaths of one replica, and between losses of all."""
    found = []
    for part in text.split(","):
        one_s, _, all_s = part.strip().partition("/")
        try:
            rates = {"one": 1 / float(one_s), "all": 1 / float(all_s)}
        except (ValueError, ZeroDivisionError):
            rates = {}
        if not rates or min(rates.values()) <= 0:
            raise SystemExit(f"--mixtures {text!r}: {part!r} is none; ONE/ALL in seconds, for example 20/90")
        found.append(rates)
    return found


def due(base: Path, num_mixtures: int, slices: int) -> list[tuple[Path, int, int, int]]:
    """(its file, mixture, configuration, number) of each fleet that has not been run yet: first one of every kind, then
    the second ones, so that whatever has been run is spread over all. Even numbers teach costs, odd ones are held
    against them."""
    wanted = [
        (base / f"{mixture}-{configuration}-{number}.json", mixture, configuration, number)
        for number in range(2 * slices)
        for mixture in range(num_mixtures)
        for configuration in range(len(_CONFIGURATIONS))
    ]
    return [each for each in wanted if not each[0].exists()]


def rows_of(base: Path, mixed: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Of what has been run so far: of each configuration and mixture that has a fleet of either kind."""
    from outlast.plan.calibration import calibrate

    rows = []
    for mixture, rates in enumerate(mixed):
        for configuration, shape in enumerate(_CONFIGURATIONS):
            fleets: tuple[list[Any], list[Any]] = ([], [])
            for path in sorted(base.glob(f"{mixture}-{configuration}-*.json")):
                events = msgspec.json.decode(path.read_bytes(), type=list[ev.AnyEvent])
                fleets[int(path.stem.rpartition("-")[2]) % 2].append(events)
            if all(fleets):
                told = "" if len(mixed) == 1 else f", {1 / rates['one']:g} s / {1 / rates['all']:g} s"
                rows.append(_row(shape[0] + told, shape, rates, fleets[1], calibrate(fleets[0])))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run the fleets that are missing, print the rows of all, write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="each fleet is struck for so long")
    parser.add_argument(
        "--slices", type=int, default=1, help="fleets of a configuration and mixture, and for its costs"
    )
    parser.add_argument("--mixtures", default="20/90", help="ONE/ALL,...: mean seconds between deaths of one, of all")
    parser.add_argument("--dir", type=Path, help="keep what each fleet told here, and run only what is missing")
    parser.add_argument("--for-minutes", type=float, default=1e9, help="begin no further fleet after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="")
    args = parser.parse_args(argv)
    mixed, end = mixtures(args.mixtures), time.monotonic() + args.for_minutes * 60
    base = args.dir or Path(tempfile.mkdtemp(prefix="outlast-target-"))
    told = {"mixtures": args.mixtures, "minutes": args.minutes, "seed": args.seed}
    base.mkdir(parents=True, exist_ok=True)
    kept = base / "settings"
    if kept.exists() and json.loads(kept.read_text()) != told:
        raise SystemExit(f"{base} has fleets of {kept.read_text()}; give these again, or another --dir")
    kept.write_text(json.dumps(told))
    missing = due(base, len(mixed), args.slices)
    for done, (path, mixture, configuration, number) in enumerate(missing):
        if time.monotonic() > end:
            print(f"{len(missing) - done} fleets are missing yet: the same command runs them", flush=True)
            break
        with tempfile.TemporaryDirectory(prefix="outlast-target-") as place:
            seed = args.seed + 1000 * number + 10 * mixture + configuration
            shape = _CONFIGURATIONS[configuration]
            events = _fleet(Path(place) / "fleet", shape, mixed[mixture], args.minutes * 60, seed)
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(events))
        part.rename(path)
        print(f"{path.stem}: {len(events)} events; {len(missing) - done - 1} fleets to go", flush=True)
    rows = rows_of(base, mixed)
    for row in rows:
        print(json.dumps(row), flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps({"rows": rows, **told}, indent=1) + "\n")
    return 0
