"""The class model in closed form and as a Markov chain, and the envelope inside which they are held to the simulator.

Closed form: first order in rates, tier by tier. Chain: the ladder's exact embedded chain, times the spares' birth-death
availability, less the stalls. Invariant: outside the envelope `Analytic.outside` says why; nobody is left to guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from outlast.core.policy import Belief, IntervalState, SparesPolicy, SparesState
from outlast.core.reliability import Ladder, Standby, ladder_ettr

from ._compiled import Compiled, compile_job, default_policies, plan_belief, replace_job
from ._model import Job
from ._source import Floats

__all__ = ["ENVELOPE_POINTS", "Analytic", "analyse", "planned_interval_s", "planned_spares"]

ENVELOPE_POINTS = {"closed": 0.02, "chain": 0.01}
"""Inside the envelope: |closed - chain| and |chain - simulation| in ETTR stay below these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Analytic:
    """ETTR both ways, the three clocks (hours), and what takes the answer out of the envelope (empty: inside)."""

    closed: float
    chain: float
    interval_s: float
    mtbf_h: float
    mtbi_h: float
    mtbr_h: float
    places_filled: float
    outside: tuple[str, ...]

    def clocks_h(self) -> dict[str, float]:
        """The three clocks by name, as `Outcome.clocks_h` counts them: expected, so also where no run is struck."""
        return {"mtbf_h": self.mtbf_h, "mtbi_h": self.mtbi_h, "mtbr_h": self.mtbr_h}


def planned_interval_s(job: Job, model: Compiled | None = None) -> float:
    """The base interval that the job's own policy decides on the plan's belief."""
    model = model or compile_job(job)
    if job.interval == "adaptive":  # what it settles near, at rates that are as planned
        job = replace_job(job, interval="exact")
    policies = default_policies(job, model.loses_work, tuple(float(s) for s in model.silent))
    state = IntervalState(
        machines=float(job.num_nodes), write_s=max(model.cycle.mean_write_s(), 1e-9), durable_s=job.tiers[0].lag_s
    )
    belief: Belief = plan_belief(job, model.classes)
    return float(policies.interval.decide(belief, state).interval_s)


def planned_spares(job: Job) -> float:
    """What the run's spares policy holds on the plan's belief: for all machines in repair, 99 % of the time."""
    takes = sum(job.fleet_rate_h(c) * c.repair * c.nodes for c in job.classes)
    if takes == 0:
        return 0.0
    repair_h = sum(job.fleet_rate_h(c) * c.repair * c.nodes * c.repair_mean_h for c in job.classes) / takes
    policy = SparesPolicy(takes=tuple(c.repair * c.nodes for c in job.classes))
    state = SparesState(wanted=1.0 * job.num_nodes, repair_s=repair_h * 3600)
    return min(float(policy.decide(plan_belief(job, job.classes), state).spares), float(job.num_nodes))


def _rollback_rates(model: Compiled) -> Floats:
    """Rollbacks per second by severity; silent ones are found late and counted with tier 0."""
    rates = (1 - model.masked) * (1 - model.planned) * (model.slow_factor == 1) / model.mean_s
    levels = len(model.job.tiers)
    return np.bincount(model.severity, weights=rates, minlength=levels)[:levels].astype(np.float64)


def _stall_share(model: Compiled) -> float:
    """Share of wall time in masked stalls, planned stops and slow spells."""
    job, rate = model.job, 1 / model.mean_s
    unmasked = 1 - model.masked
    stalls = rate * model.masked * job.mask_stall_s + rate * unmasked * model.planned * job.planned_stop_s
    slow = rate * unmasked * (1 - model.planned) * model.slow_s * (1 - model.slow_factor) * (model.slow_factor < 1)
    swaps = rate * np.array([c.repair for c in model.classes]) * job.swap_s * (job.spares > 0 or job.auto_spares)
    return float((stalls + slow + swaps).sum())


def _recoveries(model: Compiled) -> Floats:
    """Mean seconds from failure to training, per severity."""
    rates = (1 - model.masked) * (1 - model.planned) * (model.slow_factor == 1) / model.mean_s
    noticed = model.coverage * model.detection_s + (1 - model.coverage) * model.late_s
    noticed = np.where(model.silent, 0.0, noticed)
    levels = len(model.job.tiers)
    weight = np.bincount(model.severity, weights=rates, minlength=levels)[:levels]
    total = np.bincount(model.severity, weights=rates * noticed, minlength=levels)[:levels]
    return model.recovery_s + np.divide(total, weight, out=np.zeros(levels), where=weight > 0)


