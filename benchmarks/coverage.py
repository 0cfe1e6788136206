"""How often the 95 % intervals of `plan fit` hold the truth, counted on lives and fleets that were drawn.

Laws: each of the four, by the number of failures that are expected and by what hides the others. "staggered": units
are watched for times of their own, uniform from zero; "one age": all are watched as long. Data with fewer than three
failures are drawn again, since `plan lifetimes` refuses them. Fleets: the machine MTBF and the variance of the weekly
rate, by weeks, failures a week, that variance, and how many machines an incident takes. Logs with fewer than ten
failures are drawn again, since `plan fit` refuses them.

    python -m benchmarks coverage --record
"""

from __future__ import annotations

import itertools
import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks._common import Bounds, Table, environment, options, publish
from outlast.core import reliability as rel
from outlast.plan.traces import Failure, Trace, fleet_intervals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["draw", "main"]

LAWS: dict[str, rel.Lifetime] = {
    "exponential": rel.Exponential(rate=0.5),
    "weibull": rel.Weibull(shape=0.7, scale=3.0),
    "lognormal": rel.LogNormal(mu=1.0, sigma=1.4),
    "gamma": rel.Gamma(shape=0.6, rate=0.2),
}
HIDDEN = (("none", 0.0), ("staggered", 0.25), ("staggered", 0.6), ("one age", 0.5), ("one age", 0.9))
FLEETS = (
    # weeks, failures a week, variance of the weekly rate, machines an incident takes
    (8, 2.5, 0.0, 1.0), (26, 2.5, 0.0, 1.0), (26, 2.5, 0.5, 1.0), (52, 10.0, 0.0, 1.0), (52, 10.0, 0.5, 1.0),
    (52, 10.0, 0.5, 2.0), (26, 10.0, 0.0, 2.0),
)  # fmt: skip
MACHINES = 200
HOURS_A_WEEK = 168.0


def truth(family: str, life: rel.Lifetime) -> dict[str, float]:
    """The law's own parameters and what is read from it."""
    own = {name: float(getattr(life, name)) for name, _ in rel.FAMILIES[family][1]}
    return {**own, "mean": life.mean(), "median": float(life.quantile(0.5)), "p90": float(life.quantile(0.9))}


def _watched_for(life: rel.Lifetime, how: str, share: float) -> float:
    """The age, or the longest, at which watching ends, so that `share` of all lives outlast it."""
    if how == "none":
        return math.inf
    if how == "one age":
        return float(life.quantile(1 - share))
    low, high = 1e-6 * life.mean(), 1e6 * life.mean()
    for _ in range(80):
        middle = math.sqrt(low * high)
        outlasting = float(life.sf((np.arange(2000) + 0.5) / 2000 * middle).mean())
        low, high = (middle, high) if outlasting > share else (low, middle)
    return high


def draw(
    life: rel.Lifetime, num: int, hidden: tuple[str, float], rng: np.random.Generator
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.bool_]]]:
    """Data sets of (durations, whether each ended in a failure), `num` failures expected and three there."""
    how, share = hidden
    rows, longest = round(num / (1 - share)), _watched_for(life, how, share)
    while True:
        lives = np.maximum(life.sample(rng, rows), 1e-12)
        ends = rng.uniform(0, longest, rows) if how == "staggered" else np.full(rows, longest)
        if (seen := lives <= ends).sum() >= 3:
            yield np.minimum(lives, ends), seen


def fleet(weeks: int, a_week: float, variance: float, together: float, rng: np.random.Generator) -> Trace:
    """A log of machines that are all alike."""
    rates = rng.gamma(1 / variance, a_week * variance, weeks) if variance else np.full(weeks, a_week)
    times = [
        at + minutes / 1000
        for week, rate in enumerate(rates)
        for at in rng.uniform(0, HOURS_A_WEEK, rng.poisson(rate / together)) + week * HOURS_A_WEEK
        for minutes in range(1 + rng.poisson(together - 1))
    ]
    failures = tuple(
        Failure(down_h=float(t), up_h=float(t) + 0.1, node=f"n{rng.integers(MACHINES)}", kind="x")
        for t in sorted(times)
    )
    return Trace(name="drawn", hours=weeks * HOURS_A_WEEK + 1, num_nodes=MACHINES, failures=failures)


