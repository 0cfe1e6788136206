"""The planner: given a job, the design that holds, what it will do, what each choice is worth, and how sure that is.

Invariant: every figure comes from the simulator, the chain or `core.reliability`, and says which. It changes only what
a user may change: intervals, the ladder's multiples, spares, audit rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
from scipy import special

from outlast.core import reliability as rel
from outlast.errors import ConfigError

from ._analytic import Analytic, analyse, planned_interval_s, planned_spares
from ._compiled import compile_job, replace_job
from ._model import Job
from ._outcome import Outcome
from ._simulate import simulate

__all__ = ["Design", "Mistake", "PlacementRow", "Plan", "Sensitivity", "design_of", "make_plan", "tell_apart_days"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """ETTR (chain) with one input 20 % lower and 20 % higher, the design's other choices held."""

    name: str
    low: float
    high: float

    @property
    def swing(self) -> float:
        return abs(self.high - self.low)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """The interval chosen for rates that are `factor` times the true ones, and the ETTR it then gives (chain)."""

    factor: float
    interval_s: float
    ettr: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementRow:
    """A placement of copies or parity: bytes stored, P(survive) of 1, 2, 3 machines at once, losses of state a year.

    losses_a_year: None where no class says what share of its failures takes a machine.
    """

    name: str
    bytes_ratio: float
    survive: tuple[float, float, float]
    losses_a_year: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A job as given, the design proposed, and what is known of both."""

    given: Job
    job: Job
    analytic: Analytic
    analytic_given: Analytic
    outcome: Outcome
    outcome_given: Outcome
    ladder_ettr: float
    spares_policy: float
    spares_99: int
    audit_rate: float
    placements: tuple[PlacementRow, ...]
    sensitivity: tuple[Sensitivity, ...]
    mistakes: tuple[Mistake, ...]
    levers: tuple[rel.Lever, ...]
    redundancy_gain: float
    curve: tuple[tuple[float, float], ...]


def _severity_rates(job: Job) -> tuple[list[float], list[float]]:
    from ._analytic import _recoveries, _rollback_rates

    model = compile_job(job)
    return _rollback_rates(model).tolist(), _recoveries(model).tolist()


def _with_ladder(job: Job) -> tuple[Job, float]:
    """The job with the ladder that has the best exact ETTR."""
    rates, recoveries = _severity_rates(job)
    if sum(rates) == 0:
        return job, 1.0
    writes = [max(t.write_s, 1e-3) for t in job.tiers]
    ladder, value = rel.optimal_ladder(writes, rates, recoveries)
    tiers = tuple(_changed(t, every=n) for t, n in zip(job.tiers, ladder.every, strict=True))
    interval = max(ladder.interval, job.tiers[0].lag_s)
    return replace_job(job, tiers=tiers, interval="fixed", interval_s=interval), value


def _spares(job: Job) -> tuple[float, int]:
    """(what the run's spares policy would hold, the fewest that fill all places 99 % of the time)."""
    takes = sum(job.fleet_rate_h(c) * c.repair * c.nodes for c in job.classes)
    if takes == 0:
        return 0.0, 0
    repair_h = sum(job.fleet_rate_h(c) * c.repair * c.nodes * c.repair_mean_h for c in job.classes) / takes
    low = int(takes * repair_h)
    while rel.spares_poisson(job.num_nodes, low, takes / job.num_nodes, repair_h) < 0.99:
        low += 1
    return planned_spares(job), min(low, job.num_nodes)


_OVERLAP = 8  # losses within one recovery that are looked at; more are taken to lose the state


def _placements(job: Job) -> tuple[PlacementRow, ...]:
    """What each placement of the near tier survives, by exact counts on all of the job's machines."""
    nodes = job.num_nodes
    if nodes < 6:
        return ()
    shapes: tuple[tuple[str, float, Callable[[int], float]], ...] = (
        ("mixed x2", 2.0, partial(rel.copies_survival, nodes, 2)),
        ("ring x2", 2.0, partial(rel.copies_survival, nodes, 2, ring=True)),
        ("mixed x3", 3.0, partial(rel.copies_survival, nodes, 3)),
        ("rs(4,2)", 1.5, partial(rel.parity_survival, nodes, 4, 2)),
    )
    return tuple(
        PlacementRow(
            name=name,
            bytes_ratio=ratio,
            survive=(survive(1), survive(2), survive(3)),
            losses_a_year=_state_losses_a_year(job, survive),
        )
        for name, ratio, survive in shapes
    )


def _state_losses_a_year(job: Job, survive: Callable[[int], float]) -> float | None:
    """Losses of state a year: machines that one failure takes together, and machines lost within one recovery.

    A machine is lost where its class says that it must be repaired; None where no class says so. Places are random, so
    machines that fail together count as apart. First order: a recovery that overlaps two others counts with both.
    """
    nodes = job.num_nodes
    takers = [(job.fleet_rate_h(c) * c.repair, c.nodes) for c in job.classes if c.repair and not c.silent]
    if not takers:
        return None
    rate_h = sum(rate * num for rate, num in takers)
    load = rate_h * job.tiers[0].recovery_s / 3600
    most = min(_OVERLAP, nodes - 1)
    further = [
        float(p) for p in np.exp(special.xlogy(range(most + 1), load) - load - special.gammaln(range(1, most + 2)))
    ]
    overlapping = sum(p * (1 - survive(j + 1)) for j, p in enumerate(further)) + max(0.0, 1 - sum(further))
    together = sum(rate * (1 - survive(num)) for rate, num in takers if num > 1)
    return 8760 * (rate_h * overlapping + together)


def _changed(item: Any, **changes: object) -> Any:
    return msgspec.structs.replace(item, **changes)


def _scaled_classes(job: Job, name: str, factor: float) -> Job:
    classes = (_changed(c, node_mtbf_h=c.node_mtbf_h / factor) if c.name == name else c for c in job.classes)
    return replace_job(job, classes=tuple(classes))


def _scaled_field(job: Job, kind: str, field: str, factor: float) -> Job:
    items = tuple(_changed(item, **{field: getattr(item, field) * factor}) for item in getattr(job, kind))
    return replace_job(job, **{kind: items})


def _scaled_repairs(job: Job, factor: float) -> Job:
    items = (
        _changed(c, repair_median_h=c.repair_median_h * factor, repair_mean_h=c.repair_mean_h * factor)
        for c in job.classes
    )
    return replace_job(job, classes=tuple(items))


def _sensitivity(job: Job) -> tuple[Sensitivity, ...]:
    """The inputs that move ETTR most, largest first."""
    busiest = sorted(job.classes, key=job.fleet_rate_h, reverse=True)[:5]
    changes: dict[str, Callable[[float], Job]] = {
        f"rate of {c.name}": partial(_scaled_classes, job, c.name) for c in busiest
    }
    changes["all rates"] = lambda f: _scaled_field(job, "classes", "node_mtbf_h", 1 / f)
    changes["write time"] = partial(_scaled_field, job, "tiers", "write_s")
    changes["recovery time"] = partial(_scaled_field, job, "tiers", "recovery_s")
    changes["detection time"] = partial(_scaled_field, job, "classes", "detection_s")
    changes["interval"] = lambda f: replace_job(job, interval="fixed", interval_s=planned_interval_s(job) * f)
    changes["repair time"] = partial(_scaled_repairs, job)
    changes["spares"] = lambda f: replace_job(job, spares=min(job.num_nodes, round(job.spares * f)))
    found = [
        Sensitivity(name=name, low=analyse(make(0.8)).chain, high=analyse(make(1.2)).chain)
        for name, make in changes.items()
    ]
    return tuple(sorted(found, key=lambda s: -s.swing))


def _mistakes(job: Job) -> tuple[Mistake, ...]:
    """The ladder that is best at a wrong rate, used at the true one."""
    if sum(_severity_rates(job)[0]) == 0:
        return ()
    found = []
    for factor in (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0):
        wrong, _ = _with_ladder(_scaled_field(job, "classes", "node_mtbf_h", 1 / factor))
        used = replace_job(job, tiers=wrong.tiers, interval="fixed", interval_s=wrong.interval_s)
        found.append(Mistake(factor=factor, interval_s=wrong.interval_s, ettr=analyse(used).chain))
    return tuple(found)


def _curve(job: Job) -> tuple[tuple[float, float], ...]:
    """(interval seconds, ETTR by the chain) around the design's interval."""
    best = planned_interval_s(job)
    points = best * np.exp(np.linspace(-2.5, 2.5, 41))
    return tuple((float(t), analyse(replace_job(job, interval="fixed", interval_s=float(t))).chain) for t in points)


def _redundancy_gain(job: Job) -> float:
    """ETTR gained if every failure were masked 95 % of the time (what redundancy could at most buy), by the chain."""
    masked = tuple(_changed(c, masked=max(c.masked, 0.95)) for c in job.classes)
    return analyse(replace_job(job, classes=masked)).chain - analyse(job).chain


def _levers(job: Job, analytic: Analytic) -> tuple[rel.Lever, ...]:
    """What gives one more nine of availability; nothing where nothing stops the job or going on takes no time."""
    recovery_h = float(np.mean([t.recovery_s for t in job.tiers])) / 3600
    absent = recovery_h / (analytic.mtbi_h + recovery_h)
    if absent < 1e-11:  # the next nine is beyond what a float tells from 1
        return ()
    return rel.price_the_nine(
        analytic.mtbi_h, recovery_h, 1 - absent / 10, cost_per_halving_incidents=1.0, cost_per_halving_repair=1.0
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Design:
    """A job with the ladder that is best for it and the spares that the run's policy would hold, and what the chain
    expects of it."""

    job: Job
    analytic: Analytic
    ladder_ettr: float
    spares_policy: float
    spares_99: int


def design_of(job: Job) -> Design:
    """The design for a job: every command's MTBF and ETTR of a job are those of this."""
    designed, value = _with_ladder(job)
    held, fewest = _spares(designed)
    if not job.auto_spares:
        designed = replace_job(designed, spares=max(job.spares, int(held)))
    return Design(job=designed, analytic=analyse(designed), ladder_ettr=value, spares_policy=held, spares_99=fewest)


def make_plan(job: Job, *, replications: int = 256, seed: int = 0) -> Plan:
    """The design for a job and everything the report says of it. Deterministic in its arguments."""
    best = design_of(job)
    designed, analytic, value, held, fewest = (
        best.job, best.analytic, best.ladder_ettr, best.spares_policy, best.spares_99
    )  # fmt: skip
    return Plan(
        given=job,
        job=designed,
        analytic=analytic,
        analytic_given=analyse(job),
        outcome=simulate(designed, replications, seed),
        outcome_given=simulate(job, replications, seed),
        ladder_ettr=value,
        spares_policy=held,
        spares_99=fewest,
        audit_rate=compile_job(designed).audit_rate,
        placements=_placements(designed),
        sensitivity=_sensitivity(designed),
        mistakes=_mistakes(designed),
        levers=_levers(designed, analytic),
        redundancy_gain=_redundancy_gain(designed),
        curve=_curve(designed),
    )


def tell_apart_days(a: Outcome, b: Outcome) -> float:
    """Days each of two designs must run for their ETTRs to differ visibly (95 %, power 80 %).

    A run's spread is taken to average out with its length; infinite when the means do not differ.
    """
    x, y = a.accounts_s[0] / a.wall_s, b.accounts_s[0] / b.wall_s
    if len(x) < 2 or len(y) < 2:
        raise ConfigError("one replication shows no spread", remedy="simulate at least two")
    gap = float(x.mean() - y.mean())
    if gap == 0:
        return float("inf")
    spread = float(x.var(ddof=1)) * a.wall_s + float(y.var(ddof=1)) * b.wall_s
    return (1.959963985 + 0.8416212336) ** 2 * spread / gap**2 / 86400