def _places(job: Job) -> tuple[float, float]:
    """(share of time that all places are filled, mean share of machines running), by the birth-death chain."""
    takes = sum(job.fleet_rate_h(c) * c.repair * c.nodes for c in job.classes)
    hours = sum(job.fleet_rate_h(c) * c.repair * c.nodes * c.repair_mean_h for c in job.classes)
    if takes == 0:
        return 1.0, 1.0
    held = int(planned_spares(job)) if job.auto_spares else job.spares
    if job.num_nodes > 20_000:  # the chain's tail is Poisson by then: same answer, no long arrays
        spares = Standby(num_active=20_000, num_spares=min(held, 20_000), rate=takes / 20_000, repair_h=hours / takes)
    else:
        spares = Standby(
            num_active=job.num_nodes,
            num_spares=held,
            rate=takes / job.num_nodes,
            repair_h=hours / takes,
            crews=job.crews or inf,
        )
    law = spares.stationary()
    missing = np.maximum(np.arange(len(law)) - spares.num_spares, 0)
    return float(law[missing == 0].sum()), float(1 - (law * missing).sum() / spares.num_active)


def analyse(job: Job) -> Analytic:
    """Both analytic answers for the interval that the job's policy would choose before the run."""
    model = compile_job(job)
    interval = planned_interval_s(job, model)
    rates, recoveries = _rollback_rates(model), _recoveries(model)
    writes = np.array([t.write_s for t in job.tiers])
    every = np.array([t.every for t in job.tiers])
    stalls = _stall_share(model)
    filled, running = _places(job)
    places = filled if job.min_share == 1 or job.on_vacancy in ("wait", "stop") else running
    silent = float(((1 - model.masked) * model.silent / model.mean_s).sum())
    audit_loss = silent * (model.audit_s if model.silent.any() else 0.0)
    period = interval + writes[0]
    lags = np.array([t.lag_s for t in job.tiers])
    lost = float((rates * (every * period / 2 + lags + recoveries)).sum()) + audit_loss
    overhead = float((writes / every).sum()) / interval
    closed = max(0.0, 1 - lost - stalls) / (1 + overhead) * places
    ladder = Ladder(interval=interval, every=tuple(int(n) for n in every))
    lag_loss = float((rates * lags).sum())
    chain = ladder_ettr(ladder, writes, rates, recoveries) * max(0.0, 1 - stalls - audit_loss - lag_loss) * places
    total = float(sum(job.fleet_rate_h(c) for c in job.classes)) / 3600
    running = max(running, 1e-12)  # machines that are out fail no more
    stops = float(rates.sum() + ((1 - model.masked) * model.planned / model.mean_s).sum())
    return Analytic(
        closed=closed,
        chain=chain,
        interval_s=interval,
        mtbf_h=_per_hour(total * running),
        mtbi_h=_per_hour(stops * running),
        mtbr_h=_per_hour(float(rates.sum()) * running),
        places_filled=filled,
        outside=_outside(job, model, 1 - closed, stalls, filled, period, audit_loss),
    )


def _per_hour(rate_s: float) -> float:
    return 1 / rate_s / 3600 if rate_s > 0 else inf


def _outside(
    job: Job, model: Compiled, waste: float, stalls: float, filled: float, period: float, audit_loss: float
) -> tuple[str, ...]:
    """Why the closed form and the chain may miss the simulation here, in words."""
    planned = float(((1 - model.masked) * model.planned / model.mean_s).sum())
    mixing_h = max((c.repair_mean_h for c in job.classes if c.repair), default=0.0)
    short = filled < 0.9999
    ended = float((model.nodes * model.ends_process * (1 - (1 - model.masked) * model.planned) / model.mean_s).sum())
    ended *= job.days * 86400
    reasons = (
        (waste > 0.25, f"waste {waste:.0%}: first order holds below 25 %"),
        (any(c.shape != 1 for c in model.classes), "failures are not exponential: the chain assumes no memory"),
        (job.burst_variance > 0, "the fleet's rate changes from window to window: the chain takes its mean"),
        (stalls + audit_loss > 0.05, f"stalls and late detection take {stalls + audit_loss:.0%}: added, valid to 5 %"),
        (planned * period > 0.1, "planned stops come within ten intervals: each also saves, which is left out here"),
        (filled < 0.99, f"spares fall short {1 - filled:.1%} of the time: waiting meets rollbacks"),
        (short and mixing_h > job.days * 2.4, "repairs last over a tenth of the run: no steady state"),
        (short and job.price > 0 and job.on_vacancy == "auto", "a price may stop the job: the chain has none"),
        (short and job.vacancy_wait_s < inf and job.on_vacancy in ("wait", "auto"), "waits end, and in the chain none"),
        (ended + 3 * ended**0.5 > job.max_restarts, f"{ended:.3g} restarts are expected: the chain has any number"),
        (job.days * 86400 < 50 * period * job.tiers[-1].every, "fewer than 50 write cycles: the ends of the run show"),
        (job.interval == "adaptive", "the run learns its interval: the chain has the one that is best at these rates"),
        (job.auto_spares, "the run learns how many spares it holds: the chain has those that fit these rates"),
        (job.believed != 1 and job.interval != "fixed", "the controller starts from mistaken rates and learns"),
    )  # fmt: skip
    return tuple(text for bad, text in reasons if bad)
