"""The target's configurations as real fleets under compressed time: failures are injected with real signals.

    python -m benchmarks target --minutes 10 --out target.json
    outlast plan target-study --measured target.json

Four fleets one after another, each struck by two classes of failure at drawn times: one replica killed, and all at
once. A run of another seed, before them, gives the costs; from these alone each fleet's useful time and time
between losses are predicted, and held beside what its journal says. Flips and lies are not injected here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from outlast.core import events as ev

__all__ = ["main"]

_EVERY = 20  # steps between two saves where the interval is fixed
_Shape = tuple[str, int, tuple[str, ...]]  # name, replicas, lines of the run's settings
_CONFIGURATIONS: tuple[_Shape, ...] = (
    ("baseline", 1, (f"checkpoint_every = {_EVERY}",)),
    ("+ redundant gradients", 3, (f"checkpoint_every = {_EVERY}",)),
    ("+ adaptive checkpointing", 3, ()),
    ("+ Byzantine tolerance", 3, ('aggregation = "median"', "f = 1")),
)


def _fleet(where: Path, shape: _Shape, rates: dict[str, float], seconds: float, seed: int) -> list[Any]:
    """The events of one fleet that is struck for so long from its first view on."""
    import outlast.examples
    from outlast.prove import Driven

    _, replicas, settings = shape
    where.mkdir(parents=True)
    config = where / "run.toml"
    lines = ("restart_backoff_s = 0.0", "checkpoint_min_s = 0.5", "max_restarts = 100000", *settings)
    config.write_text("[run]\n" + "\n".join(lines) + "\n")
    script = Path(str(outlast.examples.__file__)).with_name("gpt.py")
    options = ["--config", str(config), "--replicas", str(replicas), "--checkpoint-dir", str(where / "checkpoints")]
    rng = random.Random(seed)
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
                _strike(name, driven.events, rng)
                due[name] = time.monotonic() + rng.expovariate(rates[name])
        events = list(driven.events)
        driven.process.send_signal(signal.SIGTERM)
        driven.process.wait(120)
    return events


def _strike(name: str, events: list[Any], rng: random.Random) -> None:
    live = {e.replica: e.pid for e in events if isinstance(e, ev.ReplicaStarted)}
    gone = {e.replica for e in events if isinstance(e, ev.ReplicaExited)}
    pids = [pid for replica, pid in sorted(live.items()) if replica not in gone]
    for pid in pids if name == "all" else rng.sample(pids, min(1, len(pids))):
        with contextlib.suppress(ProcessLookupError):  # it ended between its last event and this
            os.kill(pid, signal.SIGKILL)


def _row(shape: _Shape, rates: dict[str, float], events: list[Any], costs: Any) -> dict[str, Any]:
    """What a fleet's journal says beside what another's costs predict."""
    from outlast.observe import accounting
    from outlast.plan import simulate
    from outlast.plan._compiled import replace_job
    from outlast.plan.calibration import fleet_job

    name, replicas, settings = shape
    account = accounting(events)
    wall = account.wall_s - account.idle_s
    losses = sum(isinstance(e, ev.FleetLost) for e in events)
    faults = losses + sum(isinstance(e, ev.Recovery) for e in events)
    masked = {"one": 0.0 if replicas == 1 else 1.0, "all": 0.0}
    job = fleet_job(
        costs, {k: v * 3600 for k, v in rates.items() if v}, replicas=replicas, days=wall / 86_400, masked=masked
    )
    if settings and settings[0].startswith("checkpoint_every"):
        job = replace_job(job, interval="fixed", interval_s=_EVERY * job.step_s)
    found = simulate(job, 400, seed=1)
    expected = float(found.rollbacks.mean())
    return {
        "name": name, "faults": faults, "wall_s": wall, "ettr": account.productive_s / wall,
        "mtbr_s": wall / losses if losses else None, "predicted_ettr": found.ettr().mean,
        "predicted_ettr_runs_95": [found.ettr().run_low, found.ettr().run_high],
        "predicted_mtbr_s": wall / expected if expected else None,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the fleets, print the rows, write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="each fleet is struck for so long")
    parser.add_argument("--one-s", type=float, default=20.0, help="mean seconds between deaths of one replica")
    parser.add_argument("--all-s", type=float, default=90.0, help="mean seconds between losses of all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="")
    args = parser.parse_args(argv)
    from outlast.plan.calibration import calibrate

    base = Path(tempfile.mkdtemp(prefix="outlast-target-"))
    rates, rows = {"one": 1 / args.one_s, "all": 1 / args.all_s}, []
    seconds = args.minutes * 60
    for number, shape in enumerate(_CONFIGURATIONS):
        first = _fleet(base / f"{number}-costs", shape, rates, seconds, args.seed + 1000 + number)
        events = _fleet(base / str(number), shape, rates, seconds, args.seed + number)
        rows.append(_row(shape, rates, events, calibrate([first])))
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        Path(args.out).write_text(
            json.dumps({"rows": rows, "seed": args.seed, "minutes": args.minutes}, indent=1) + "\n"
        )
    return 0
