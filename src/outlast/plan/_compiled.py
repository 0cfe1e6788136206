"""A `Job` as arrays, and the real policies that decide for it: what the simulator and the closed form share.

Invariant: false alarms of the predictors are a class of their own here, at the rate that precision implies; nothing of
the model is left out. It draws nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import numpy as np

from outlast.core.policy import (
    ActionCosts,
    AlarmBelief,
    AlarmPolicy,
    AlarmState,
    AuditPolicy,
    AuditState,
    Belief,
    ClassPrior,
    DeadlinePolicy,
    EvictionPolicy,
    IntervalPolicy,
    RestartPolicy,
    RunPrior,
    SparesPolicy,
    VacancyPolicy,
    WorkPolicy,
    WorkState,
    longest_s,
)
from outlast.core.policy.evictions import silence_s

from ._cycle import Cycle
from ._model import FailureClass, Job
from ._source import Floats

__all__ = ["Compiled", "Policies", "compile_job", "default_policies", "plan_belief", "speed_of"]

ALARM = "false alarm"
_NO_SAVE_S = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Policies:
    """The policy objects that decide: the ones a run would use."""

    interval: IntervalPolicy = field(default_factory=IntervalPolicy)
    vacancies: VacancyPolicy = field(default_factory=VacancyPolicy)
    audit: AuditPolicy = field(default_factory=AuditPolicy)
    restart: RestartPolicy = field(default_factory=lambda: RestartPolicy(backoff_s=0.0))
    work: WorkPolicy = field(default_factory=WorkPolicy)
    alarms: AlarmPolicy = field(default_factory=AlarmPolicy)
    spares: SparesPolicy = field(default_factory=SparesPolicy)
    """Asked by a job with `auto_spares` while it runs."""
    prior: RunPrior = field(default_factory=RunPrior)
    """What a run begins with; only the adaptive interval and the number of spares ask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """Arrays over classes, false alarms last if any; `masked` + `planned` + the rest (rollbacks, slow, silent) = 1."""

    job: Job
    classes: tuple[FailureClass, ...]
    mean_s: Floats
    masked: Floats
    planned: Floats
    severity: np.ndarray[tuple[int], np.dtype[np.intp]]
    nodes: Floats
    silent: np.ndarray[tuple[int], np.dtype[np.bool_]]
    slow_factor: Floats
    slow_s: Floats
    detection_s: Floats
    late_s: Floats
    coverage: Floats
    recovery_s: Floats
    cycle: Cycle
    audit_s: float
    audit_rate: float

    @property
    def ends_process(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Per class, whether a failure that was not foretold leaves places for the restart policy to fill."""
        ends: np.ndarray[tuple[int], np.dtype[np.bool_]] = ~self.silent & (self.slow_factor == 1)
        return ends

    @property
    def loses_work(self) -> tuple[float, ...]:
        """Per class, the share of failures that roll work back."""
        share = (1 - self.masked) * (1 - self.planned) * (self.slow_factor == 1)
        return tuple(float(x) for x in share)


def default_policies(job: Job, compiled_weights: tuple[float, ...], silent: tuple[float, ...]) -> Policies:
    """The policies that the job's settings name."""
    own = job.interval == "adaptive"
    return Policies(
        interval=RunPrior().policy(job.checkpoint_min_s)
        if own
        else IntervalPolicy(kind=job.interval, fixed_s=job.interval_s, weights=compiled_weights),
        vacancies=VacancyPolicy(kind=job.on_vacancy, patience_s=job.vacancy_wait_s, price=job.price),
        audit=AuditPolicy(weights=silent, fixed=job.audit_rate or None),
        restart=RestartPolicy(most=job.max_restarts, backoff_s=job.backoff_s),
        alarms=AlarmPolicy(kind=job.on_alarm),
    )


def plan_belief(job: Job, classes: tuple[FailureClass, ...]) -> Belief:
    """The controller's belief before the run: the planned rates times `believed`, worth `prior_weight` failures."""
    priors = {
        c.name: ClassPrior(
            rate=job.believed * job.rate_multiplier / (c.node_mtbf_h * 3600), weight=job.prior_weight, shape=c.shape
        )
        for c in classes
    }
    return Belief.from_priors(priors)


def _acted_on(job: Job, policy: AlarmPolicy) -> list[bool]:
    """Whether a run would stop as planned for what foretells a class, for each class: in time, and worth its false
    alarms. Where the policy would rather only save, a job waits: a planned stop is all that it can do."""
    write_s = min(t.write_s for t in job.tiers)
    unsaved_s = _unsaved_s(job)

    def acts(c: FailureClass) -> bool:
        if not c.predicted or c.notice_s < write_s:
            return False
        costs = ActionCosts(
            failure_s=c.detection_s + job.tiers[c.severity].recovery_s,
            save_s=_NO_SAVE_S,
            move_s=job.planned_stop_s,
        )
        belief = AlarmBelief(p=c.precision, delay_s=max(c.notice_s, 1e-3))
        return policy.decide(belief, AlarmState(costs=costs, unsaved_s=unsaved_s)).acts

    return [acts(c) for c in job.classes]


def _unsaved_s(job: Job) -> float:
    """Seconds of work that no checkpoint has, on average: half an interval, by Young's where the job's is not fixed."""
    if job.interval == "fixed":
        return job.interval_s / 2
    rate_h = sum(job.fleet_rate_h(c) * (1 - c.masked) for c in job.classes if c.slow_factor == 1)
    write_s = Cycle(job.tiers).mean_write_s()
    return min((2 * write_s * 3600 / rate_h) ** 0.5, job.days * 86400) / 2 if rate_h else job.days * 43200


def _with_alarms(job: Job, acted: list[bool]) -> tuple[FailureClass, ...]:
    told = (c for c, acts in zip(job.classes, acted, strict=True) if acts)
    alarms = sum((1 - c.masked) * c.predicted * (1 / c.precision - 1) / c.node_mtbf_h for c in told)
    if alarms == 0:
        return job.classes
    return (*job.classes, FailureClass(name=ALARM, node_mtbf_h=1 / alarms, predicted=1.0, notice_s=1e12))


def speed_of(job: Job, work: WorkPolicy) -> float:
    """Speed of the hardware mix relative to all of the first part, by the shares that a run would settle at. In whole
    microbatches that also counts what they leave over."""
    if not job.microbatches:
        speeds = [h.speed for h in job.hardware]
        return sum(h.share * h.speed for h in job.hardware) if job.balanced else min(speeds)
    from outlast.core.protocol.work_shares import even  # all of the protocol, for the one job in many that asks

    edges = [round(job.num_nodes * share) for share in np.cumsum([0.0, *(h.share for h in job.hardware)])]
    parts = zip(job.hardware, pairwise(edges), strict=True)
    leaf_s = [1 / part.speed for part, (first, end) in parts for _ in range(end - first)]
    shares = even(job.num_nodes, job.microbatches)
    if job.balanced:
        shares = work.decide(leaf_s, WorkState(even=shares)).work or shares
    return job.microbatches / job.num_nodes / longest_s(shares, leaf_s)


def compile_job(job: Job, audit: AuditPolicy | None = None, alarms: AlarmPolicy | None = None) -> Compiled:
    """Arrays for the engines; the audit rate is what the audit policy decides on the plan's belief, and predictions are
    those that the alarm policy acts on."""
    acted = _acted_on(job, alarms or AlarmPolicy(kind=job.on_alarm))
    classes = _with_alarms(job, acted)

    def column(name: str) -> Floats:
        return np.array([getattr(c, name) for c in classes], dtype=np.float64)

    acted += [True] * (len(classes) - len(acted))
    silent = np.array([c.silent for c in classes])
    policy = audit or AuditPolicy(weights=tuple(float(s) for s in silent), fixed=job.audit_rate or None)
    decision = policy.decide(plan_belief(job, classes), AuditState(machines=float(job.num_nodes), step_s=job.step_s))
    audited = float(decision.rate) if silent.any() or job.audit_rate else 0.0
    return Compiled(
        job=job,
        classes=classes,
        mean_s=column("node_mtbf_h") * 3600 / (job.num_nodes * job.rate_multiplier),
        masked=column("masked"),
        planned=np.where(acted, column("predicted"), 0.0),
        severity=column("severity").astype(np.intp),
        nodes=column("nodes"),
        silent=silent,
        slow_factor=column("slow_factor"),
        slow_s=column("slow_s"),
        detection_s=np.where(
            [c.hangs for c in classes],
            silence_s(job.step_s, DeadlinePolicy(floor_s=job.stall_floor_s), EvictionPolicy(outside_s=job.outside_s)),
            column("detection_s"),
        ),
        late_s=column("late_detection_s"),
        coverage=column("coverage"),
        recovery_s=np.array([t.recovery_s for t in job.tiers]),
        cycle=Cycle(job.tiers),
        audit_s=job.step_s / max(audited, 1e-9),
        audit_rate=audited,
    )


def replace_job(job: Job, **changes: object) -> Job:
    """The same job with some fields changed, validated again."""
    return msgspec.structs.replace(job, **changes)
