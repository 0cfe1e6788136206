"""How often the 95 % intervals of `plan fit` hold the truth, counted on lives and fleets that were drawn.

Laws: each of the four, by the number of failures that are expected and by what hides the others. "staggered": units
are watched for times of their own, uniform from zero; "one age": all are watched as long. Data with fewer than three
failures are drawn again, since `plan lifetimes` refuses them. Fleets: the machine MTBF and the variance of the weekly
rate, by weeks, failures a week, that variance, the correlation of a week with the next, and how many machines an
incident takes. Logs with fewer than ten failures are drawn again, since `plan fit` refuses them.

    python -m benchmarks coverage --record
"""

from __future__ import annotations

import itertools
import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import special

from benchmarks._common import Bounds, Table, environment, options, publish
from outlast.core import reliability as rel
from outlast.plan.traces import Failure, Trace, fleet_intervals, node_rate

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
# weeks, failures a week, variance of the weekly rate, correlation with the next week's, machines an incident takes
FLEETS = (
    (8, 2.5, 0.0, 0.0, 1.0), (8, 2.5, 0.5, 0.0, 1.0), (8, 10.0, 0.0, 0.0, 1.0), (8, 10.0, 0.5, 0.0, 1.0),
    (26, 2.5, 0.0, 0.0, 1.0), (26, 2.5, 0.5, 0.0, 1.0), (26, 10.0, 0.0, 0.0, 2.0), (26, 10.0, 0.5, 0.0, 2.0),
    (52, 10.0, 0.0, 0.0, 1.0), (52, 10.0, 0.5, 0.0, 1.0), (52, 10.0, 0.5, 0.0, 2.0), (156, 2.5, 0.5, 0.0, 1.0),
)  # fmt: skip
RELATED = ((26, 10.0, 0.5, 0.5, 1.0), (52, 10.0, 0.5, 0.5, 1.0), (156, 2.5, 0.5, 0.5, 1.0))
VARIED = ((26, 2.5, 0.5, 0.0, 1.0), (52, 10.0, 0.5, 0.0, 1.0), (52, 10.0, 0.5, 0.0, 2.0))
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


def weekly_rates(
    weeks: int, a_week: float, variance: float, related: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Failures to be expected in each week, (weeks,): of a Gamma law, `related` by a normal one beneath."""
    if not related:
        return rng.gamma(1 / variance, a_week * variance, weeks) if variance else np.full(weeks, a_week)
    level = rng.normal(size=weeks)
    for week in range(1, weeks):
        level[week] = related * level[week - 1] + math.sqrt(1 - related**2) * level[week]
    return np.asarray(special.gammaincinv(1 / variance, special.ndtr(level)) * a_week * variance)


def fleet(
    weeks: int, a_week: float, variance: float, related: float, together: float, rng: np.random.Generator
) -> Trace:
    """A log of machines that are all alike."""
    rates = weekly_rates(weeks, a_week, variance, related, rng)
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


def _logs(row: tuple[int, float, float, float, float], args: Any, number: int) -> Iterator[Trace]:
    rng = np.random.default_rng(args.seed)
    logs = (fleet(*row, rng) for _ in itertools.count())
    return itertools.islice((log for log in logs if len(log.failures) >= 10), number)


def _described(row: tuple[int, float, float, float, float]) -> str:
    weeks, a_week, variance, related, together = row
    text = f"{weeks} weeks, {a_week:g} a week, variance {variance:g}, {together:g} machines an incident"
    return text + (f", correlation {related:g}" if related else "")


def count_fleets(args: Any, bounds: Bounds, raw: dict[str, Any]) -> Table:
    """The rate of a machine. Weeks that are related hold no bound: what they hold is told."""
    rows = []
    for row in (*FLEETS, *RELATED):
        rate, held, wide = row[1] / HOURS_A_WEEK / MACHINES, 0, []
        for log in _logs(row, args, args.fleets):
            found = node_rate(log)
            held += found.low <= rate <= found.high
            wide.append(found.high / found.low)
        raw[_described(row)] = 100 * held / args.fleets
        rows.append([*(f"{x:g}" for x in row), f"{raw[_described(row)]:.1f}", f"{np.median(wide):.2f}"])
        print(*rows[-1], file=sys.stderr, flush=True)
        if row in FLEETS:
            _check(bounds, f"fleet of {_described(row)}", {"MTBF": raw[_described(row)]})
    columns = ["weeks", "failures a week", "variance a week", "correlation", "machines an incident", "MTBF", "end/end"]
    title = f"Fleets: intervals of the MTBF of 100 that hold the truth, and how far apart their ends are, {args.fleets}"
    return Table(title=f"{title} logs a row", columns=columns, rows=rows)


def count_variances(args: Any, raw: dict[str, Any]) -> Table:
    """The variance of the weekly rate."""
    rows = []
    for row in VARIED:
        held = 0
        for log in _logs(row, args, args.varied):
            low, high = fleet_intervals(log)[1].shape_interval
            held += 1 / high <= row[2] <= 1 / low
        raw[f"variance, {_described(row)}"] = 100 * held / args.varied
        rows.append([*(f"{x:g}" for x in (*row[:3], row[4])), f"{100 * held / args.varied:.1f}"])
        print(*rows[-1], file=sys.stderr, flush=True)
    title = f"Fleets: intervals of the variance from week to week of 100 that hold the truth, {args.varied} logs a row"
    columns = ["weeks", "failures a week", "variance a week", "machines an incident", "that variance"]
    return Table(title=title, columns=columns, rows=rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=1000, help="data sets a row of a law")
    parser.add_argument("--fleets", type=int, default=2000, help="logs a row of fleets")
    parser.add_argument("--varied", type=int, default=400, help="logs a row where the variance is counted; 0: none")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 30, 100], help="failures expected")
    parser.add_argument("--only", default="", help="laws whose name contains this; 'fleets' counts fleets alone")
    args = parser.parse_args(argv)
    machine, bounds, raw = environment(args, ("numpy", "scipy")), Bounds(), dict[str, Any]()
    tables = list(count_laws(args, bounds, raw))
    if args.only in "fleets":
        tables.append(count_fleets(args, bounds, raw))
        tables += [count_variances(args, raw)] if args.varied else []
    return publish("coverage", args, machine, tables, bounds, raw)


if __name__ == "__main__":
    sys.exit(main())
