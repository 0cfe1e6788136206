"""What faults cost a small fleet, from the accounts of other fleets like it; and that fleet as a job.

Role: the prediction that measured fleets are held against (`benchmarks target`). Costs are the run's own accounts, put
down to the fault that they follow: so the model and the measurement speak of the same seconds. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from outlast.core import events as ev
from outlast.core.policy import AdmissionPolicy, most_rows_per_host
from outlast.errors import ConfigError

from ._compiled import Compiled
from ._model import FailureClass, Job, Tier
from ._outcome import Outcome
from ._simulate import simulate
from ._source import LossSource, Renewals, ReplayedTimes

__all__ = ["FleetCosts", "fleet_costs", "fleet_job", "struck_fleet"]

_PLANNED = frozenset({"finished", "left"})
_LEAST_S = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetCosts:
    """Seconds, means. stall_s: a death that others outlast holds everybody up, its orphans' work included; empty_s:
    from a death until its place is filled, usual_empty_s the median; restart_s: from the loss of all to the next step;
    regrow_s: lost after that while replicas that are late are missing; of a save, write_s and lag_s; step_s. Counts of
    what they are means of."""

    stall_s: float
    empty_s: float
    usual_empty_s: float
    restart_s: float
    regrow_s: float
    write_s: float
    lag_s: float
    step_s: float
    outlasted: int
    lost: int


class _Fold:
    def __init__(self) -> None:
        self.sums = dict.fromkeys(("stall", "restart", "regrow"), 0.0)
        self.values: dict[str, list[float]] = {"empty": [], "write": [], "lag": [], "step": []}
        self.outlasted = self.lost = 0
        self.begin()

    def begin(self) -> None:
        """Another journal."""
        self._gone: dict[str, float] = {}
        self._since_view = self._wanted = 0
        self._formed = self._down = self._regrowing = False

    def take(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.RunStarted():
                self._wanted = event.num_replicas
            case ev.ViewInstalled():
                self._installed(event)
            case ev.ViewFormed():
                self._formed, self.outlasted, self._since_view = True, self.outlasted + self._since_view, 0
            case ev.ReplicaExited() if self._formed and event.cause not in _PLANNED:
                self._since_view += 1
                self._regrowing = False
                self._gone.setdefault(event.replica.partition(".")[0], event.at_s)
            case ev.FleetGone():
                self.lost += 1
                self._since_view, self._down = 0, True
                self._gone.clear()
            case ev.ProgressMade():
                self._progress(event)
            case ev.CheckpointSaved():
                self.values["write"].append(event.blocked_s)
                self.values["lag"].append(event.durable_s)
            case _:
                pass

    def _installed(self, event: ev.ViewInstalled) -> None:
        members = {name.partition(".")[0] for name in event.members}
        for slot in members & self._gone.keys():
            self.values["empty"].append(event.at_s - self._gone.pop(slot))
        self._regrowing = len(members) < self._wanted and (self._down or self._regrowing)

    def _progress(self, event: ev.ProgressMade) -> None:
        if event.step_s:
            self.values["step"].append(event.step_s)
        held_s = event.seconds.get("recovery", 0.0) + event.seconds.get("lost", 0.0)
        self.sums["restart" if self._down else "stall"] += held_s
        self._down = self._down and not held_s
        if self._regrowing:
            self.sums["regrow"] += event.seconds.get("degraded", 0.0)


def fleet_costs(journals: Iterable[Iterable[ev.AnyEvent]]) -> FleetCosts:
    """From runs of one kind. ConfigError where none of them lost anything, or made a step."""
    fold = _Fold()
    for journal in journals:
        fold.begin()
        for event in journal:
            fold.take(event)
    if not fold.values["step"] or not fold.outlasted + fold.lost:
        raise ConfigError("these runs were struck by nothing, or made no step", remedy="run them for longer")
    mean = {name: sum(found) / max(1, len(found)) for name, found in fold.values.items()}
    return FleetCosts(
        stall_s=fold.sums["stall"] / max(1, fold.outlasted),
        restart_s=fold.sums["restart"] / max(1, fold.lost),
        regrow_s=fold.sums["regrow"] / max(1, fold.lost),
        empty_s=mean["empty"],
        usual_empty_s=median(fold.values["empty"] or [0.0]),
        write_s=mean["write"],
        lag_s=mean["lag"],
        step_s=max(_LEAST_S, mean["step"]),
        outlasted=fold.outlasted,
        lost=fold.lost,
    )


def fleet_job(
    costs: FleetCosts, strikes: Mapping[str, float], *, replicas: int, wall_s: float, min_s: float, lying: int = 0
) -> Job:
    """A fleet of replicas that is struck so often within `wall_s`: one of them (`one`), or all (`all`).

    Others outlast the death of one and go on short of it, unless the admission policy makes a view of so few wait
    (`lying`: replicas that the rule must withstand); then its stall is the wait. `min_s`: of the adaptive interval.
    """
    goes_on = replicas > 1 and (not lying or _admitted(replicas, lying))
    hours = {name: replicas * wall_s / 3600 / number for name, number in strikes.items() if number > 0}
    if goes_on and "all" in hours:  # machines that are missing are struck by nothing in a plan, and here by this
        hours["all"] *= max(0.5, 1.0 - strikes.get("one", 0.0) * costs.empty_s / wall_s / replicas)
    empty_s, usual_s = max(costs.empty_s, _LEAST_S), max(costs.usual_empty_s, _LEAST_S)
    classes = tuple(
        FailureClass(
            name=name,
            node_mtbf_h=mtbf_h,
            masked=float(name == "one" and replicas > 1),
            detection_s=0.0,  # the accounts count from the last step before it
            repair=float(name == "one" and goes_on),
            repair_median_h=min(empty_s, usual_s) / 3600,
            repair_mean_h=empty_s / 3600,
            source="injected",
        )
        for name, mtbf_h in hours.items()
    )
    if not classes:
        raise ConfigError("a fleet that nothing struck has nothing to predict", remedy="strike it for longer")
    near = Tier(
        name="disk",
        write_s=costs.write_s,
        lag_s=costs.lag_s,
        recovery_s=max(_LEAST_S, costs.restart_s + costs.regrow_s),
    )
    return Job(
        name="this fleet", classes=classes, parameters=1.0, accelerators=replicas, accelerators_per_node=1,
        days=wall_s / 86_400, endless=True, tiers=(near,), interval="adaptive", checkpoint_min_s=min_s,
        mask_stall_s=costs.stall_s, reshape_s=0.0, min_share=1 / replicas, step_s=costs.step_s,
    )  # fmt: skip


def struck_fleet(job: Job, strikes: Sequence[tuple[float, str]], replications: int, seed: int) -> Outcome:
    """A fleet of `fleet_job` that is struck just then, (seconds from its first step, class): only costs are drawn, so
    that what is predicted differs from what is seen by no luck of when faults came."""
    names = [item.name for item in job.classes]
    times_s = np.array([at_s for at_s, _ in strikes])
    kinds = np.array([names.index(name) for _, name in strikes], dtype=np.intp)

    def source(model: Compiled, size: int, rng: np.random.Generator) -> LossSource:
        return ReplayedTimes(times_s, kinds, Renewals(model.classes, model.mean_s, size, rng), size)

    return simulate(job, replications, seed, source=source)


def _admitted(replicas: int, lying: int) -> bool:
    rows = {"fullest": most_rows_per_host(replicas, replicas - 1)}
    return AdmissionPolicy(trim_count=lying, tolerated_hosts=lying).decide(rows).action == "go"
