"""The target's configurations as real fleets under compressed time: failures are injected with real signals.

    python -m benchmarks target --minutes 5 --slices 12 --mixtures 20/90,60/300,15/1e9 --dir target --out target.json
    outlast plan target-study --measured target.json

Fleets of four configurations, each struck by two classes of failure at drawn times: one replica killed, and all at
once; a mixture is a pair of rates. What a fault costs is learnt from the fleets that ran just before and just after, of
the same configuration; from that and from when a fleet was struck its useful time and its losses are predicted, and
held beside what its journal says. A machine that others use changes from minute to minute: neighbours see the same
of it. With --dir the same command goes on where it was stopped. Flips and lies are not injected here.
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
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from outlast.core import events as ev

__all__ = ["due", "main", "mixtures", "rows_of"]

_EVERY = 20  # steps between two saves where the interval is fixed
_MIN_SAVE_S = 0.5  # where it is chosen, at least
_Shape = tuple[str, int, tuple[str, ...]]  # name, replicas, lines of the run's settings
_CONFIGURATIONS: tuple[_Shape, ...] = (
    ("baseline", 1, (f"checkpoint_every = {_EVERY}",)),
    ("+ redundant gradients", 3, (f"checkpoint_every = {_EVERY}",)),
    ("+ adaptive checkpointing", 3, ()),
    ("+ Byzantine tolerance", 3, ('aggregation = "median"', "f = 1")),
)


class _Ran(NamedTuple):
    """A fleet that has run; strikes: (when, of what kind, how many there were to be killed)."""

    mixture: int
    events: list[Any]
    strikes: list[tuple[float, str, int]]


def _fleet(where: Path, shape: _Shape, rates: dict[str, float], seconds: float, seed: int) -> dict[str, Any]:
    """The events of one fleet that is struck for so long from its first view on, and when it was struck by what."""
    import outlast.examples
    from outlast.prove import Driven

    _, replicas, settings = shape
    where.mkdir(parents=True)
    config = where / "run.toml"
    lines = ("restart_backoff_s = 0.0", f"checkpoint_min_s = {_MIN_SAVE_S}", "max_restarts = 100000", *settings)
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


def _foreseen(shape: _Shape, fleet: _Ran, costs: Any) -> dict[str, float]:
    """What a fleet's journal says, beside what others' costs predict for one that is struck as often."""
    from outlast.errors import ConfigError
    from outlast.observe import accounting
    from outlast.plan._compiled import replace_job
    from outlast.plan.fleet_costs import fleet_job, struck_fleet

    _, replicas, settings = shape
    account = accounting(fleet.events)
    wall_s = account.wall_s - account.idle_s
    strikes = Counter(name for _, name, _ in fleet.strikes)
    lying = int("f = 1" in settings)
    job = fleet_job(costs, strikes, replicas=replicas, wall_s=wall_s, min_s=_MIN_SAVE_S, lying=lying)
    if f"checkpoint_every = {_EVERY}" in settings:
        job = replace_job(job, interval="fixed", interval_s=_EVERY * job.step_s)
    first = next((event for event in fleet.events if isinstance(event, ev.ProgressMade) and event.seconds), None)
    if first is None:
        raise ConfigError("this fleet made no step", remedy="strike it less often, or for longer")
    begin_s = first.committed_at_s - math.fsum(first.seconds.values())
    found = struck_fleet(job, [(max(0.0, at_s - begin_s), name) for at_s, name, _ in fleet.strikes], 400, seed=1)
    ettr = found.ettr()
    return {
        "wall_s": wall_s, "useful_s": account.productive_s, "faults": strikes.total(),
        "losses": sum(isinstance(event, ev.FleetGone) for event in fleet.events),
        "predicted_s": ettr.mean * wall_s, "predicted_losses": float(found.rollbacks.mean()),
        "spread_s": (ettr.run_high - ettr.run_low) / 2 * wall_s,
    }  # fmt: skip


def _row(name: str, told: list[dict[str, float]]) -> dict[str, Any]:
    """Of all fleets of a configuration and mixture together."""
    sums = {key: sum(each[key] for each in told) for key in told[0]}
    wall_s, mean = sums["wall_s"], sums["predicted_s"] / sums["wall_s"]
    half = math.sqrt(sum(each["spread_s"] ** 2 for each in told)) / wall_s
    return {
        "name": name, "fleets": len(told), "faults": int(sums["faults"]), "losses": int(sums["losses"]),
        "predicted_losses": sums["predicted_losses"], "wall_s": wall_s, "ettr": sums["useful_s"] / wall_s,
        "mtbr_s": wall_s / sums["losses"] if sums["losses"] else None, "predicted_ettr": mean,
        "predicted_ettr_runs_95": [max(0.0, mean - half), min(1.0, mean + half)],
        "predicted_mtbr_s": wall_s / sums["predicted_losses"] if sums["predicted_losses"] else None,
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


def due(
    base: Path, num_mixtures: int, slices: int, which: Sequence[int] = range(4)
) -> list[tuple[Path, int, int, int]]:
    """(its file, mixture, configuration, number) of each fleet that has not been run yet: first one of every kind, then
    the second ones, so that whatever has been run is spread over all."""
    wanted = [
        (base / f"{mixture}-{configuration}-{number}.json", mixture, configuration, number)
        for number in range(slices)
        for mixture in range(num_mixtures)
        for configuration in which
    ]
    return [each for each in wanted if not each[0].exists()]


def rows_of(base: Path, mixed: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Of what has been run so far: of each configuration of which two fleets or more have run, each mixture."""
    from outlast.errors import ConfigError
    from outlast.plan.fleet_costs import fleet_costs

    rows = []
    for configuration, shape in enumerate(_CONFIGURATIONS):
        ran = [_read(path) for path in base.glob(f"*-{configuration}-*.json")]
        ran.sort(key=lambda fleet: fleet.events[0].at_s)
        told: dict[int, list[dict[str, float]]] = {}
        for at, fleet in enumerate(ran):
            beside = [ran[i].events for i in (at - 1, at + 1) if 0 <= i < len(ran)]
            with contextlib.suppress(ConfigError):  # one that nothing struck teaches nothing, and has nothing to show
                told.setdefault(fleet.mixture, []).append(_foreseen(shape, fleet, fleet_costs(beside)))
        for mixture, found in sorted(told.items()):
            rates = mixed[mixture]
            name = "" if len(mixed) == 1 else f", {1 / rates['one']:g} s / {1 / rates['all']:g} s"
            rows.append(_row(shape[0] + name, found))
    return rows


