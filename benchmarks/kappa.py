"""How near a rule comes to its stated coefficient kappa: a search for the worst stack, over n, f, rules and attacks.

    python -m benchmarks.kappa                       10,000 cases
    python -m benchmarks.kappa --cases 1000 --json kappa.json

A case is one stack of n rows under one rule. Its measured kappa is the largest |F(x) - mean(S)|^2 / variance(S) over
*all* sets S of n - f rows: whoever lied, the bound must hold for the others. Half of a rule's cases are drawn (kinds of
honest rows x attacks x factors; n up to 11, f up to its largest); the other half climb: the worst stack so far is
changed in one place or row, and kept if it is worse. Exit code 1 if a stated kappa is ever exceeded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outlast.core.policy import RULES, kappa, largest_f
from outlast.tensors import ATTACKS, aggregate

Stack = NDArray[np.float32]
PRES: tuple[tuple[str, ...], ...] = ((), ("nnm",), ("clip",), ("bucketing",), ("clip", "nnm"))
MOST_ROWS, SLACK = 11, 1e-4  # rows are float32: a measured ratio is off by about 1e-6
HONEST: dict[str, Callable[[np.random.Generator, int, int], NDArray[np.float64]]] = {
    "line": lambda draw, h, d: np.linspace(-1, 1, h)[:, None] * draw.normal(size=(1, d)),
    "corners": lambda draw, h, d: draw.choice([-1.0, 1.0], size=(h, d)),
    "heavy": lambda draw, h, d: draw.standard_cauchy(size=(h, d)),
    "two points": lambda draw, h, d: np.repeat(draw.normal(size=(2, d)), [h // 2, h - h // 2], axis=0),
    "one apart": lambda draw, h, d: np.vstack([np.zeros((h - 1, d)), draw.normal(size=(1, d))]),
    "gauss": lambda draw, h, d: draw.normal(size=(h, d)) + draw.choice([0.0, 3.0]),
}
LIES = ("sign_flip", "scaling", "alie", "ipm", "mimic", "colluding_groups", "direction")


@cache
def sets_of(n: int, size: int) -> torch.Tensor:
    return torch.tensor(list(itertools.combinations(range(n), size)))


def measured(stack: Stack, result: torch.Tensor, num_honest: int) -> float:
    wide = torch.from_numpy(stack).double()
    honest = wide[sets_of(len(stack), num_honest)]
    means = honest.mean(dim=1)
    variances = (honest - means[:, None]).square().sum(dim=2).mean(dim=1)
    errors = (result.double() - means).square().sum(dim=1)
    real = variances > 1e-9 * wide.square().sum()  # below it the ratio is one of roundings
    return float((errors / variances)[real].max()) if bool(real.any()) else 0.0


def drawn(draw: np.random.Generator, n: int, f: int) -> tuple[Stack, str]:
    """Honest rows of one kind under one attack, in any order of rows."""
    kind, attack = str(draw.choice(list(HONEST))), str(draw.choice(LIES))
    honest = HONEST[kind](draw, n - f, int(draw.integers(1, 5)))
    factor = float(10.0 ** draw.uniform(-1, 1.5))
    if f == 0:
        rows = honest
    elif attack == "direction":
        away = honest.std() * factor * draw.normal(size=(1, honest.shape[1]))
        rows = np.vstack([np.repeat(honest.mean(axis=0) + away, f, axis=0), honest])
    else:
        options = {} if attack == "mimic" else {"factor": factor}
        lies = ATTACKS[attack](torch.from_numpy(honest), f, **options)
        rows = np.vstack([lies.numpy(), honest])
    return np.asarray(draw.permutation(rows), dtype=np.float32), f"{kind} / {attack if f else 'nobody'}"


def changed(draw: np.random.Generator, stack: Stack) -> Stack:
    fresh, row = stack.copy(), int(draw.integers(len(stack)))
    how = draw.integers(3)
    if how == 0:
        fresh[row] = fresh[int(draw.integers(len(stack)))]
    elif how == 1:
        fresh[row] += (10.0 ** draw.uniform(-2, 0.5)) * stack.std() * draw.normal(size=stack.shape[1])
    else:
        fresh[row, int(draw.integers(stack.shape[1]))] *= draw.uniform(-2, 2)
    return fresh


def search(rule: str, pre: tuple[str, ...], cases: int, seed: int) -> Iterator[dict[str, Any]]:
    """One record a case."""
    draw = np.random.default_rng([seed, list(RULES).index(rule), PRES.index(pre)])
    shapes = [(n, f) for n in range(3, 15) for f in range(1, largest_f(rule, n, pre) + 1)]
    shapes = [shape for shape in shapes if shape[0] <= max(MOST_ROWS, shapes[0][0])]
    worst: tuple[float, Stack, int, str] | None = None
    for case in range(cases):
        if worst is None or case % 2 == 0:
            n, f = shapes[int(draw.integers(len(shapes)))]
            stack, origin = drawn(draw, n, f)
        else:
            stack, f, origin = changed(draw, worst[1]), worst[2], worst[3]
        stated = kappa(rule, len(stack), f, pre)
        assert stated is not None
        found = measured(stack, aggregate(torch.from_numpy(stack), rule, f=f, pre=pre), len(stack) - f)
        share = found / stated
        if worst is None or share > worst[0]:
            worst = (share, stack, f, origin)
        yield {
            "rule": rule, "pre": pre, "n": len(stack), "f": f, "measured": found, "stated": stated, "share": share,
            "origin": origin,
        }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    pairs = [(rule, pre) for rule, fact in RULES.items() for pre in PRES if fact.kappa is not None and rule != "mean"]
    each, broken, summary = -(-args.cases // len(pairs)), 0, []
    print(f"{len(pairs)} rules x {each} cases\n\n| rule | measured / stated | measured | stated | n, f | began as |")
    print("| --- | --- | --- | --- | --- | --- |")
    for rule, pre in pairs:
        records = list(search(rule, pre, each, args.seed))
        broken += sum(record["measured"] > record["stated"] * (1 + SLACK) for record in records)
        top = max(records, key=lambda record: float(record["share"]))
        summary.append(top | {"cases": len(records)})
        named = " + ".join([*pre, rule])
        figures = f"{top['share']:.3f} | {top['measured']:.3f} | {top['stated']:.3f}"
        print(f"| {named} | {figures} | {top['n']}, {top['f']} | {top['origin']} |", flush=True)
    print(f"\n{each * len(pairs)} cases, {broken} above the stated kappa")
    if args.json:
        args.json.write_text(json.dumps({"cases": each * len(pairs), "seed": args.seed, "worst": summary}, indent=1))
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
