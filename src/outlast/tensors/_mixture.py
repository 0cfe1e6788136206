"""Linear mixtures of rows: what a distance rule decides, before anything is added up.

Role: a small, frozen description (which rows, which weights) made once from the whole Gram matrix and then applied to
each slice of the rows, by the eager or the compiled path. Invariant: entries are in the order of the rows, weights of
zero are left out, so that a row with weight zero is never read (it may be non-finite). No tensors here.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Mixture"]


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """`weights` (mixed rows, rows), float64. `rule` is applied to the mixed rows, or none: the first one is the result.

    `rule`: the name, and the f for which its program is made. A mixed row whose weights are all equal is the sum of its
    rows times that weight; otherwise each row is multiplied first. `shared` says in which order rows are summed.
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
    def shared(self) -> tuple[list[tuple[int, int]], list[list[int]]]:
        """Sums of two numbers each, and each mixed row as numbers: a row's own, or num_rows + a sum's place.

        Where several rows of equal weights are mixed, four neighbours are summed first, in order, and then the fours:
        mixtures that hold the same rows of a four share its sum, so that NNM adds about half as often.
        """
        pairs: dict[tuple[int, int], int] = {}
        first = self.weights.shape[1]
        mixed = []
        for indices, _, equal in self._entries:
            if not equal or len(self._entries) == 1:
                mixed.append(indices)
                continue
            fours: dict[int, int] = {}
            for row in indices:
                known = fours.get(row // 4)
                fours[row // 4] = row if known is None else pairs.setdefault((known, row), first + len(pairs))
            mixed.append(list(fours.values()))
        return list(pairs), mixed

    @cached_property
    def compressed(self) -> dict[str, Any]:
        """Both sides of the shared sums and their number; starts, numbers, weights and equal-flags, as C arrays."""
        pairs, mixed = self.shared
        indices = [i for entry in mixed for i in entry]
        weights = [w for entry, (_, own, _) in zip(mixed, self._entries, strict=True) for w in own[: len(entry)]]
        starts = np.cumsum([0] + [len(entry) for entry in mixed]).tolist()
        equal = [int(flag) for _, _, flag in self._entries]
        return {
            "left": (ctypes.c_int32 * max(1, len(pairs)))(*[left for left, _ in pairs]),
            "right": (ctypes.c_int32 * max(1, len(pairs)))(*[right for _, right in pairs]),
            "num_sums": len(pairs),
            "start": (ctypes.c_int32 * len(starts))(*starts),
            "index": (ctypes.c_int32 * max(1, len(indices)))(*indices),
            "weight": (ctypes.c_double * max(1, len(weights)))(*weights),
            "equal": (ctypes.c_int32 * len(equal))(*equal),
        }
