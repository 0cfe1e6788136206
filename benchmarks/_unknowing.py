"""What no policy can avoid: the least waste, over hindsight's, of someone who does not know the mean time of failures.

A job is told a mean time that may be wrong; the truth is one of a few. For any odds of the truths, the policy that
minimises the expected ratio (waste over that of the truth's best fixed interval) bounds every policy's worst ratio
from below. It is found by dynamic programming over (work left, age, failures, sum of ages**shape), the record's
sufficient statistic for a known shape. It is told more than a real policy: the shape exactly, that the mean is one of
these, and after `num` failures which one. Work, saves and ages are cut into cells of one save's cost, in hindsight's
intervals as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Game"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Truth:
    """survival[i]: past i cells of age; lost[i]: of the seconds integrated over it; both of shape (cells,)."""

    survival: NDArray[np.float64]
    lost: NDArray[np.float64]
    cell_s: float

    @classmethod
    def of(cls, shape: float, mean_s: float, cells: int, cell_s: float) -> _Truth:
        scale = mean_s / math.gamma(1 + 1 / shape)
        survival = np.exp(-((np.arange(cells) * cell_s / scale) ** shape))
        lost = np.concatenate([[0.0], np.cumsum((survival[1:] + survival[:-1]) / 2 * cell_s)])
        return cls(survival=survival, lost=lost, cell_s=cell_s)

    def segment(self, age: int, end: NDArray[np.int64] | int) -> NDArray[np.float64]:
        """Seconds lost to a failure between the two ages, of work begun at the first: int (u - age) f(u) du."""
        lost = self.lost[end] - self.lost[age] - (np.asarray(end) - age) * self.cell_s * self.survival[end]
        return np.asarray(lost, dtype=np.float64)

    def known(self, num: int) -> NDArray[np.float64]:
        """Least waste of work of 0 to `num` cells begun at age 0, by someone who knows this truth."""
        table, fresh = np.zeros((num + 1, 2 * num + 2)), np.zeros(num + 1)
        for left in range(1, num + 1):
            length = np.arange(1, left + 1)
            saves = length < left
            for age in range(2 * (num - left) + 1):
                end = age + length + saves
                cost = np.where(saves, self.cell_s, 0.0) + table[left - length, np.minimum(end, 2 * num + 1)]
                through = self.segment(age, end) + self.survival[end] * cost
                if age == 0:
                    fresh[left] = table[left, 0] = (through / self.survival[end]).min()
                else:
                    fails = self.survival[age] - self.survival[end]
                    table[left, age] = ((through + fails * fresh[left]) / self.survival[age]).min()
        return fresh

    def fixed(self, num: int) -> float:
        """Waste of the best fixed interval for `num` cells of work."""
        return min(self._every(num, length) for length in range(1, num + 1))

    def _every(self, num: int, length: int) -> float:
        again: dict[int, float] = {0: 0.0}
        for left in reversed(range(num, 0, -length)):
            age, total, here = 0, 0.0, 1.0
            for rest in range(left, 0, -length):
                saves = rest > length
                end = age + min(length, rest) + saves
                fails = float(self.survival[age] - self.survival[end])
                total += float(self.segment(age, end)) + self.cell_s * saves * float(self.survival[end])
                if rest == left:
                    here -= fails
                else:
                    total += fails * again[rest]
                age = end
            again[left] = total / here
        return again[num]


class Game:
    """`num_cells` of work, each as long as a save (`cost_s`), and failures of `shape` whose mean is one of means_s."""

    def __init__(self, *, shape: float, means_s: Sequence[float], num_cells: int, cost_s: float, num: int = 4) -> None:
        self._shape, self._num_cells, self._cost_s, self._num = shape, num_cells, cost_s, num
        self._truths = [_Truth.of(shape, mean_s, 3 * num_cells + 4, cost_s) for mean_s in means_s]
        self._rhos = np.array([(mean_s / math.gamma(1 + 1 / shape)) ** -shape for mean_s in means_s])
        self._survival = np.array([truth.survival for truth in self._truths])
        self._best = np.array([truth.fixed(num_cells) for truth in self._truths])
        largest = num * (1.5 * num_cells * cost_s) ** shape
        self._sums = np.concatenate([[0.0], np.geomspace(cost_s**shape / 4, largest, 15)])

    def least(self, odds: Sequence[float]) -> tuple[float, list[float]]:
        """The least worst ratio that these odds prove, and the ratio under each truth of the policy that proves it."""
        known = np.array([truth.known(self._num_cells) for truth in self._truths])
        after = np.repeat(known[:, :, None], len(self._sums), 2)
        for seen in reversed(range(self._num)):
            after = self._level(np.asarray(odds), seen, after)
        ratios = after[:, self._num_cells, 0] / self._best
        return float(np.dot(odds, ratios) / sum(odds)), ratios.tolist()

    def _level(self, odds: NDArray[np.float64], seen: int, after: NDArray[np.float64]) -> NDArray[np.float64]:
        """Expected waste (truth, work left, sum) at age 0 with `seen` failures; `after`: the same with one more."""
        cells, sums = self._num_cells, self._sums
        ages = np.arange(self._survival.shape[1] - 1) + 0.5
        fails = self._survival[:, :-1] - self._survival[:, 1:]
        sum_then = sums[None, :] + ((ages * self._cost_s) ** self._shape)[:, None]
        at = np.clip(np.searchsorted(sums, sum_then) - 1, 0, len(sums) - 2)
        part = np.clip((sum_then - sums[at]) / (sums[at + 1] - sums[at]), 0, 1)
        logs = np.log(odds / self._best)[:, None] + seen * np.log(self._rhos)[:, None] - np.outer(self._rhos, sums)
        weights = np.exp(logs - logs.max(0))
        table = np.zeros((len(odds), cells + 1, 2 * cells + 1, len(sums)))
        for left in range(1, cells + 1):
            then = after[:, left][:, at] * (1 - part) + after[:, left][:, at + 1] * part
            falls = np.concatenate([np.zeros_like(then[:, :1]), np.cumsum(fails[:, :, None] * then, 1)], 1)
            for age in range(2 * (cells - left) + 1):
                table[:, left, age] = self._choose(table, weights, falls, left, age)
        return table[:, :, 0]

    def _choose(
        self, table: NDArray[np.float64], weights: NDArray[np.float64], falls: NDArray[np.float64], left: int, age: int
    ) -> NDArray[np.float64]:
        """Waste (truth, sum) of the next save that the weights prefer."""
        length = np.arange(1, left + 1)
        saves = length < left
        end = age + length + saves
        lost = np.array([truth.segment(age, end) for truth in self._truths])
        rest = table[:, left - length, np.minimum(end, table.shape[2] - 1)] * saves[None, :, None]
        goes_on = self._survival[:, end, None] * (np.where(saves, self._cost_s, 0.0)[None, :, None] + rest)
        waste = lost[:, :, None] + falls[:, end] - falls[:, [age]] + goes_on
        best = (weights[:, None, :] * waste).sum(0).argmin(0)
        chosen = np.take_along_axis(waste, best[None, None, :], 1)[:, 0]
        return np.asarray(chosen / self._survival[:, [age]], dtype=np.float64)
