"""Linear mixtures of rows: what a distance rule decides, before anything is added up.

Role: a small, frozen description (which rows, which weights) made once from the whole Gram matrix and then applied to
each slice of the rows, by the eager or the compiled path. Invariant: entries are in the order of the rows, weights of
zero are left out, so that a row with weight zero is never read (it may be non-finite). No tensors here.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

__all__ = ["Mixture"]


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """`weights` (mixed rows, rows), float64. `rule` is applied to the mixed rows, or none: the first one is the result.

    `rule`: the name, and the f for which its program is made. A mixed row whose weights are all equal is the sum of its
    rows times that weight; otherwise each row is multiplied first.
    """

    weights: NDArray[np.float64]
    rule: tuple[str, int] | None = None

    def entries(self) -> list[tuple[list[int], list[float], bool]]:
        """For each mixed row: row numbers in order, their weights, and whether these are all equal."""
        return self._entries

    @cached_property
    def _entries(self) -> list[tuple[list[int], list[float], bool]]:
        found = []
        for row in self.weights:
            used = np.flatnonzero(row)
            values = row[used].tolist()
            found.append((used.tolist(), values, len(set(values)) == 1))
        return found

    @cached_property
    def compressed(self) -> tuple[ctypes.Array[ctypes.c_int32], ctypes.Array[ctypes.c_int32],
                                  ctypes.Array[ctypes.c_double], ctypes.Array[ctypes.c_int32]]:  # fmt: skip
        """Starts, row numbers, weights and equal-flags as C arrays."""
        indices = [i for entry, _, _ in self._entries for i in entry]
        weights = [w for _, entry, _ in self._entries for w in entry]
        starts = np.cumsum([0] + [len(entry) for entry, _, _ in self._entries]).tolist()
        equal = [int(flag) for _, _, flag in self._entries]
        return (
            (ctypes.c_int32 * len(starts))(*starts),
            (ctypes.c_int32 * max(1, len(indices)))(*indices),
            (ctypes.c_double * max(1, len(weights)))(*weights),
            (ctypes.c_int32 * len(equal))(*equal),
        )
