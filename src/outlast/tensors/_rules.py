"""Robust aggregation of n rows: one call for a stack, and rule objects for rows that arrive slice by slice.

Role: bind a rule, the steps in front of it and f to what `_paths.py` can compute, in the order an exchange needs:

    coordinate rules    reduce(rows of a slice)                                     -> the slice's result
    distance rules      gram(rows of a slice) -> all slices' sum -> select -> combine(rows of a slice)

`aggregate` does all of it on one stack. Results do not depend on how the vector was cut (at multiples of 32 Ki
elements), on the number of threads, or on whether the compiled path is there.

Numerics: rows of float32, bfloat16 and float16 are compared in float32 and added in float64; float64 stays float64. The
result is rounded once to float32 and then to the rows' dtype. Distances are those of rows centred on the median of the
first 2 f + 1 rows and rounded to 22 bits of the largest of 128 neighbours. Rows are never written to, nothing carries
a gradient. A non-finite entry counts as +inf (-inf stays) for coordinate rules, and takes its whole row out of a
distance rule; more than f such rows are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outlast.core.policy.rules_catalogue import PRE_STEPS, RULES, check_rule
from outlast.errors import ConfigError, TrainingError
from outlast.tensors import _gram, _native, _paths, _selection
from outlast.tensors._eager import tree_sum
from outlast.tensors._mixture import Mixture
from outlast.tensors._program import Program, center_program, program_for
from outlast.tensors._selection import Matrix

__all__ = ["Rule", "aggregate", "make_rule"]

COMPILE_FROM = 1 << 22  # elements of a stack from which `aggregate` has the compiled path made in the background
_requested: set[Program] = set()


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule for `num_rows` rows of which `f` may lie. Made by `make_rule`, which checks everything."""

    name: str
    num_rows: int
    f: int
    pre: tuple[str, ...] = ()
    m: int | None = None
    bucket_size: int = 2
    seed: int = 0
    radius: float | None = None
    iterations: int = 3
    _fixed: Mixture | None = field(default=None, repr=False)

    @property
    def needs_gram(self) -> bool:
        """Whether distances must be known before anything is added up."""
        return RULES[self.name].family == "distance" or any(PRE_STEPS[step].needs_gram for step in self.pre)

    @property
    def stateful(self) -> bool:
        """Whether the last result is an input of the next (`state`); it is then part of a checkpoint."""
        return RULES[self.name].stateful

    # --- coordinate rules -------------------------------------------------------------------------------------------

    def reduce(self, rows: Sequence[Tensor]) -> Tensor:
        """The result (w,) for rows (w,) of one slice. TrainingError when more than f rows are non-finite in it."""
        result, nonfinite = self.reduce_and_count(rows)
        self.admit_nonfinite(nonfinite)
        return result

    def reduce_and_count(self, rows: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        """The same, with the numbers of the rows that are non-finite here; refusing is left to who sees all slices."""
        if self.needs_gram:
            raise AssertionError(f"{self.name} after {self.pre} needs distances: gram, select, combine")
        _check_rows(rows, self.num_rows)
        out = torch.empty_like(rows[0], memory_format=torch.contiguous_format)
        if self._fixed is None:
            bad = _paths.reduce_rows(self._program(), rows, out)
        else:
            program = self._program()
            bad = _paths.mix(self._fixed, program, program, rows, out)
        return out, _paths.nonfinite_rows(rows) if bad else []

    def admit_nonfinite(self, rows: Sequence[int], what: str = "not finite") -> None:
        """Raise TrainingError when more than f rows are non-finite: the rule's guarantee is then gone."""
        if len(rows) > self.f:
            raise TrainingError(
                f"{len(rows)} of {self.num_rows} rows are {what} (rows {', '.join(map(str, rows))}), "
                f"more than the f = {self.f} that {self.name} tolerates",
                did="the result was refused",
                remedy="skip or repeat the step, or find out why these replicas compute NaN or infinity",
            )

    # --- distance rules ---------------------------------------------------------------------------------------------

    def gram(self, rows: Sequence[Tensor], state: Tensor | None = None) -> Tensor:
        """Gram matrices (blocks, N, N) of a slice that starts at a block boundary, one per 32 Ki elements, float64.

        N is num_rows, plus one row for the origin or the memory where the rule uses it. `state`: the slice of the last
        result. A row that is not finite somewhere has a non-finite entry on the diagonal.
        """
        _check_rows(rows, self.num_rows)
        return _paths.gram_blocks(self._center(), self._all_rows(rows, state))

    def select(self, gram: Tensor) -> Mixture:
        """Which rows to add up, from the whole vector's Gram matrix (N, N). TrainingError as in `reduce`."""
        matrix = _gram.canonical(gram).numpy()
        finite = np.isfinite(np.diagonal(matrix))
        out = [int(i) for i in np.flatnonzero(~finite[: self.num_rows])]
        self.admit_nonfinite(out, "not finite, or too far from the others to measure")
        if self._uses_origin() and not finite[self.num_rows]:
            raise TrainingError(
                f"the rows are too far from zero for `clip` in front of {self.name} to measure their lengths",
                did="the result was refused",
                remedy="skip or repeat the step; gradients of this size mean that training has diverged",
            )
        alive = [int(i) for i in np.flatnonzero(finite[: self.num_rows])]
        beside = [i for i in range(self.num_rows, len(matrix)) if finite[i]]  # a memory of NaN is no memory
        kept = alive + beside
        chosen = self._choose(matrix[np.ix_(kept, kept)], len(alive), self.f - (self.num_rows - len(alive)))
        weights = np.zeros((len(chosen.weights), len(matrix)))
        weights[:, kept] = chosen.weights
        if self._uses_origin():
            weights[:, self.num_rows] = 0.0  # a row of zeros adds nothing
        return Mixture(weights=weights, rule=chosen.rule)

    def combine(self, rows: Sequence[Tensor], mixture: Mixture, state: Tensor | None = None) -> Tensor:
        """The result (w,) for rows (w,) of one slice, by what `select` chose for the whole vector."""
        _check_rows(rows, self.num_rows)
        out = torch.empty_like(rows[0], memory_format=torch.contiguous_format)
        program = None
        if mixture.rule is not None:
            program = program_for(mixture.rule[0], len(mixture.weights), mixture.rule[1])
        _paths.mix(mixture, program, self._center(), self._all_rows(rows, state), out)
        return out

    # --- the whole ---------------------------------------------------------------------------------------------------

    def aggregate(self, rows: Sequence[Tensor], state: Tensor | None = None, *, compiled: bool = True) -> Tensor:
        """The result (d,) for rows (d,). `state`: the last result, for a rule with memory (None at first).

        `compiled=False` stays on the eager path even where the compiled one is there: the same bits, later.
        """
        token = _paths.compiled_path.set(compiled)
        try:
            return self._aggregate(rows, state)
        finally:
            _paths.compiled_path.reset(token)

    def _aggregate(self, rows: Sequence[Tensor], state: Tensor | None) -> Tensor:
        if not self.needs_gram:
            return self.reduce(rows)
        blocks = self.gram(rows, state)
        return self.combine(rows, self.select(tree_sum(blocks)), state)

    def prepare(self, *, wait: bool = True) -> bool:
        """Have the compiled path made (about a second a program, kept in the user's cache); True when it is ready.

        Without a C compiler nothing changes but the time that a call takes. `wait=False` compiles in the background.
        """
        programs = self._programs()
        if wait:
            built = [_native.build(program) for program in programs]
            return all(built)
        fresh = [program for program in programs if program not in _requested]
        _requested.update(fresh)
        if fresh:
            threading.Thread(target=lambda: [_native.build(p) for p in fresh], name="outlast-compile").start()
        return all(_native.library(program) is not None for program in programs)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _program(self) -> Program:
        rows = self.num_rows if self._fixed is None else len(self._fixed.weights)
        return program_for(self.name, rows, self.f)

    def _center(self) -> Program:
        return center_program(min(self.num_rows, 2 * self.f + 1))

    def _programs(self) -> list[Program]:
        if not self.needs_gram:
            return [self._program()]
        programs = [self._center()]
        num_mixed = self.num_rows
        for step in self.pre:
            num_mixed = -(-num_mixed // self.bucket_size) if step == "bucketing" else num_mixed
        if self.name == "bulyan":
            programs.append(program_for("mean_around_median", num_mixed - 2 * self.f, 2 * self.f))
        elif RULES[self.name].family == "coordinate":
            programs.append(program_for(self.name, num_mixed, self.f))
        return programs

    def _uses_origin(self) -> bool:
        return "clip" in self.pre

    def _all_rows(self, rows: Sequence[Tensor], state: Tensor | None) -> list[Tensor | None]:
        beside: list[Tensor | None] = [None] if self._uses_origin() else []
        if self.stateful and state is not None:
            if state.shape != rows[0].shape or state.dtype != rows[0].dtype or state.device != rows[0].device:
                raise ConfigError(f"the memory of {self.name} must be like a row: {_like(rows[0])}, not {_like(state)}")
            beside.append(state)
        return [*rows, *beside]

    def _choose(self, gram: Matrix, n: int, f: int) -> Mixture:
        """Weights over the rows that are alive and those beside them; `f` liars are left among the `n`."""
        points = np.eye(len(gram))[:n]
        for step in self.pre:
            points = self._step(step, points, gram, n, f)
        if RULES[self.name].family == "coordinate":
            return Mixture(weights=points, rule=(self.name, f))
        between = points @ gram @ points.T
        if self.name == "bulyan":
            picked = _selection.bulyan_order(_selection.distances(between), f)
            return Mixture(weights=points[picked], rule=("mean_around_median", 2 * f))
        return Mixture(weights=self._one_point(points, between, gram, n, f)[None])

    def _step(self, step: str, points: Matrix, gram: Matrix, n: int, f: int) -> Matrix:
        if step == "bucketing":
            return np.asarray(_selection.bucketing(len(points), self.bucket_size, self.seed) @ points)
        if step == "nnm":
            squared = _selection.distances(points @ gram @ points.T)
            return np.asarray(_selection.nearest_neighbour_mixing(squared, f) @ points)
        origin = np.eye(len(gram))[n]
        from_origin = points - origin
        lengths = np.sqrt(np.maximum(((from_origin @ gram) * from_origin).sum(axis=1), 0.0))
        return np.asarray(origin + _selection.clip(lengths, f)[:, None] * from_origin)

    def _one_point(self, points: Matrix, between: Matrix, gram: Matrix, n: int, f: int) -> Matrix:
        """The result as weights over all rows."""
        k = len(points)
        if self.name == "geometric_median":
            return np.asarray(_selection.geometric_median(between) @ points)
        if self.name == "centered_clipping":
            return self._clipped(points, gram, n)
        squared = _selection.distances(between)
        if self.name == "minimum_diameter":
            picked = _selection.minimum_diameter(squared, k - f)
        else:
            scores = _selection.krum_scores(squared, k - f - (1 if self.name == "krum_all_honest" else 2))
            picked = _selection.lowest(scores, min(self.m or k - f, k - f) if self.name == "multi_krum" else 1)
        return np.asarray(points[picked].sum(axis=0) / len(picked))

    def _clipped(self, points: Matrix, gram: Matrix, n: int) -> Matrix:
        """Centered clipping from the memory, the last row, or from the geometric median when there is none yet."""
        if len(gram) > n + int(self._uses_origin()):
            points = np.vstack([points, np.eye(len(gram))[-1]])
            start = np.eye(len(points))[-1]
            num_data = len(points) - 1
        else:
            start, num_data = _selection.geometric_median(points @ gram @ points.T), len(points)
        between = points @ gram @ points.T
        return np.asarray(_selection.centered_clipping(between, start, num_data, self.radius, self.iterations) @ points)


def make_rule(
    name: str,
    *,
    num_rows: int,
    f: int,
    pre: str | Sequence[str] = (),
    m: int | None = None,
    bucket_size: int = 2,
    seed: int = 0,
    radius: float | None = None,
    iterations: int = 3,
) -> Rule:
    """The rule `name` for `num_rows` rows of which at most `f` lie, with the steps of `pre` in front, in this order.

    `m`: rows that multi_krum averages (n - f). `bucket_size`, `seed`: of bucketing; the seed draws the groups, so pass
    the step's. `radius`: where centered_clipping cuts (None: the median distance), `iterations`: how often.
    Raises ConfigError, saying the largest f possible, when n and f do not meet the rule's conditions.
    """
    steps = (pre,) if isinstance(pre, str) else tuple(pre or ())
    check_rule(name, num_rows, f, steps, bucket_size=bucket_size)
    if m is not None and (name != "multi_krum" or not 1 <= m <= num_rows - f):
        raise ConfigError(f"m = {m}: only multi_krum takes it, between 1 and n - f = {num_rows - f}")
    if radius is not None and not (0.0 < radius < float("inf")):
        raise ConfigError(f"radius = {radius}: it must be a positive length, or None for the median distance")
    if iterations < 1:
        raise ConfigError(f"iterations = {iterations}: it must be at least 1")
    rule = Rule(
        name=name,
        num_rows=num_rows,
        f=f,
        pre=steps,
        m=m,
        bucket_size=bucket_size,
        seed=seed,
        radius=radius,
        iterations=iterations,
    )
    return rule if rule.needs_gram or not steps else replace(rule, _fixed=_fixed_mixture(rule))


def aggregate(
    stack: Tensor | Sequence[Tensor],
    rule: str = "mean",
    *,
    f: int = 0,
    pre: str | Sequence[str] = (),
    state: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Aggregate a stack (n, d), or n rows (d,), into one vector (d,) of the same dtype on the same device.

    `rule`, `f`, `pre` and further options as in `make_rule`; `state`: the last result, for a rule with memory.
    Raises ConfigError for a bad argument, TrainingError when more than `f` rows are non-finite.
    """
    rows = _rows_of(stack)
    bound = make_rule(rule, num_rows=len(rows), f=f, pre=pre, **options)
    if rows[0].device.type == "cpu" and len(rows) * rows[0].numel() >= COMPILE_FROM:
        bound.prepare(wait=False)
    return bound.aggregate(rows, state)


def _rows_of(stack: Tensor | Sequence[Tensor]) -> list[Tensor]:
    if isinstance(stack, Tensor) and stack.dim() != 2:
        raise ConfigError(f"a stack has two dimensions (rows, elements), not {stack.dim()}")
    if not isinstance(stack, Tensor | Sequence) or isinstance(stack, str):
        raise ConfigError(f"a stack is a tensor (n, d) or n tensors (d,), not a {type(stack).__name__}")
    for place, row in enumerate(stack):
        if not isinstance(row, Tensor):
            raise ConfigError(f"row {place} is a {type(row).__name__}, not a tensor")
        if row.layout != torch.strided or row.device.type == "meta":
            raise ConfigError(f"row {place} holds no plain values", remedy="pass dense tensors: `row.to_dense()`")
    rows = [row.detach() for row in stack]
    if not rows:
        raise ConfigError("there is no row to aggregate")
    return rows


def _fixed_mixture(rule: Rule) -> Mixture:
    """The mixture of steps that need no distances, the same for every slice."""
    weights = np.eye(rule.num_rows)
    for _ in rule.pre:
        weights = _selection.bucketing(len(weights), rule.bucket_size, rule.seed) @ weights
    return Mixture(weights=weights, rule=(rule.name, rule.f))


def _check_rows(rows: Sequence[Tensor], num_rows: int) -> None:
    if len(rows) != num_rows:
        raise ConfigError(f"the rule was made for {num_rows} rows, not {len(rows)}")
    first = rows[0]
    if not first.is_floating_point() or first.dtype.itemsize < 2:
        raise ConfigError(f"rows are float64, float32, bfloat16 or float16, not {first.dtype}")
    for place, row in enumerate(rows):
        if row.dim() != 1 or row.shape != first.shape or row.dtype != first.dtype or row.device != first.device:
            raise ConfigError(f"row {place} is {_like(row)}, row 0 is {_like(first)}: rows must be vectors alike")


def _like(row: Tensor) -> str:
    return f"{tuple(row.shape)} {str(row.dtype).removeprefix('torch.')} on {row.device}"
