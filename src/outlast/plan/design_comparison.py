"""Two designs side by side on the same seeds: what differs, by how much, and how long a run must be to see it.

Invariant: both are simulated with the same number of replications and seed; a difference comes with its interval.
"""

from __future__ import annotations

from importlib import resources

from outlast.core import reliability as rel
from outlast.errors import ConfigError

from ._analytic import analyse
from ._model import Job, load_job
from ._outcome import ACCOUNTS, Outcome, estimate
from ._planner import tell_apart_days
from ._simulate import simulate
from .answers import Answer, Table
from .number_words import duration, share

__all__ = ["compare_answer", "example_paths"]


def example_paths() -> tuple[str, str]:
    """The lost weekend, before and after: two job files that ship with the package."""
    folder = resources.files("outlast.plan") / "examples"
    return str(folder / "lost-weekend-before.toml"), str(folder / "lost-weekend-after.toml")


def cost_of_one_h(outcome: Outcome) -> float:
    """Mean hours that one rollback costs: lost work, recovery and waiting over the number of rollbacks."""
    cost = outcome.accounts_s[[2, 3, 5]].sum()
    return float(cost / max(int(outcome.rollbacks.sum()), 1) / 3600)


def _rows(a: Outcome, b: Outcome, clocks: list[dict[str, float]]) -> tuple[tuple[str, str, str], ...]:
    one, two = a.ettr(), b.ettr()
    rows = [
        ("ETTR", share(one.mean), share(two.mean)),
        ("efficiency", share(a.efficiency * one.mean), share(b.efficiency * two.mean)),
    ]
    rows += [(f"time {name}", share(a.breakdown()[name]), share(b.breakdown()[name])) for name in ACCOUNTS]
    rows += [
        (name[:4].upper(), duration(clocks[0][name] * 3600), duration(clocks[1][name] * 3600)) for name in clocks[0]
    ]
    rows.append(("one rollback costs", duration(cost_of_one_h(a) * 3600), duration(cost_of_one_h(b) * 3600)))
    return tuple(rows)


def compare_answer(path_a: str, path_b: str, *, replications: int = 1000, seed: int = 0) -> Answer:
    """Two job files compared."""
    jobs: tuple[Job, Job] = (load_job(path_a), load_job(path_b))
    if jobs[0].days != jobs[1].days:
        raise ConfigError(
            f"runs of {jobs[0].days:g} and {jobs[1].days:g} days cannot be compared", remedy="give both the same days"
        )
    a, b = (simulate(job, replications, seed) for job in jobs)
    gap = estimate((b.efficiency * b.accounts_s[0] - a.efficiency * a.accounts_s[0]) / a.wall_s)
    clocks = [analyse(job).clocks_h() for job in jobs]
    rate_a, rate_b = (1 / expected["mtbr_h"] for expected in clocks)
    hours = rel.time_to_tell_apart(rate_a, rate_b)
    table = Table(title="", columns=("", jobs[0].name, jobs[1].name), rows=_rows(a, b, clocks))
    days = tell_apart_days(a, b)
    sure = f"95 %: {100 * gap.low:+.2f} to {100 * gap.high:+.2f}"
    verdict = f"The second gains {100 * gap.mean:+.2f} points of efficiency ({sure})."
    notes = (
        verdict,
        f"To see it in real runs takes {_words(days * 24)} by ETTR, {_words(hours)} by MTBR (95 %, power 80 %).",
    )
    data = {
        "designs": [
            {
                "name": job.name,
                "ettr": o.ettr().mean,
                "efficiency": o.efficiency * o.ettr().mean,
                "breakdown": o.breakdown(),
                "one_rollback_h": cost_of_one_h(o),
                **expected,
            }
            for job, o, expected in zip(jobs, (a, b), clocks, strict=True)
        ],
        "gain": gap.mean,
        "gain_95": [gap.low, gap.high],
        "tell_apart_days": days,
        "tell_apart_mtbr_h": hours,
        "replications": replications,
        "seed": seed,
    }
    return Answer(title=f"{jobs[0].name} against {jobs[1].name}", tables=(table,), data=data, notes=notes)


def _words(hours: float) -> str:
    return "for ever" if not hours < 876_000 else duration(hours * 3600) + " of each"
