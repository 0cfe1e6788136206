"""Training on digits with lying replicas, as real processes: fifteen replicas, of which four lie in the exchange.

    python -m benchmarks.byzantine_fleet --out digits.jsonl              iid, alpha 1 and 0.1; every attack; 5 seeds
    python -m benchmarks.byzantine_fleet --out digits.jsonl --report     the table of what is there, nothing is run
    python -m benchmarks.byzantine_fleet --attacks ipm,nan --data iid --seeds 1 --steps 60

The same task as `byzantine_digits.py`, which is one process and no exchange. Every case (a rule, an attack, a seed) is
a network under a rule of its own, and many cases are trained in one run of fifteen processes (`--per-run`); each line
of `--out` is one case, so that a command that was ended goes on where it was. The choice is NNM + trimmed mean
with each row's gradient clipped and momentum for each row (how it was chosen: `byzantine_digits.py`); beside it Bulyan
at f = 3, its limit at 15 rows, with three liars, and the mean. A liar reads the honest rows before it offers its own
(`outlast.runtime._lies`). `none` is the same rule when nobody lies: what an attack costs is counted from there. Exit
code 1 if the choice loses more than 4 points to any attack on iid data or with alpha >= 1, or if the mean survives IPM
or NaN.
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
NUM_ROWS = 15
ATTACKS = (
    "sign_flip", "scaling", "alie", "ipm", "mimic", "label_flip", "random_bits", "stale", "inconsistent", "nan",
    "colluding_groups",
)  # fmt: skip
OPTIMISED, FATAL_TO_MEAN = ("alie", "ipm"), ("ipm", "nan")
RULES: dict[str, tuple[int, dict[str, Any]]] = {  # liars, rule
    "nnm+trimmed_mean": (4, {"rule": "trimmed_mean", "f": 4, "pre": "nnm"}),
    "bulyan": (3, {"rule": "bulyan", "f": 3}),
    "mean": (4, {"rule": "mean"}),
}
CHOICE, KEPT_POINTS, COLLAPSED_POINTS = "nnm+trimmed_mean", 4.0, 30.0
RUN_LIMIT_S = 3600.0


def cases_of(data: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every case of one kind of data: what a line of the output says, without the accuracy."""
    setting = {
        "steps": args.steps, "batch": args.batch, "rate": args.rate, "momentum": args.momentum, "clip": args.clip
    }  # fmt: skip
    found = []
    for rule in args.rules.split(","):
        asked = args.attacks.split(",")
        attacks = [a for a in asked if a in FATAL_TO_MEAN] if rule == "mean" else asked
        for attack in ("none", *attacks):
            found += [{"data": data, "rule": rule, "attack": attack, "seed": s, **setting} for s in range(args.seeds)]
    return found


def train(cases: list[dict[str, Any]], args: argparse.Namespace) -> list[float]:
    """Final accuracy of each case, per cent, from one run of fifteen processes. All cases are of one kind of data."""
    names = [f"case{i}" for i in range(len(cases))]
    lies = []
    for name, case in zip(names, cases, strict=True):
        liars = tuple(f"r{i}" for i in range(RULES[case["rule"]][0]))
        if case["attack"] not in ("none", "label_flip"):
            optimise = case["attack"] in OPTIMISED
            lies.append(Lie(replicas=liars, attack=case["attack"], optimise=optimise, pattern=f"nets.{name}"))
    given = [
        {"name": name, "seed": case["seed"], "rule": RULES[case["rule"]][1],
         "flipped": RULES[case["rule"]][0] if case["attack"] == "label_flip" else 0}
        for name, case in zip(names, cases, strict=True)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="byzantine-") as scratch:
        out, listed = Path(scratch) / "accuracy.json", Path(scratch) / "cases.json"
        listed.write_text(json.dumps(given))
        script = [WORKER, "--cases", str(listed), "--out", str(out), "--rows", str(NUM_ROWS)]
        for key in ("batch", "steps", "rate", "momentum", "clip"):
            script += [f"--{key}", str(getattr(args, key))]
        script += [] if cases[0]["data"] == "iid" else ["--alpha", cases[0]["data"]]
        with Driven(Path(scratch) / "run", ["--replicas", str(NUM_ROWS)], script, lies=lies) as driven:
            _follow(driven, args.steps)
        found: dict[str, float] = json.loads(out.read_text())
    return [found[name] for name in names]


