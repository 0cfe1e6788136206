"""The robust rules as facts: conditions on n and f, breakdown, robustness coefficient, cost, source.

Role: everything about a rule that can be said without a gradient, so that the command line, the planner and the view
admission speak of the same rules as the code that computes them (`outlast.tensors`). `check_rule` is the one place
where n and f are accepted or refused.

Notation: n rows, at most f of them arbitrary. A rule F is (f, kappa)-robust when for every set S of n - f rows
|F(x) - mean(S)|^2 <= kappa * mean over S of |x_i - mean(S)|^2 (Allouah et al. 2023, "Fixing by mixing").
q = f / (n - 2f). Where no published coefficient fits the rule as built, the derivation is in
docs/explanation/robust-aggregation.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from outlast.errors import ConfigError, nearest

__all__ = ["PRE_STEPS", "RULES", "PreFact", "RuleFact", "check_choice", "check_rule", "kappa", "largest_f"]

Family = Literal["coordinate", "distance"]
MDA_MAX_SUBSETS = 50_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleFact:
    """One rule. `largest_f(n)`: the most liars among n rows that its guarantee allows (-1: none possible)."""

    name: str
    title: str
    family: Family
    condition: str
    largest_f: Callable[[int], int] = field(repr=False)
    kappa: Callable[[int, int], float] | None = field(repr=False)
    kappa_text: str
    breakdown: str
    cost: str
    source: str
    options: tuple[str, ...] = ()
    stateful: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PreFact:
    """A step in front of a rule. `needs_gram`: it must see distances before anything is added up."""

    name: str
    title: str
    needs_gram: bool
    condition: str
    kappa_text: str
    cost: str
    source: str
    options: tuple[str, ...] = ()


def _minority(n: int) -> int:
    return (n - 1) // 2


def _q(n: int, f: int) -> float:
    return f / (n - 2 * f)


def _trimmed(n: int, f: int) -> float:
    return 6 * _q(n, f) * (1 + _q(n, f))


def _median(n: int, f: int) -> float:
    return 4 * (1 + _q(n, f)) ** 2


def _around_median(n: int, f: int) -> float:
    return 4 * f / (n - f) * (1 + 2 * (1 + _q(n, f)))


def _krum(n: int, f: int) -> float:
    return 6 * (n - f) / (n - 2 * f - 1)


def _bulyan(n: int, f: int) -> float:
    selected = n - 2 * f
    middle = (n - f) / (-(-selected // 2) - f)
    return (math.sqrt(middle) + math.sqrt((n - f) / (selected - f) * (1 + middle))) ** 2


def _mda_largest(n: int) -> int:
    return max((f for f in range(_minority(n) + 1) if math.comb(n, f) <= MDA_MAX_SUBSETS), default=-1)


_FIXING = "Allouah et al. 2023, Fixing by mixing, table 1"
RULES: dict[str, RuleFact] = {
    fact.name: fact
    for fact in (
        RuleFact(
            name="mean", title="arithmetic mean", family="coordinate", condition="f = 0", largest_f=lambda n: 0,
            kappa=lambda n, f: 0.0, kappa_text="0 (f = 0 only)", breakdown="0: one row moves it anywhere",
            cost="n d", source="the baseline",
        ),
        RuleFact(
            name="median", title="coordinate-wise median", family="coordinate", condition="n > 2 f",
            largest_f=_minority, kappa=_median, kappa_text="4 (1 + q)^2", breakdown="f < n/2",
            cost="d n log^2 n comparisons", source=f"Yin et al. 2018, definition 1; kappa: {_FIXING}",
        ),
        RuleFact(
            name="trimmed_mean", title="coordinate-wise trimmed mean", family="coordinate", condition="n > 2 f",
            largest_f=_minority, kappa=_trimmed, kappa_text="6 q (1 + q)", breakdown="f < n/2",
            cost="d n log^2 n comparisons", source=f"Yin et al. 2018, definition 2; kappa: {_FIXING}",
        ),
        RuleFact(
            name="mean_around_median", title="mean of the n - f values nearest to the median", family="coordinate",
            condition="n > 2 f", largest_f=_minority, kappa=_around_median,
            kappa_text="4 f/(n-f) (1 + 2 (1 + q)), derived", breakdown="f < n/2",
            cost="d (n log^2 n comparisons + n sums)", source="Xie et al. 2018, Generalized Byzantine-tolerant SGD",
        ),
        RuleFact(
            name="krum", title="Krum: the row with the nearest n - f - 2 neighbours", family="distance",
            condition="n >= 2 f + 3", largest_f=lambda n: (n - 3) // 2, kappa=_krum,
            kappa_text="6 (n-f)/(n-2f-1), derived", breakdown="f <= (n-3)/2", cost="d n^2/2 + one copy",
            source="Blanchard et al. 2017, section 4",
        ),
        RuleFact(
            name="krum_all_honest", title="Krum with n - f - 1 neighbours, as many as an honest row surely has",
            family="distance", condition="n > 2 f and n >= f + 2", largest_f=lambda n: min(_minority(n), n - 2),
            kappa=lambda n, f: 6 * (1 + _q(n, f)), kappa_text="6 (1 + q)", breakdown="f < n/2",
            cost="d n^2/2 + one copy", source=_FIXING,
        ),
        RuleFact(
            name="multi_krum", title="mean of the m rows with the best Krum scores", family="distance",
            condition="n >= 2 f + 3, 1 <= m <= n - f", largest_f=lambda n: (n - 3) // 2, kappa=_krum,
            kappa_text="6 (n-f)/(n-2f-1), derived", breakdown="f <= (n-3)/2", cost="d (n^2/2 + m)",
            source="Blanchard et al. 2017, section 4 (m-Krum)", options=("m",),
        ),
        RuleFact(
            name="bulyan", title="iterated Krum, then the mean around the median", family="distance",
            condition="n >= 4 f + 3", largest_f=lambda n: (n - 3) // 4, kappa=_bulyan,
            kappa_text="derived; see the explanation", breakdown="f <= (n-3)/4",
            cost="d (n^2/2 + n log^2 n comparisons)", source="El Mhamdi et al. 2018, section 4",
        ),
        RuleFact(
            name="geometric_median", title="geometric median (smoothed Weiszfeld, converged, scale-free)",
            family="distance", condition="n > 2 f", largest_f=_minority, kappa=_median, kappa_text="4 (1 + q)^2",
            breakdown="f < n/2", cost="d (n^2/2 + n)", source=f"Pillutla et al. 2022, algorithm 2; kappa: {_FIXING}",
        ),
        RuleFact(
            name="centered_clipping", title="centered clipping around the last result", family="distance",
            condition="n > 2 f", largest_f=_minority, kappa=None, kappa_text="none: depends on the memory",
            breakdown="f < n/2 with a learned radius", cost="d (n^2/2 + n)",
            source="Karimireddy et al. 2021, equation (CC)", options=("radius", "iterations"), stateful=True,
        ),
        RuleFact(
            name="minimum_diameter", title="MDA: mean of the n - f rows of least diameter", family="distance",
            condition=f"n > 2 f, C(n, f) <= {MDA_MAX_SUBSETS}", largest_f=_mda_largest,
            kappa=lambda n, f: 8 * f**2 / (n - f), kappa_text="8 f^2/(n-f), derived", breakdown="f < n/2",
            cost="d n^2/2 + C(n, f) n^2", source="El Mhamdi et al. 2020, Genuinely distributed Byzantine ML, section 3",
        ),
    )
}  # fmt: skip

PRE_STEPS: dict[str, PreFact] = {
    fact.name: fact
    for fact in (
        PreFact(
            name="nnm", title="nearest-neighbour mixing: each row becomes the mean of its n - f nearest",
            needs_gram=True, condition="n > 2 f", kappa_text="8 f/(n-f) (kappa + 1)", cost="d (n^2/2 + n (n - f))",
            source="Allouah et al. 2023, Fixing by mixing, lemma 1",
        ),
        PreFact(
            name="bucketing", title="means of random groups of rows", needs_gram=False,
            condition="the rule's own condition at ceil(n / bucket_size) rows",
            kappa_text="(kappa' + 1) (n-f)/(b (n'-f)), b the smallest group, derived", cost="n d",
            source="Karimireddy et al. 2022, algorithm 1", options=("bucket_size", "seed"),
        ),
        PreFact(
            name="clip", title="adaptive clipping: the floor(2 f/n (n-f)) longest rows are cut to the next length",
            needs_gram=True, condition="n > 2 f", kappa_text="kappa + 2 f/(n-2f)", cost="d n^2/2",
            source="Allouah et al. 2025, Adaptive gradient clipping (ARC), theorem 3.2",
        ),
    )
}  # fmt: skip


def largest_f(rule: str, num_rows: int, pre: Sequence[str] = (), *, bucket_size: int = 2) -> int:
    """The most lying rows that the rule with these steps in front allows; -1 when it needs more rows than these."""
    _known(rule, pre)
    rows_left = num_rows
    for step in pre:
        rows_left = -(-rows_left // bucket_size) if step == "bucketing" else rows_left
    return max(-1, min(RULES[rule].largest_f(rows_left), _minority(num_rows) if num_rows else -1))


def check_rule(rule: str, num_rows: int, f: int, pre: Sequence[str] = (), *, bucket_size: int = 2) -> None:
    """Raise ConfigError unless the rule's guarantee holds for f liars among `num_rows` rows; say the largest f."""
    _known(rule, pre)
    if not isinstance(f, int) or isinstance(f, bool):
        raise ConfigError(f"f = {f!r} is no whole number", remedy="how many rows may lie: 0 or more")
    if f < 0 or num_rows < 1:
        raise ConfigError(f"f = {f} and {num_rows} rows: f must be at least 0, and there must be a row")
    if bucket_size < 1:
        raise ConfigError(f"bucket_size = {bucket_size}: it must be at least 1")
    most = largest_f(rule, num_rows, pre, bucket_size=bucket_size)
    if f <= most:
        return
    named = " in front of ".join([" then ".join(pre), rule]) if pre else rule
    if most < 0:
        raise ConfigError(
            f"{named} cannot be used with {num_rows} rows: it needs {RULES[rule].condition}",
            remedy="use more rows, or another rule: `outlast rules` lists their conditions",
        )
    raise ConfigError(
        f"{named} with {num_rows} rows tolerates at most f = {most}, not {f}: it needs {RULES[rule].condition}",
        remedy=f"set f <= {most}, use more rows, or choose another rule: `outlast rules` lists their conditions",
    )


