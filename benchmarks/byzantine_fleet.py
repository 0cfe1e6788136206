"""Training on digits with lying replicas, as real processes: fifteen rows, of which four lie in the exchange.

    python -m benchmarks.byzantine_fleet --out digits.jsonl              iid, alpha 1 and 0.1; every attack; 5 seeds
    python -m benchmarks.byzantine_fleet --out digits.jsonl --report     the table of what is there, nothing is run
    python -m benchmarks.byzantine_fleet --attacks ipm,nan --data iid --seeds 1 --steps 60 --processes 15

The same task as `byzantine_digits.py`, which is one process and no exchange. The fifteen rows are dealt to replicas
(`--processes`): four by default, of which one has the four lying rows (for Bulyan: another, which has three), or
fifteen with a row each, of which four lie. Bits do not depend on who has which row, so both train the same networks
(but under `inconsistent`, whose lie depends on who reduces), and four processes do it many times faster on two cores.
Every case (a rule, an attack, a seed) is a network under a rule of its own, and many cases are trained in one run
(`--per-run`); each line of `--out` is one case, so that a command that was ended goes on where it was. The choice is
NNM + trimmed mean with each row's gradient clipped and momentum for each row (how it was chosen:
`byzantine_digits.py`); beside it Bulyan at f = 3, its limit at 15 rows, and the mean. A liar reads the honest rows
before it offers its own (`outlast.runtime.faults.liars`). `none` is the same rule when nobody lies: what an attack
costs is counted from there. ALIE and IPM take the factor of each step that carries the rule furthest from the honest
mean; `ipm@0.5` keeps to one. Exit code 1 if the choice loses more than 4 points to any attack on iid data or with alpha
>= 1 (mean of the seeds; the worst seed is printed beside it), or if the mean survives IPM or NaN. Deadlines are long
enough for a campaign whose processes are all stopped for a while and go on.
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

import numpy as np
from sklearn.datasets import load_digits

from outlast.core.protocol import plan_of
from outlast.prove import Driven
from outlast.runtime.faults.liars import Lie

WORKER = str(Path(__file__).with_name("_byzantine_worker.py"))
NUM_ROWS = 15
ATTACKS = (
    "sign_flip", "scaling", "alie", "ipm", "ipm@0.1", "ipm@0.5", "mimic", "label_flip", "random_bits", "stale",
    "inconsistent", "nan", "colluding_groups",
)  # fmt: skip
OPTIMISED, FATAL_TO_MEAN = ("alie", "ipm"), ("ipm", "nan")
RULES: dict[str, tuple[range, dict[str, Any]]] = {  # lying rows, rule
    "nnm+trimmed_mean": (range(4), {"rule": "trimmed_mean", "f": 4, "pre": "nnm"}),
    "bulyan": (range(12, 15), {"rule": "bulyan", "f": 3}),
    "mean": (range(4), {"rule": "mean"}),
}
CHOICE, KEPT_POINTS, COLLAPSED_POINTS = "nnm+trimmed_mean", 4.0, 30.0
RUN_LIMIT_S = 6 * 3600.0
PATIENT = """[run]
stall_floor_s = 3600.0
formation_s = 3600.0
start_s = 3600.0
outside_s = 36000.0
lease_s = 36000.0
ack_s = 600.0
"""


def liars_of(rule: str, processes: int) -> tuple[str, ...]:
    """The replicas that have the lying rows, and no others."""
    lying = set(RULES[rule][0])
    dealt = plan_of([f"r{i}" for i in range(processes)], 0, NUM_ROWS, NUM_ROWS).leaves
    liars = tuple(name for name, rows in dealt.items() if lying.intersection(rows))
    if {row for name in liars for row in dealt[name]} != lying:
        raise SystemExit(f"with {processes} processes honest rows are with liars; take 4 or 15")
    return liars


def cases_of(data: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every case of one kind of data: what a line of the output says, without the accuracy."""
    setting = {
        "steps": args.steps, "batch": args.batch, "rate": args.rate, "momentum": args.momentum, "clip": args.clip,
        "processes": args.processes,
    }  # fmt: skip
    found = []
    for rule in args.rules.split(","):
        asked = args.attacks.split(",")
        attacks = [a for a in asked if a in FATAL_TO_MEAN] if rule == "mean" else asked
        for attack in ("none", *attacks):
            found += [{"data": data, "rule": rule, "attack": attack, "seed": s, **setting} for s in range(args.seeds)]
    return found