def _read(path: Path) -> _Ran:
    told = msgspec.json.decode(path.read_bytes())
    events = msgspec.convert(told["events"], list[ev.AnyEvent])
    return _Ran(mixture=int(path.stem.partition("-")[0]), events=events, strikes=told["strikes"])


def main(argv: list[str] | None = None) -> int:
    """Run the fleets that are missing, print the rows of all, write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="each fleet is struck for so long")
    parser.add_argument("--slices", type=int, default=2, help="fleets of each configuration and mixture")
    parser.add_argument("--only", default="0,1,2,3", help="configurations: 0 baseline, … 3 Byzantine tolerance")
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
    missing = due(base, len(mixed), args.slices, [int(number) for number in args.only.split(",")])
    for done, (path, mixture, configuration, number) in enumerate(missing):
        if time.monotonic() > end:
            print(f"{len(missing) - done} fleets are missing yet: the same command runs them", flush=True)
            break
        with tempfile.TemporaryDirectory(prefix="outlast-target-") as place:
            seed = args.seed + 1000 * number + 10 * mixture + configuration
            shape = _CONFIGURATIONS[configuration]
            told_of = _fleet(Path(place) / "fleet", shape, mixed[mixture], args.minutes * 60, seed)
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(told_of))
        part.rename(path)
        print(f"{path.stem}: {len(told_of['events'])} events; {len(missing) - done - 1} fleets to go", flush=True)
    rows = rows_of(base, mixed)
    for row in rows:
        print(json.dumps(row), flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps({"rows": rows, **told}, indent=1) + "\n")
    return 0