def check_choice(rule: str, num_rows: int, f: int, pre: Sequence[str] = (), *, bucket_size: int = 2) -> None:
    """`check_rule` for a run: a robust rule that tolerates nobody is refused too."""
    check_rule(rule, num_rows, f, pre, bucket_size=bucket_size)
    if f == 0 and rule != "mean":
        most = largest_f(rule, num_rows, pre, bucket_size=bucket_size)
        raise ConfigError(
            f"{rule} with f = 0 tolerates nobody",
            remedy=f"f = 1 to {most} with {num_rows} rows" if most > 0 else f"more rows: {RULES[rule].condition}",
        )


def kappa(rule: str, num_rows: int, f: int, pre: Sequence[str] = (), *, bucket_size: int = 2) -> float | None:
    """The stated robustness coefficient of the rule with these steps in front, None where none is known.

    Raises ConfigError when n and f are refused.
    """
    check_rule(rule, num_rows, f, pre, bucket_size=bucket_size)
    return _kappa(rule, num_rows, f, tuple(pre), bucket_size)


def _kappa(rule: str, n: int, f: int, pre: tuple[str, ...], bucket_size: int) -> float | None:
    if not pre:
        own = RULES[rule].kappa
        return None if own is None else own(n, f)
    if pre[0] == "bucketing":
        buckets = -(-n // bucket_size)
        smallest = n - (buckets - 1) * bucket_size
        inner = _kappa(rule, buckets, f, pre[1:], bucket_size)
        return None if inner is None else (inner + 1) * (n - f) / (smallest * (buckets - f))
    inner = _kappa(rule, n, f, pre[1:], bucket_size)
    if inner is None:
        return None
    return 8 * f / (n - f) * (inner + 1) if pre[0] == "nnm" else inner + 2 * _q(n, f)


def _known(rule: str, pre: Sequence[str]) -> None:
    _one_of(rule, list(RULES), "rule")
    for step in pre:
        _one_of(step, list(PRE_STEPS), "step in front of a rule")


def _one_of(name: str, names: list[str], what: str) -> None:
    if name in names:
        return
    raise ConfigError(f"no {what} {name!r}", remedy=nearest(name, names, both=True))