def count_laws(args: Any, bounds: Bounds, raw: dict[str, Any]) -> Iterator[Table]:
    for family, life in LAWS.items():
        if args.only not in family:
            continue
        real, rows = truth(family, life), []
        for hidden in HIDDEN:
            for num in args.sizes:
                rng = np.random.default_rng(args.seed)
                held = dict.fromkeys(real, 0)
                for t, seen in itertools.islice(draw(life, num, hidden, rng), args.rounds):
                    fit = rel.fit_lifetime(family, t, seen)
                    for name, (_, low, high) in {**fit.parameters, **fit.spans}.items():
                        held[name] += low <= real[name] <= high
                how = hidden[0] + (f", {hidden[1]:.0%}" if hidden[1] else "")
                shares = {name: 100 * number / args.rounds for name, number in held.items()}
                raw[f"{family}, {how}, {num}"] = shares
                rows.append([how, str(num), *(f"{share:.1f}" for share in shares.values())])
                print(*rows[-1], file=sys.stderr, flush=True)
                _check(bounds, f"{family}, {how}, {num}", shares)
        title = f"{family}: intervals of 100 that hold the truth, {args.rounds} data sets a row"
        yield Table(title=title, columns=["not seen to fail", "failures", *real], rows=rows)


def _check(bounds: Bounds, what: str, shares: dict[str, float]) -> None:
    worst = max(shares, key=lambda name: abs(shares[name] - 95))
    bounds.check(f"{what}: farthest from 95 ({worst})", abs(shares[worst] - 95), 2.0, "points")


def count_fleets(args: Any, bounds: Bounds, raw: dict[str, Any]) -> Table:
    rows = []
    for weeks, a_week, variance, together in FLEETS:
        rng, rate = np.random.default_rng(args.seed), a_week / HOURS_A_WEEK / MACHINES
        logs = (fleet(weeks, a_week, variance, together, rng) for _ in itertools.count())
        enough = (log for log in logs if len(log.failures) >= 10)
        held = varied = 0
        for log in itertools.islice(enough, args.fleets):
            found, weekly = fleet_intervals(log)
            held += found.low <= rate <= found.high
            varied += 1 / weekly.shape_interval[1] <= variance <= 1 / weekly.shape_interval[0]
        what = f"{weeks} weeks, {a_week:g} a week, variance {variance:g}, {together:g} machines an incident"
        raw[what] = 100 * held / args.fleets
        of_variance = f"{100 * varied / args.fleets:.1f}" if variance else ""
        rows.append([f"{weeks}", f"{a_week:g}", f"{variance:g}", f"{together:g}", f"{raw[what]:.1f}", of_variance])
        print(*rows[-1], file=sys.stderr, flush=True)
        _check(bounds, f"fleet of {what}", {"MTBF": raw[what]})
    columns = ["weeks", "failures a week", "variance a week", "machines an incident", "MTBF", "that variance"]
    title = f"Fleets: intervals of 100 that hold the truth, {args.fleets} logs a row"
    return Table(title=title, columns=columns, rows=rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=1000, help="data sets a row of a law")
    parser.add_argument("--fleets", type=int, default=400, help="logs a row of fleets")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 30, 100], help="failures expected")
    parser.add_argument("--only", default="", help="laws whose name contains this; 'fleets' counts fleets alone")
    args = parser.parse_args(argv)
    machine, bounds, raw = environment(args, ("numpy", "scipy")), Bounds(), dict[str, Any]()
    tables = list(count_laws(args, bounds, raw))
    if args.only in "fleets":
        tables.append(count_fleets(args, bounds, raw))
    return publish("coverage", args, machine, tables, bounds, raw)


if __name__ == "__main__":
    sys.exit(main())