def _follow(driven: Driven, steps: int) -> None:
    told = 0

    def tell() -> None:
        nonlocal told
        if driven.step >= told + max(1, steps // 10):
            told = driven.step
            print(f"    step {told} of {steps}", flush=True)

    driven.finish(RUN_LIMIT_S, tell)


def key(case: dict[str, Any]) -> str:
    return json.dumps({k: v for k, v in case.items() if k != "accuracy"}, sort_keys=True)


def known(path: Path | None) -> dict[str, float]:
    """Accuracy of the cases that the file has; a line cut short is passed over."""
    found = {}
    for line in path.read_text().splitlines() if path is not None and path.exists() else []:
        if line.endswith("}"):
            case = json.loads(line)
            found[key(case)] = case["accuracy"]
    return found


def run_missing(args: argparse.Namespace, done: dict[str, float]) -> None:
    for data in args.data.split(","):
        missing = [case for case in cases_of(data, args) if key(case) not in done]
        for at in range(0, len(missing), args.per_run):
            part, began = missing[at : at + args.per_run], time.monotonic()
            print(f"{data}: {len(part)} cases in one run, {len(missing) - at - len(part)} to come", flush=True)
            lines = [case | {"accuracy": found} for case, found in zip(part, train(part, args), strict=True)]
            done |= {key(case): case["accuracy"] for case in lines}
            if args.out:
                with args.out.open("a") as file:
                    file.writelines(json.dumps(line) + "\n" for line in lines)
            print(f"    took {time.monotonic() - began:.0f} s", flush=True)


def report(args: argparse.Namespace, done: dict[str, float]) -> list[str]:
    """Print the table of the cases asked for; what does not hold."""
    broken = []
    for data in args.data.split(","):
        cells: dict[tuple[str, str], dict[int, float]] = {}
        for case in cases_of(data, args):
            if key(case) in done:
                cells.setdefault((case["rule"], case["attack"]), {})[case["seed"]] = done[key(case)]
        print(f"\n{data}\n| rule | attack | accuracy | lost by the worst seed |\n| --- | --- | --- | --- |")
        for (rule, attack), found in cells.items():
            clean = cells.get((rule, "none"), {})
            lost = max((clean[s] - a for s, a in found.items() if s in clean), default=float("nan"))
            print(f"| {rule}, f = {RULES[rule][0]} | {attack} | {_spread(list(found.values()))} | {lost:.1f} |")
            promised = data == "iid" or float(data) >= 1.0
            if rule == CHOICE and promised and not lost <= KEPT_POINTS:
                broken.append(f"{data}, {rule}, {attack}: {lost:.1f} points lost")
            if rule == "mean" and attack != "none" and not lost >= COLLAPSED_POINTS:
                broken.append(f"{data}, {rule}, {attack}: only {lost:.1f} points lost")
    return broken


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f}, n = {len(values)})"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--clip", type=float, default=0.1)
    parser.add_argument("--rules", default="nnm+trimmed_mean,bulyan,mean")
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--data", default="iid,1,0.1", help="iid, or alphas")
    parser.add_argument("--per-run", type=int, default=70, help="cases in one run of fifteen processes")
    parser.add_argument("--out", type=Path, help="JSON lines, one a case; cases found there are not run again")
    parser.add_argument("--report", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    done = known(args.out)
    if not args.report:
        run_missing(args, done)
    broken = report(args, done)
    print("\n" + ("\n".join(broken) or "as promised"))
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
