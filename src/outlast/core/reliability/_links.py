"""Which links of a fabric are bad, from what pairs of hosts saw of each other: boolean-free tomography by likelihood.

A probe crosses the links of its path; it is bad (lost, or late) unless it is good on all of them. With theta the
intensity of a link, -log(1 - share of bad), the bad of n probes over a path are about Poisson with mean n times the sum
of theta along it. Bad links are few: each that is added to a common background must raise the log-likelihood by more
than log(number of links / level), the price of having chosen it. NetBouncer (Tan et al., NSDI 2019) states the problem
and solves it by penalised least squares.

Identifiability: links that lie on exactly the same paths cannot be told apart by any estimator, and a link on no path
cannot be judged; both are said. Nothing here knows how paths are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outlast.errors import ConfigError

from .check import nonnegative, probability

__all__ = ["LinkSuspect", "LinkVerdict", "localise_links"]

_RATES = np.geomspace(1e-5, 2.0, 24)
_MOST = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSuspect:
    """A bad link, and those that these probes cannot tell from it. `rate`: share of bad on it, with its 95 % interval;
    `confidence`: that it is bad, after all links were looked at."""

    link: int
    same_as: tuple[int, ...]
    rate: float
    low: float
    high: float
    confidence: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkVerdict:
    """`suspects`, the surest first; `background`: share of bad on any other link; `unseen`: links on no path;
    `ambiguous`: groups of links, of more than one, that lie on the same paths."""

    suspects: tuple[LinkSuspect, ...]
    background: float
    unseen: tuple[int, ...]
    ambiguous: tuple[tuple[int, ...], ...]


def localise_links(
    paths: Sequence[Sequence[int]], sent: ArrayLike, bad: ArrayLike, *, num_links: int, level: float = 0.01
) -> LinkVerdict:
    """From probes over known paths: `sent` and `bad` of each (paths,). `level`: probability of naming any link at all
    where none is bad. ConfigError for what is no set of probes."""
    n, k, error = nonnegative("sent", sent).ravel(), nonnegative("bad", bad).ravel(), float(probability("level", level))
    if not len(paths) == len(n) == len(k):
        raise ConfigError(f"{len(paths)} paths, {len(n)} sent, {len(k)} bad", remedy="one of each a path")
    if np.any(k > n):
        raise ConfigError("more probes were bad than were sent", remedy="bad is a part of sent")
    matrix = _incidence(paths, num_links)
    groups, unseen = _groups(matrix)
    first = np.array([group[0] for group in groups], dtype=np.intp)
    seen = n > 0
    found = _select(matrix[seen][:, first], n[seen], k[seen], error)
    suspects = []
    for place, theta, spread, gain in found.links:
        group = groups[place]
        low, high = max(theta - 1.96 * spread, 0.0), theta + 1.96 * spread
        suspects.append(
            LinkSuspect(
                link=group[0],
                same_as=group[1:],
                rate=-float(np.expm1(-theta)),
                low=-float(np.expm1(-low)),
                high=-float(np.expm1(-high)),
                confidence=max(0.0, 1 - len(groups) * float(np.exp(-min(gain, 700.0)))),
            )
        )
    return LinkVerdict(
        suspects=tuple(sorted(suspects, key=lambda s: (-s.confidence, -s.rate))),
        background=-float(np.expm1(-found.background)),
        unseen=unseen,
        ambiguous=tuple(group for group in groups if len(group) > 1),
    )


def _incidence(paths: Sequence[Sequence[int]], num_links: int) -> Any:
    """Sparse (paths, links): which link is on which path."""
    from scipy import sparse

    lengths = [len(path) for path in paths]
    columns = np.fromiter((link for path in paths for link in path), dtype=np.intp, count=sum(lengths))
    if len(columns) and (columns.min() < 0 or columns.max() >= num_links):
        raise ConfigError(
            f"a path crosses link {int(columns.max() if columns.max() >= num_links else columns.min())}",
            remedy=f"links are numbered from 0 to {num_links - 1}",
        )
    rows = np.repeat(np.arange(len(paths)), lengths)
    made = sparse.csr_matrix((np.ones(len(columns)), (rows, columns)), shape=(len(paths), num_links))
    made.data[:] = 1.0
    return made


def _groups(matrix: Any) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """(links that lie on the same paths, together; links on none)."""
    columns = matrix.tocsc()
    columns.sort_indices()
    same: dict[bytes, list[int]] = {}
    unseen = []
    for link in range(columns.shape[1]):
        rows = columns.indices[columns.indptr[link] : columns.indptr[link + 1]]
        if len(rows):
            same.setdefault(rows.tobytes(), []).append(link)
        else:
            unseen.append(link)
    return [tuple(group) for group in same.values()], tuple(unseen)


@dataclass(slots=True)
class _Found:
    """Columns with their intensity, its standard error and the likelihood that they gained."""

    background: float
    links: list[tuple[int, float, float, float]]


def _select(matrix: Any, n: NDArray[np.float64], k: NDArray[np.float64], level: float) -> _Found:
    """Add the link that explains most, fit all that were added, until none pays its price; then drop what no longer
    does."""
    if not matrix.shape[1] or not len(n):
        return _Found(0.0, [])
    by_link, lengths = matrix.T.tocsr(), np.asarray(matrix.sum(axis=1)).ravel()
    hits = n * -np.log1p(-np.minimum(k / n, 1 - 0.5 / (n + 1)))  # bad probes that overlap on a path are counted in full
    exposure, price = by_link @ n, float(np.log(matrix.shape[1] / level))
    background = _trimmed(n, hits, lengths)
    active: list[int] = []
    theta = np.zeros(0)
    while len(active) < _MOST:
        mean = lengths * background + (matrix[:, active] @ theta if active else 0.0)
        gains = np.max([by_link @ (hits * np.log1p(rate / mean)) - rate * exposure for rate in _RATES], axis=0)
        gains[active] = -np.inf
        best = int(gains.argmax())
        if gains[best] <= price:
            break
        active.append(best)
        background, theta = _fit(matrix, active, n, hits, lengths, background)
        keep = [i for i, gain in enumerate(_worth(matrix, active, theta, n, hits, lengths, background)) if gain > price]
        if len(keep) < len(active):
            if active[-1] in [active[i] for i in keep]:
                active, theta = [active[i] for i in keep], theta[keep]
            else:
                active.pop()
                background, theta = _fit(matrix, active, n, hits, lengths, background)
                break
    worth = _worth(matrix, active, theta, n, hits, lengths, background)
    mean = lengths * background + (matrix[:, active] @ theta if active else 0.0)
    rows = []
    for place, link in enumerate(active):
        on = np.asarray(matrix[:, [link]].todense()).ravel() > 0
        spread = float(1 / np.sqrt(max(float((hits[on] / mean[on] ** 2).sum()), 1e-300)))
        rows.append((link, float(theta[place]), spread, float(worth[place])))
    return _Found(background, rows)


def _trimmed(n: NDArray[np.float64], hits: NDArray[np.float64], lengths: NDArray[np.float64]) -> float:
    """The background's intensity: of the better half of the paths, and never nothing."""
    crossed = n * lengths
    better = np.argsort(hits / crossed)[: max(1, len(n) // 2)]
    return float((hits[better].sum() + 0.5) / crossed[better].sum())


def _fit(
    matrix: Any,
    active: list[int],
    n: NDArray[np.float64],
    hits: NDArray[np.float64],
    lengths: NDArray[np.float64],
    background: float,
) -> tuple[float, NDArray[np.float64]]:
    """Intensities of the background and of some links: expectation and maximisation for Poisson means."""
    part = matrix[:, active]
    exposure, crossed = part.T @ n, float((n * lengths).sum())
    theta = np.full(len(active), 1e-2)
    for _ in range(200):
        share = hits / (lengths * background + part @ theta)
        new = theta * (part.T @ share) / exposure
        background = max(background * float((share * lengths).sum()) / crossed, 1e-9)
        if np.all(np.abs(new - theta) <= 1e-6 * (theta + 1e-9)):
            return background, new
        theta = new
    return background, theta


def _worth(
    matrix: Any,
    active: list[int],
    theta: NDArray[np.float64],
    n: NDArray[np.float64],
    hits: NDArray[np.float64],
    lengths: NDArray[np.float64],
    background: float,
) -> NDArray[np.float64]:
    """What each added link gains in log-likelihood beside all others."""
    if not active:
        return np.zeros(0)
    part = matrix[:, active]
    mean = lengths * background + part @ theta
    gains = []
    for place in range(len(active)):
        on = np.asarray(part[:, [place]].todense()).ravel() > 0
        without = np.maximum(mean[on] - theta[place], 1e-12)
        gains.append(float((hits[on] * np.log(mean[on] / without)).sum() - theta[place] * n[on].sum()))
    return np.array(gains)
