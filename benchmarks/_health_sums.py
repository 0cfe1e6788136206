"""Checked sums: recall by bit, false alarms, time beside unchecked microbatches."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks._common import Bounds, Table, spread
from benchmarks._workload import MODELS, build, loss_of, microbatch, samples
from outlast.health import CheckedSums, ProductChecks
from outlast.runtime.faults.flips import flip_bit

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DTYPES", "Subject", "tables_of", "timed"]

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
KINDS = ("forward", "gradient of inputs", "gradient of weights", "parameter in memory")


class Subject:
    """A model of the workload in one type, its data, and one microbatch's forward and backward."""

    def __init__(self, name: str, dtype: torch.dtype, seed: int) -> None:
        self.model, self.optimizer = build(name, seed)
        self.model.to(dtype)
        self.dtype, self.size, self.data = dtype, MODELS[name].samples, samples(name)
        self.checked = CheckedSums(self.model, ProductChecks())

    def compute(self, number: int, step: int | None) -> list[Tensor]:
        """The gradients of one microbatch; checked if there is a step."""
        images, labels = microbatch(self.data, self.size, number)
        self.model.zero_grad(set_to_none=True)
        if step is None:
            loss_of(self.model, (images.to(self.dtype), labels)).backward()
        else:
            with self.checked.at(step, number):
                loss_of(self.model, (images.to(self.dtype), labels)).backward()
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def order_of(subject: Subject) -> list[str]:
    """The kinds of a microbatch's products, found by shape: a gradient of weights has a parameter's shape."""
    shapes: list[tuple[str, tuple[int, ...]]] = []
    subject.checked.strike = lambda name, out: shapes.append((name, tuple(out.shape))) if out.dim() > 1 else None
    subject.compute(0, 10**6)
    subject.checked.strike = None
    weights = {tuple(p.shape) for p in subject.model.parameters() if p.dim() > 1}
    weights |= {shape[::-1] for shape in weights}
    return [
        "forward" if name == "addmm" else "gradient of weights" if shape in weights else "gradient of inputs"
        for name, shape in shapes
    ]


def recall(subject: Subject, tries: int, seed: int) -> dict[str, dict[int, tuple[int, int, int, float]]]:
    """By kind and bit: (flips, found, final bits equal, largest change not found over the norm of the gradient)."""
    draw = torch.Generator().manual_seed(seed)
    kinds, width = order_of(subject), 8 * next(subject.model.parameters()).element_size()
    clean = [g.clone() for g in subject.compute(1, 10**6 + 1)]
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in clean))
    found: dict[str, dict[int, tuple[int, int, int, float]]] = {}
    step = 10**6 + 2
    for kind in KINDS:
        for bit in range(width):
            hits = equal = 0
            missed = 0.0
            for _ in range(tries):
                step += 1
                grads, seen = _struck(subject, kind, kinds, bit, step, draw)
                same = all(torch.equal(x, y) for x, y in zip(grads, clean, strict=True))
                hits, equal = hits + seen, equal + same
                if not seen:
                    off = sum(
                        float((torch.nan_to_num(x.double() - y.double()) ** 2).sum())
                        for x, y in zip(grads, clean, strict=True)
                    )
                    missed = max(missed, math.sqrt(off) / norm)
            found.setdefault(kind, {})[bit] = (tries, hits, equal, missed)
    return found


def _struck(
    subject: Subject, kind: str, kinds: list[str], bit: int, step: int, draw: torch.Generator
) -> tuple[list[Tensor], bool]:
    """A microbatch with one flip: (gradients, whether something was found)."""
    where = int(torch.randint(10**9, (1,), generator=draw))
    subject.checked.found.clear()
    if kind == "parameter in memory":
        weights = [p for p in subject.model.parameters() if p.dim() > 1]
        weight = weights[where % len(weights)]
        before = weight.detach().clone()
        subject.compute(1, step)
        flip_bit(weight.data, where, bit)
        grads = [g.clone() for g in subject.compute(1, step)]
        weight.data.copy_(before)
        return grads, bool(subject.checked.found)
    places = [place for place, each in enumerate(kinds) if each == kind]
    at, seen = places[where % len(places)], [-1]

    def strike(name: str, out: Tensor) -> None:
        seen[0] += out.dim() > 1
        if out.dim() > 1 and seen[0] == at:
            flip_bit(out, where, bit)
            seen[0] += 10**6  # once

    subject.checked.strike = strike
    grads = [g.clone() for g in subject.compute(1, step)]
    subject.checked.strike = None
    return grads, bool(subject.checked.found)


