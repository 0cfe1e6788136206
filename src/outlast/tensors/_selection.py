"""From a Gram matrix to weights: what each distance rule, and each step in front of one, decides.

Role: every decision that needs distances is taken here, on a small float64 matrix, once for all slices of the rows.
A point is an affine combination `a` of the rows (its entries sum to one), so distances between points are
(a - b) G (a - b)'. Two rows may stand beside the data: the origin (for lengths) and a memory.

Invariants: ties go to the lower row number; a row whose own entry in G is not finite is out, and one liar fewer is
expected among the rest. G must be centred on a point near the honest rows: entries of far rows then lose nothing of the
near ones. Not here: anything as long as a gradient.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Matrix", "bucketing", "bulyan_order", "centered_clipping", "clip", "distances", "geometric_median", "krum_scores",
    "lowest", "minimum_diameter", "nearest_neighbour_mixing",
]  # fmt: skip

Matrix = NDArray[np.float64]
WEISZFELD_TOLERANCE = 1e-10
WEISZFELD_LIMIT = 2000
SMOOTHING = 1e-7  # of the median distance: keeps weights finite where the median is a row


def distances(gram: Matrix) -> Matrix:
    """Squared distances between the rows of a Gram matrix, (n, n), zero on the diagonal."""
    lengths = np.diagonal(gram)
    squared = np.maximum(lengths[:, None] + lengths[None, :] - 2.0 * gram, 0.0)
    np.fill_diagonal(squared, 0.0)
    return squared


def lowest(scores: Matrix, count: int) -> list[int]:
    """The `count` places with the lowest scores, in order of place; ties go to the lower place."""
    return sorted(np.argsort(scores, kind="stable")[:count].tolist())


def krum_scores(squared: Matrix, num_neighbours: int) -> Matrix:
    """For each row the sum of squared distances to its nearest neighbours (Blanchard et al. 2017, s(i))."""
    n = len(squared)
    others = squared[~np.eye(n, dtype=bool)].reshape(n, n - 1)
    return np.asarray(np.sort(others, axis=1)[:, :num_neighbours].sum(axis=1))


def bulyan_order(squared: Matrix, f: int) -> list[int]:
    """The n - 2 f rows that Krum picks one after the other, each among those left (El Mhamdi et al. 2018, algorithm 1).

    With k rows left a score sums k - f - 2 neighbours, at least one.
    """
    left, picked = list(range(len(squared))), list[int]()
    while len(picked) < len(squared) - 2 * f:
        within = squared[np.ix_(left, left)]
        best = int(np.argmin(krum_scores(within, max(1, len(left) - f - 2))))
        picked.append(left.pop(best))
    return sorted(picked)


def geometric_median(gram: Matrix) -> Matrix:
    """Weights (n,) of the point with the least sum of distances (Pillutla et al. 2022, smoothed Weiszfeld).

    Starts from the reference point that `gram` is centred on, which no minority of rows can carry away, and stops when
    the weights have settled. All lengths are relative to the median distance, so the scale of the rows does not matter.
    """
    lengths = np.sqrt(np.maximum(np.diagonal(gram), 0.0))  # of mixed rows it may round to less than nothing
    scale = float(np.median(lengths))
    if scale == 0.0:
        at_center = (lengths == 0.0).astype(np.float64)
        return np.asarray(at_center / at_center.sum())
    weights = _inverse_weights(lengths, SMOOTHING * scale)
    for _ in range(WEISZFELD_LIMIT):
        fresh = _inverse_weights(np.sqrt(_to_point(gram, weights)), SMOOTHING * scale)
        moved = float(np.abs(fresh - weights).max())
        weights = fresh
        if moved < WEISZFELD_TOLERANCE:
            break
    return weights


def _inverse_weights(lengths: Matrix, smallest: float) -> Matrix:
    inverse = 1.0 / np.sqrt(lengths**2 + smallest**2)
    return np.asarray(inverse / inverse.sum())


def _to_point(gram: Matrix, point: Matrix) -> Matrix:
    """Squared distances of all rows to an affine combination of them."""
    toward = gram @ point
    return np.asarray(np.maximum(np.diagonal(gram) - 2.0 * toward + point @ toward, 0.0))


def centered_clipping(gram: Matrix, start: Matrix, num_data: int, radius: float | None, iterations: int) -> Matrix:
    """Weights over all rows of v <- v + mean over the data of (x_i - v) min(1, radius / |x_i - v|), from `start`.

    Karimireddy et al. 2021, equation (CC). Without a radius each iteration takes the median distance, which a minority
    cannot choose.
    """
    point, unit = start.copy(), np.eye(len(gram))[:num_data]
    for _ in range(iterations):
        length = np.sqrt(_to_point(gram, point))[:num_data]
        allowed = float(np.median(length)) if radius is None else radius
        share = np.minimum(1.0, np.divide(allowed, length, out=np.ones_like(length), where=length > 0.0))
        point = point + (share[:, None] * (unit - point)).sum(axis=0) / num_data
    return point


def minimum_diameter(squared: Matrix, keep: int) -> list[int]:
    """The `keep` rows whose largest mutual distance is least (MDA); the first such set in lexicographic order."""
    best, best_set = np.inf, tuple(range(keep))
    for group in _batches(itertools.combinations(range(len(squared)), keep), 2048):
        sets = np.array(group)
        widest = squared[sets[:, :, None], sets[:, None, :]].max(axis=(1, 2))
        place = int(np.argmin(widest))
        if widest[place] < best:
            best, best_set = float(widest[place]), group[place]
    return list(best_set)


def _batches(sets: Iterator[tuple[int, ...]], size: int) -> Iterator[list[tuple[int, ...]]]:
    while group := list(itertools.islice(sets, size)):
        yield group


def nearest_neighbour_mixing(squared: Matrix, f: int) -> Matrix:
    """Mixing weights (n, n): row i becomes the mean of the n - f rows nearest to it, itself included (NNM)."""
    n = len(squared)
    first = squared.copy()
    np.fill_diagonal(first, -1.0)
    nearest = np.argsort(first, axis=1, kind="stable")[:, : n - f]
    mixing = np.zeros((n, n))
    np.put_along_axis(mixing, nearest, 1.0 / (n - f), axis=1)
    return mixing


def bucketing(num_rows: int, bucket_size: int, seed: int) -> Matrix:
    """Mixing weights (ceil(n / bucket_size), n): means of consecutive groups of a permutation drawn by `seed`."""
    keys = [hashlib.blake2b(f"{seed}:{row}".encode(), digest_size=16).digest() for row in range(num_rows)]
    order = sorted(range(num_rows), key=keys.__getitem__)
    groups = [order[at : at + bucket_size] for at in range(0, num_rows, bucket_size)]
    mixing = np.zeros((len(groups), num_rows))
    for place, group in enumerate(groups):
        mixing[place, group] = 1.0 / len(group)
    return mixing


def clip(lengths: Matrix, f: int) -> Matrix:
    """Factors (n,) that cut the floor(2 f/n (n - f)) longest rows to the length of the next (ARC, algorithm 1)."""
    n = len(lengths)
    longest_kept = float(np.sort(lengths)[n - 1 - 2 * f * (n - f) // n])
    factors: Matrix = np.minimum(1.0, np.divide(longest_kept, lengths, out=np.ones_like(lengths), where=lengths > 0.0))
    return factors