def train(cases: list[dict[str, Any]], args: argparse.Namespace) -> list[float]:
    """Final accuracy of each case, per cent, from one run of all processes. All cases are of one kind of data."""
    names = [f"case{i}" for i in range(len(cases))]
    lies, given = [], []
    for name, case in zip(names, cases, strict=True):
        lying, rule = RULES[case["rule"]]
        given.append({"name": name, "seed": case["seed"], "rule": rule, "flipped": []})
        if case["attack"] == "label_flip":
            given[-1]["flipped"] = list(lying)
        elif case["attack"] != "none":
            liars, optimise = liars_of(case["rule"], args.processes), case["attack"] in OPTIMISED
            attack, _, factor = case["attack"].partition("@")
            fixed = {"factor": float(factor)} if factor else {}
            lies.append(Lie(replicas=liars, attack=attack, options=fixed, optimise=optimise, pattern=f"nets.{name}"))
    with tempfile.TemporaryDirectory(prefix="byzantine-") as scratch:
        out, listed = Path(scratch) / "accuracy.json", Path(scratch) / "cases.json"
        listed.write_text(json.dumps(given))
        digits, patient = Path(scratch) / "digits.npz", Path(scratch) / "patient.toml"
        images, labels = load_digits(return_X_y=True)
        np.savez(digits, images=images, labels=labels)
        patient.write_text(PATIENT)
        script = [WORKER, "--cases", str(listed), "--out", str(out), "--rows", str(NUM_ROWS), "--digits", str(digits)]
        for key in ("batch", "steps", "rate", "momentum", "clip"):
            script += [f"--{key}", str(getattr(args, key))]
        script += [] if cases[0]["data"] == "iid" else ["--alpha", cases[0]["data"]]
        options = ["--replicas", str(args.processes), "--config", str(patient)]
        with Driven(Path(scratch) / "run", options, script, lies=lies) as driven:
            code = _follow(driven, args.steps)
            if code:
                raise SystemExit(f"the fleet ended with {code}: {driven.process.stdout.read()[-2000:]}")  # type: ignore[union-attr]
        found: dict[str, float] = json.loads(out.read_text())
    return [found[name] for name in names]


def _follow(driven: Driven, steps: int) -> int:
    told = 0

    def tell() -> None:
        nonlocal told
        if driven.step >= told + max(1, steps // 10):
            told = driven.step
            print(f"    step {told} of {steps}", flush=True)

    return driven.finish(RUN_LIMIT_S, tell)


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
        print(
            f"\n{data}\n| rule | attack | accuracy | lost | lost by the worst seed |\n| --- | --- | --- | --- | --- |"
        )
        for (rule, attack), found in cells.items():
            clean = cells.get((rule, "none"), {})
            each = [clean[s] - a for s, a in found.items() if s in clean] or [float("nan")]
            lost = statistics.mean(each)
            spread = _spread(list(found.values()))
            print(f"| {rule}, f = {len(RULES[rule][0])} | {attack} | {spread} | {lost:.1f} | {max(each):.1f} |")
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
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=0, help="images a row and step; 0: all of its own")
    parser.add_argument("--rate", type=float, default=80.0)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--clip", type=float, default=0.01)
    parser.add_argument("--processes", type=int, default=4, help="replicas that the fifteen rows are dealt to")
    parser.add_argument("--rules", default="nnm+trimmed_mean,bulyan,mean")
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--data", default="iid,1,0.1", help="iid, or alphas")
    parser.add_argument("--per-run", type=int, default=30, help="cases in one run of all processes")
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
