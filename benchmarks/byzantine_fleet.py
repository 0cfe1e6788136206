"""Training on digits with lying replicas, as real processes: fifteen replicas, of which four lie in the exchange.

    python -m benchmarks.byzantine_fleet                        iid and alpha 1; every attack; 5 seeds
    python -m benchmarks.byzantine_fleet --attacks ipm,nan --data iid --seeds 2 --steps 60

The same task as `byzantine_digits.py`, which is one process and no exchange. The choice is NNM + trimmed mean with
momentum for each row; beside it the mean, with the optimizer's momentum. A liar reads the honest rows before it offers
its own (`outlast.runtime._lies`). `clean` is the same rule when nobody lies. Exit code 1 if the choice loses more than
4 points to any attack, or the mean survives IPM or NaN.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from outlast.prove import Driven
from outlast.runtime._lies import Lie

WORKER = str(Path(__file__).with_name("_byzantine_worker.py"))
NUM_ROWS, NUM_LIARS = 15, 4
ATTACKS = (
    "sign_flip", "scaling", "alie", "ipm", "mimic", "label_flip", "random_bits", "stale", "inconsistent", "nan",
    "colluding_groups",
)  # fmt: skip
OPTIMISED = ("alie", "ipm")
CHOICE = {"aggregation": {"rule": "trimmed_mean", "pre": "nnm"}, "row_momentum": 0.9}
KEPT_POINTS, COLLAPSED_POINTS = 4.0, 30.0


def train(
    attack: str, rule: dict[str, Any], *, rows: int, liars: int, seeds: int, steps: int, alpha: float | None = None
) -> list[float]:
    """Final accuracy, per cent, of each seed's network; 0 where the run ended without one."""
    lying = tuple(f"r{i}" for i in range(liars))
    lies = [Lie(replicas=lying, attack=attack, optimise=attack in OPTIMISED)] if _lies_in_exchange(attack) else []
    with tempfile.TemporaryDirectory(prefix="byzantine-") as scratch:
        out = Path(scratch) / "accuracy.json"
        script = [WORKER, "--seeds", str(seeds), "--rows", str(rows), "--steps", str(steps), "--out", str(out)]
        script += ["--rule", json.dumps(rule | {"f": liars} if rule else {})]
        script += ["--flipped", str(liars if attack == "label_flip" else 0)]
        script += [] if alpha is None else ["--alpha", str(alpha)]
        options = ["--replicas", str(rows)]
        with Driven(Path(scratch) / "run", options, script, lies=lies) as driven:
            driven.finish(1800.0, lambda: None)
        return json.loads(out.read_text()) if out.exists() else [0.0] * seeds


def _lies_in_exchange(attack: str) -> bool:
    return attack not in ("none", "label_flip")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=NUM_ROWS)
    parser.add_argument("--liars", type=int, default=NUM_LIARS)
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--data", default="iid,1", help="iid, or alphas")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    shape = {"rows": args.rows, "liars": args.liars, "seeds": args.seeds, "steps": args.steps}
    records, broken = [], []
    for data in args.data.split(","):
        alpha = None if data == "iid" else float(data)
        for label, rule, attacks in (
            ("nnm+trimmed_mean", CHOICE, args.attacks.split(",")),
            ("mean", {}, [a for a in args.attacks.split(",") if a in ("ipm", "nan")]),
        ):
            clean = train("none", rule, alpha=alpha, **shape)
            print(f"\n{data}: {label}; clean {_spread(clean)}", flush=True)
            for attack in attacks:
                began = time.monotonic()
                found = train(attack, rule, alpha=alpha, **shape)
                lost = max(c - a for c, a in zip(clean, found, strict=True))
                took = f"{time.monotonic() - began:.0f} s"
                print(f"  {attack:<18} {_spread(found)}   worst seed loses {lost:.1f} points ({took})", flush=True)
                records.append({"data": data, "rule": label, "attack": attack, "clean": clean, "accuracy": found})
                if lost < COLLAPSED_POINTS if label == "mean" else lost > KEPT_POINTS:
                    broken.append(f"{data}, {label}, {attack}: {lost:.1f} points lost")
    if args.json:
        args.json.write_text(json.dumps({"setting": shape, "records": records}, indent=1))
    print("\n" + ("\n".join(broken) or "as promised"))
    return int(bool(broken))


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):5.1f} ({min(values):.1f} .. {max(values):.1f})"


if __name__ == "__main__":
    sys.exit(main())
