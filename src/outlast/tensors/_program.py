"""Coordinate-wise rules as straight-line programs: one description, run eagerly on any device or emitted as C.

Role: say *once* what a coordinate-wise rule computes, operation by operation, so that every way of running it gives the
same bits. A program reads one value of each row, and knows two precisions: `narrow` values in the rows' compute type
(float32 for float32, bfloat16 and float16; float64 for float64), on which only minima and maxima are taken, which are
exact; and `wide` values in float64, on which every sum, difference and quotient is taken, in the order written here.

Invariants: a row's NaN and +inf enter as +inf (they sort last, -inf first), so an order statistic is finite wherever
enough rows are; the result is rounded once, from float64; results are never -0.0 (sums start at +0.0).

Not here: who runs a program (`_eager.py`, `_native.py`), and which rule is allowed for which n and f
(`core/policy/rules_catalogue.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

__all__ = ["COORDINATE_RULES", "Op", "Program", "center_program", "comparators", "program_for"]

Kind = Literal["row", "min", "max", "wide", "const", "add", "sub", "div", "pick"]
COORDINATE_RULES = ("mean", "median", "trimmed_mean", "mean_around_median")


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One operation; its value's number is its place in `Program.ops`.

    row: narrow value of row `const`. min, max: of two narrow values. wide: a narrow value as float64. const: the wide
    constant. add, sub: of two wide values. div: a wide value by the constant. pick: a < b ? c : d, all wide.
    """

    kind: Kind
    args: tuple[int, ...] = ()
    const: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """`ops` in order; `result` is the wide value returned; `low` and `high` bound every row's value (narrow).

    A row is non-finite somewhere exactly when `low` or `high` is not finite there. `result_narrow` means that the
    result is itself a narrow value, returned as it is.
    """

    num_rows: int
    ops: tuple[Op, ...]
    result: int
    low: int
    high: int
    result_narrow: bool = False

    def last_uses(self) -> list[int]:
        """For each value the place of the last operation that reads it (the end of the program when it is kept)."""
        last = list(range(len(self.ops)))
        for place, op in enumerate(self.ops):
            for arg in op.args:
                last[arg] = place
        for kept in (self.result, self.low, self.high):
            last[kept] = len(self.ops)
        return last


class _Builder:
    """Appends operations and drops those that nothing needs."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.ops: list[Op] = []
        self.rows = [self.add("row", const=float(i)) for i in range(num_rows)]

    def add(self, kind: Kind, *args: int, const: float = 0.0) -> int:
        self.ops.append(Op(kind=kind, args=args, const=const))
        return len(self.ops) - 1

    def sorted_rows(self) -> list[int]:
        values = list(self.rows)
        for i, j in comparators(self.num_rows):
            a, b = values[i], values[j]
            values[i], values[j] = self.add("min", a, b), self.add("max", a, b)
        return values

    def extremes(self) -> tuple[int, int]:
        low = high = self.rows[0]
        for row in self.rows[1:]:
            low, high = self.add("min", low, row), self.add("max", high, row)
        return low, high

    def wide_sum(self, values: list[int]) -> int:
        total = self.add("const")
        for value in values:
            total = self.add("add", total, self.add("wide", value))
        return total

    def mean(self, values: list[int]) -> int:
        return self.add("div", self.wide_sum(values), const=float(len(values)))

    def finish(self, result: int, low: int, high: int, *, narrow: bool = False) -> Program:
        needed = {result, low, high}
        for place in range(len(self.ops) - 1, -1, -1):
            if place in needed:
                needed.update(self.ops[place].args)
        number = {old: new for new, old in enumerate(sorted(needed))}
        ops = tuple(
            Op(kind=op.kind, args=tuple(number[a] for a in op.args), const=op.const)
            for place, op in enumerate(self.ops)
            if place in needed
        )
        ends = [number[value] for value in (result, low, high)]
        return Program(num_rows=self.num_rows, ops=ops, result=ends[0], low=ends[1], high=ends[2], result_narrow=narrow)


def comparators(num_rows: int) -> Iterator[tuple[int, int]]:
    """Batcher's merge-exchange network for any number of rows (Knuth, TAOCP 3, 5.2.2, algorithm M)."""
    p = 1
    while p < num_rows:
        k = p
        while k >= 1:
            for j in range(k % p, num_rows - k, 2 * k):
                for i in range(j, min(j + k, num_rows - k)):
                    if i // (2 * p) == (i + k) // (2 * p):
                        yield i, i + k
            k //= 2
        p *= 2


@cache
def program_for(rule: str, num_rows: int, f: int) -> Program:
    """The program of a coordinate-wise rule on `num_rows` rows, f of which may lie. The caller has checked n and f."""
    builder = _Builder(num_rows)
    if rule == "mean":
        return builder.finish(builder.mean(builder.rows), *builder.extremes())
    ordered = builder.sorted_rows()
    if rule == "median":
        middle = ordered[(num_rows - 1) // 2 : num_rows // 2 + 1]
        result = builder.mean(middle)
    elif rule == "trimmed_mean":
        result = builder.mean(ordered[f : num_rows - f])
    elif rule == "mean_around_median":
        result = _mean_around_median(builder, ordered, num_rows - f)
    else:
        raise AssertionError(f"no coordinate-wise rule {rule!r}")
    return builder.finish(result, ordered[0], ordered[-1])


@cache
def center_program(num_rows: int) -> Program:
    """The lower median of the rows: the reference point that Gram matrices are centred on, always one row's value."""
    builder = _Builder(num_rows)
    ordered = builder.sorted_rows()
    return builder.finish(ordered[(num_rows - 1) // 2], ordered[0], ordered[-1], narrow=True)


def _mean_around_median(builder: _Builder, ordered: list[int], keep: int) -> int:
    """Mean of the `keep` values nearest to the median (Xie et al. 2018, "Generalized Byzantine-tolerant SGD").

    In sorted order those values are one window. It starts after every place whose value is further from the median than
    the value `keep` places on; these are the first ones. A tie keeps the lower value. Values far away enter only
    through comparisons, so they may be infinite.
    """
    n = len(ordered)
    median = builder.mean(ordered[(n - 1) // 2 : n // 2 + 1])
    wide = [builder.add("wide", value) for value in ordered]
    zero, one = builder.add("const"), builder.add("const", const=1.0)
    start = zero
    for place in range(n - keep):
        below = builder.add("sub", median, wide[place])
        above = builder.add("sub", wide[place + keep], median)
        start = builder.add("add", start, builder.add("pick", above, below, one, zero))
    end = builder.add("add", start, builder.add("const", const=float(keep)))
    total = zero
    for place, value in enumerate(wide):
        here = builder.add("const", const=float(place))
        before_end = builder.add("pick", here, end, value, zero)
        total = builder.add("add", total, builder.add("pick", here, start, zero, before_end))
    return builder.add("div", total, const=float(keep))
