"""The robust rules by name: `aggregate` with the rule spelt as a function, for reading and for plain scripts.

Each takes a stack (n, d) or n rows (d,) of one float dtype and returns (d,) in the same dtype, with up to f rows
arbitrary or non-finite; ConfigError names the largest f possible, TrainingError refuses more than f non-finite rows.
kappa bounds |result - mean of the honest|^2 by their variance, q = f/(n-2f); the same facts stand in
`outlast.core.policy.RULES`, and a step in front (`pre="nnm"`, "bucketing", "clip") is a keyword of all.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outlast.tensors._rules import aggregate

__all__ = [
    "bulyan", "centered_clipping", "geometric_median", "krum", "krum_all_honest", "mean", "mean_around_median",
    "median", "minimum_diameter", "multi_krum", "trimmed_mean",
]  # fmt: skip

Rows = Tensor | Sequence[Tensor]
Steps = str | Sequence[str]


def mean(stack: Rows) -> Tensor:
    """Arithmetic mean, summed in float64. Breaks down at one lying row. O(n d)."""
    return aggregate(stack, "mean")


def median(stack: Rows, *, f: int, pre: Steps = ()) -> Tensor:
    """Coordinate-wise median, the mean of the middle two for even n (Yin et al. 2018). n > 2f; kappa 4(1+q)^2."""
    return aggregate(stack, "median", f=f, pre=pre)


def trimmed_mean(stack: Rows, *, f: int, pre: Steps = ()) -> Tensor:
    """Coordinate-wise mean without the f least and f largest (Yin et al. 2018). n > 2f; kappa 6q(1+q)."""
    return aggregate(stack, "trimmed_mean", f=f, pre=pre)


def mean_around_median(stack: Rows, *, f: int, pre: Steps = ()) -> Tensor:
    """Coordinate-wise mean of the n-f values nearest to the median (Xie et al. 2018). n > 2f."""
    return aggregate(stack, "mean_around_median", f=f, pre=pre)


def krum(stack: Rows, *, f: int, pre: Steps = ()) -> Tensor:
    """The row nearest to its n-f-2 neighbours (Blanchard et al. 2017). n >= 2f+3; kappa 6(n-f)/(n-2f-1). O(n^2 d)."""
    return aggregate(stack, "krum", f=f, pre=pre)


def krum_all_honest(stack: Rows, *, f: int, pre: Steps = ()) -> Tensor:
    """Krum with n-f-1 neighbours (Allouah et al. 2023). n > 2f; kappa 6(1+q). O(n^2 d)."""
    return aggregate(stack, "krum_all_honest", f=f, pre=pre)


def multi_krum(stack: Rows, *, f: int, m: int | None = None, pre: Steps = ()) -> Tensor:
    """Mean of the m (n-f) rows of best Krum score (Blanchard et al. 2017). n >= 2f+3; kappa as Krum. O(n^2 d)."""
    return aggregate(stack, "multi_krum", f=f, pre=pre, m=m)


def bulyan(stack: Rows, *, f: int, pre: Steps = ()) -> Tensor:
    """Krum picks n-2f rows one by one, then the mean around their median (El Mhamdi et al. 2018). n >= 4f+3."""
    return aggregate(stack, "bulyan", f=f, pre=pre)


def geometric_median(stack: Rows, *, f: int, pre: Steps = ()) -> Tensor:
    """The point of least summed distance, by converged smoothed Weiszfeld (Pillutla et al. 2022). kappa 4(1+q)^2."""
    return aggregate(stack, "geometric_median", f=f, pre=pre)


def centered_clipping(
    stack: Rows,
    *,
    f: int,
    state: Tensor | None = None,
    radius: float | None = None,
    iterations: int = 3,
    pre: Steps = (),
) -> Tensor:
    """Clipping around the last result, `state` (Karimireddy et al. 2021). n > 2f; kappa depends on the memory."""
    return aggregate(stack, "centered_clipping", f=f, pre=pre, state=state, radius=radius, iterations=iterations)


def minimum_diameter(stack: Rows, *, f: int, pre: Steps = ()) -> Tensor:
    """Mean of the n-f rows of least diameter (El Mhamdi et al. 2020). n > 2f, small n; kappa 8f^2/(n-f)."""
    return aggregate(stack, "minimum_diameter", f=f, pre=pre)
