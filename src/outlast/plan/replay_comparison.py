"""A run that lived through a trace's outages, beside what a plan makes of the same outages and of that run's costs.

Both are told of the same stretch: from when the run was whole for the first time until its last commit. Both call
useful what the working share of the replicas does: a second with n replicas of N is n/N useful, and the rest degraded.
The plan is told when hosts went and when they were back, what each kind of change cost in the mean, and nothing of
what the run came to: that is the simulator's, by the policies that a run has. Pure but for that.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from outlast.core import events as ev

from ._model import FailureClass, Job, Tier

__all__ = ["HostOutage", "ReplayComparison", "ReplayCosts", "compared"]

_LEAST_S = 1e-3
_ACCOUNTS = ("productive", "checkpoint", "lost", "recovery", "degraded", "stalled", "unexplained")


class HostOutage(msgspec.Struct, frozen=True, kw_only=True):
    """A host was struck at `at_s` and was there again at `until_s`, in Unix seconds; None: not before the end. `host`:
    or a replica's slot, where processes are struck."""

    host: str
    at_s: float
    until_s: float | None


class ReplayCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, means. stall_s: a loss holds training up, its work done again included, over `stalls` of them; join_s:
    that a replica comes in does, over `joins`; return_s: from a host's return until its replica has caught up, over
    `returns` that were seen, and those that the next strike or the end cut short as far as they go (Kaplan-Meier); None
    where none was seen; write_s: a save does, over `saves`, interval_s of training apart; step_s."""

    stall_s: float
    stalls: int
    join_s: float
    joins: int
    return_s: float | None
    returns: int
    write_s: float
    saves: int
    interval_s: float
    step_s: float


class ReplayComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Useful time of `seconds`: `measured` by the run's accounts, `predicted` by the plan; by how many `points`, and by
    what share of the prediction (`apart`) they differ. The accounts of both, as shares; `within`: `apart` is no more
    than `bound`. `outages`: how many the plan was told of."""

    measured: float
    predicted: float
    points: float
    apart: float
    bound: float
    within: bool
    seconds: float
    outages: int
    away: float
    measured_shares: dict[str, float]
    predicted_shares: dict[str, float]
    costs: ReplayCosts