def timed(subject: Subject, microbatches: int, rounds: int) -> tuple[list[float], list[float]]:
    """Processor seconds of a step (unchecked, checked), in turns; parameters are new in each step."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * rounds):
        step, start = None if number % 2 == 0 else number, time.process_time()
        for leaf in range(microbatches):
            subject.compute(leaf, step)
        if number >= 4:
            times[number % 2].append(time.process_time() - start)
    return times


def alarms(subject: Subject, steps: int, microbatches: int, tell: Callable[[int], None]) -> tuple[int, int, int]:
    """Train: (products checked, doubted, reported)."""
    start = subject.checked.num_checked, subject.checked.num_doubted
    subject.checked.found.clear()
    for step in range(steps):
        for leaf in range(microbatches):
            subject.compute(step * microbatches + leaf, step)
        subject.optimizer.step()
        if step % 500 == 499:
            tell(step + 1)
    done = subject.checked
    return done.num_checked - start[0], done.num_doubted - start[1], len(done.found)


def tables_of(args: Any, bounds: Bounds, data: list[Any]) -> list[Table]:
    """Recall and cost by model and type, cost by rows of a microbatch, and a training in which nothing is wrong."""
    tables = []
    for name in args.models:
        for kind in args.dtypes:
            subject = Subject(name, DTYPES[kind], args.seed)
            found = recall(subject, args.tries, args.seed)
            tables.append(_recall_table(f"{name}, {kind}: flips found, by bit", found))
            data.append({"model": name, "dtype": kind, "recall": found})
            rows = []
            for size in args.rows:
                subject.size = size
                plain, checked = timed(subject, 8, args.rounds)
                cost = spread(checked).median / spread(plain).median - 1
                rows.append([str(size), spread(plain).show(1e3, 1), spread(checked).show(1e3, 1), f"{cost:.1%}"])
                data.append({"model": name, "dtype": kind, "rows": size, "plain": plain, "checked": checked})
            tables.append(Table(
                title=f"{name}, {kind}: processor time of a step of 8 microbatches, one thread", rows=rows,
                columns=["samples a microbatch", "unchecked ms", "checked ms", "over unchecked"],
            ))  # fmt: skip
    if args.steps:
        tables.append(_quiet(args, bounds, data))
    return tables


def _recall_table(title: str, found: dict[str, dict[int, tuple[int, int, int, float]]]) -> Table:
    bits = sorted({bit for rows in found.values() for bit in rows}, reverse=True)
    rows = []
    for kind, by_bit in found.items():
        total = [sum(each) for each in zip(*((n, f, e) for n, f, e, _ in by_bit.values()), strict=True)]
        missed = max(m for *_, m in by_bit.values())
        cells = [f"{by_bit[bit][1]}/{by_bit[bit][0]}" for bit in bits]
        rows.append([kind, *cells, f"{total[1] / total[0]:.0%}", f"{total[2] / total[0]:.0%}", f"{missed:.1e}"])
    columns = ["where", *map(str, bits), "found", "bits of the clean run", "largest missed, of the gradient's norm"]
    return Table(title=title, columns=columns, rows=rows)


def _told(steps: int) -> None:
    print(f"{steps} steps", file=sys.stderr)


def _quiet(args: Any, bounds: Bounds, data: list[Any]) -> Table:
    rows = []
    for kind in args.dtypes:
        subject = Subject(args.quiet_model, DTYPES[kind], args.seed)
        products, doubted, reported = alarms(subject, args.steps, 1, _told)
        bounds.check(f"{kind}: findings in {args.steps} steps without a fault", reported, 0, "findings")
        rows.append([kind, f"{args.steps}", f"{products}", f"{doubted}", f"{reported}", f"{3 / max(products, 1):.1e}"])
        data.append({"dtype": kind, "products": products, "doubted": doubted, "reported": reported})
    return Table(
        title=f"Nothing wrong: {args.quiet_model}", rows=rows,
        columns=["type", "steps", "products", "doubted", "reported", "95 % bound, a product"],
    )  # fmt: skip