class _Replay:
    """What the events of a run say of the stretch that is compared."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.begin_s = self.end_s = 0.0
        self.sums = dict.fromkeys(_ACCOUNTS, 0.0)
        self.changes = {"loss": [0, 0.0], "join": [0, 0.0]}
        self.writes: list[float] = []
        self.caught_up: list[tuple[float, str]] = []
        self.steps = self.every = 0
        self._hosts: dict[str, str] = {}
        self._agents: dict[str, str] = {}
        self._members = 0
        self._change = ""

    def take(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.RunStarted():
                every = event.config.get("checkpoint_every")
                self.every = every if isinstance(every, int) else 0
            case ev.AgentStarted():
                self._hosts[event.agent] = event.host
            case ev.ReplicaStarted():
                self._agents[event.replica] = event.agent
            case ev.JoinerCaughtUp():
                slot = event.replica.partition(".")[0]
                self.caught_up.append((event.at_s, self._hosts.get(self._agents.get(event.replica, ""), "")))
                self.caught_up.append((event.at_s, slot))
            case ev.ViewInstalled():
                self._members = len(event.members)
                self._change = "join" if event.planned and self._change != "loss" else "loss"
            case ev.ProgressMade() if event.committed >= 0:
                self._progress(event)
            case ev.CheckpointSaved() if self.begin_s:
                self.writes.append(event.blocked_s)
            case _:
                pass

    def _progress(self, event: ev.ProgressMade) -> None:
        if not self.begin_s:
            self.begin_s = event.committed_at_s if self._members >= self.replicas else 0.0
            self.end_s, self._change = self.begin_s, ""
            return
        self.end_s = event.committed_at_s
        self.steps += event.committed - event.first
        for name, seconds in event.seconds.items():
            self.sums[name] = self.sums.get(name, 0.0) + seconds
        held_s = event.seconds.get("recovery", 0.0) + event.seconds.get("lost", 0.0)
        if held_s and self._change:
            change = self.changes[self._change]
            change[0] += 1
            change[1] += held_s
            self._change = ""


def compared(
    events: Sequence[ev.AnyEvent],
    outages: Sequence[HostOutage],
    *,
    replicas: int,
    places: int,
    spares: int,
    bound: float = 0.05,
) -> ReplayComparison | None:
    """`places`: of machines that the `replicas` work on, as many on each. None where the run was never whole, or made
    no step after that."""
    from ._traced import replay
    from .traces import Failure, Trace

    seen = _Replay(replicas)
    for event in events:
        seen.take(event)
    wall_s = seen.end_s - seen.begin_s
    if wall_s <= 0 or not seen.steps:
        return None
    costs = _costs(seen, outages)
    empty = _empty(outages, costs.return_s, seen.begin_s, seen.end_s)
    failures = tuple(
        Failure(down_h=at_s / 3600, up_h=None if up_s is None else up_s / 3600, node=host, kind="host")
        for at_s, up_s, host in empty
    )
    trace = Trace(name="replayed", hours=wall_s / 3600, num_nodes=places + spares, failures=failures)
    found = replay(_job(costs, places, spares, wall_s, len(empty)), trace)
    measured, predicted = seen.sums["productive"] / wall_s, found.ettr().mean
    apart = (measured - predicted) / predicted if predicted else 0.0
    away_s = sum(min(wall_s, wall_s if up_s is None else up_s) - at_s for at_s, up_s, _ in empty)
    return ReplayComparison(
        measured=measured,
        predicted=predicted,
        points=100 * (measured - predicted),
        apart=apart,
        bound=bound,
        within=abs(apart) <= bound,
        seconds=wall_s,
        outages=len(empty),
        away=away_s / wall_s / (places + spares),
        measured_shares={name: seconds / wall_s for name, seconds in seen.sums.items()},
        predicted_shares=found.breakdown(),
        costs=costs,
    )


def _costs(seen: _Replay, outages: Sequence[HostOutage]) -> ReplayCosts:
    spans, whole = _returns(seen, outages)
    work_s = seen.sums["productive"] + seen.sums["degraded"]
    step_s = max(_LEAST_S, work_s / seen.steps)
    (losses, loss_s), (joins, join_s) = seen.changes["loss"], seen.changes["join"]
    return ReplayCosts(
        stall_s=loss_s / max(1, losses),
        stalls=int(losses),
        join_s=join_s / max(1, joins),
        joins=int(joins),
        return_s=_mean_s(spans, whole),
        returns=sum(whole),
        write_s=sum(seen.writes) / max(1, len(seen.writes)),
        saves=len(seen.writes),
        interval_s=seen.every * step_s,
        step_s=step_s,
    )


def _returns(seen: _Replay, outages: Sequence[HostOutage]) -> tuple[list[float], list[bool]]:
    """From when a host was there again until its replica had caught up, or until it was struck again or the end came
    before that; and whether it had caught up."""
    spans, whole = [], []
    for outage in outages:
        if outage.until_s is None or not seen.begin_s < outage.until_s < seen.end_s:
            continue
        struck_s = [other.at_s for other in outages if other.host == outage.host and other.at_s > outage.at_s]
        until_s = min([*struck_s, seen.end_s])
        back_s = [at_s for at_s, host in seen.caught_up if host == outage.host and outage.until_s <= at_s < until_s]
        spans.append(min([*back_s, until_s]) - outage.until_s)
        whole.append(bool(back_s))
    return spans, whole


def _mean_s(spans: Sequence[float], whole: Sequence[bool]) -> float | None:
    """Mean of the spans, of which some were cut short: the area under the curve of those that still last."""
    import numpy as np

    from outlast.core import reliability as rel

    if not any(whole):
        return None
    curve = rel.kaplan_meier(np.maximum(spans, _LEAST_S), np.array(whole))
    edges = np.concatenate(([0.0], curve.time, [max(spans)]))
    return float((np.diff(edges) * np.concatenate(([1.0], curve.value))).sum())


def _empty(
    outages: Sequence[HostOutage], return_s: float | None, begin_s: float, end_s: float
) -> list[tuple[float, float | None, str]]:
    """(from when, until when or None, whose) places are empty, in seconds of the stretch: until a replica that came
    back has caught up. A host that is struck again before that was empty all the while."""
    last: dict[str, tuple[float, float | None]] = {}
    found: list[tuple[float, float | None, str]] = []
    for outage in sorted(outages, key=lambda each: each.at_s):
        at_s = max(0.0, outage.at_s - begin_s)
        up_s = None if outage.until_s is None or return_s is None else outage.until_s + return_s - begin_s
        if outage.at_s >= end_s or (outage.until_s is not None and outage.until_s <= begin_s):
            continue
        before = last.get(outage.host)
        if before is not None and (before[1] is None or before[1] > at_s):
            at_s = before[0]
            found.remove((*before, outage.host))
        last[outage.host] = (at_s, up_s)
        found.append((at_s, up_s, outage.host))
    return sorted(found, key=lambda each: each[0])


def _job(costs: ReplayCosts, places: int, spares: int, wall_s: float, outages: int) -> Job:
    """The fleet as a job: others outlast the loss of a host and go on short of it. Whether a spare takes the place or
    the fleet shrinks, a change of members is a part of the stall."""
    change_s = min(costs.join_s, costs.stall_s)
    lost = FailureClass(
        name="host",
        node_mtbf_h=places * wall_s / 3600 / max(1, outages),
        masked=1.0,
        detection_s=0.0,  # the accounts count from the last step before it
        repair=1.0,
        source="replayed",
    )
    saves = costs.interval_s > 0
    near = Tier(name="disk", write_s=costs.write_s if saves else 0.0, recovery_s=costs.stall_s)
    return Job(
        name="this run", classes=(lost,), parameters=1.0, accelerators=places, accelerators_per_node=1,
        days=wall_s / 86_400, endless=True, tiers=(near,), interval="fixed",
        interval_s=costs.interval_s if saves else 2 * wall_s, mask_stall_s=costs.stall_s - change_s,
        reshape_s=change_s, swap_s=change_s, spares=spares, min_share=1 / places, on_vacancy="shrink",
        step_s=costs.step_s,
    )  # fmt: skip
