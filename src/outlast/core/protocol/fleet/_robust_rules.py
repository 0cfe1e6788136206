"""What the coordinator does for robust rules: write down what views are worth, and remove who lied as a reducer.

A reducer is removed when most members of its view found its slice to be false; a checker is, when most found that it
was right. Two members cannot tell who of them is wrong: the run ends, and says so.
"""

from __future__ import annotations

from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet import change as _change
from outlast.core.protocol.fleet._host_places import wait_in_vain
from outlast.core.protocol.fleet.state import FleetState
from outlast.core.protocol.slices import bucket_name, lane_and_bucket

__all__ = ["accused", "admitted", "tell_in_vain"]


def admitted(c: FleetState, now_s: float, told: m.Admitted) -> None:
    """For the record: whether the view's members compute, wait or stop, and how many liars it survives."""
    c.reports.held_back = told.view if told.action == "wait" else None
    c.journal(
        "rows_admitted",
        view=[told.view.epoch, told.view.n],
        step=told.step,
        action=told.action,
        tolerated=told.tolerated,
        most_rows=told.most_rows,
        trim_count=told.trim_count,
        lowered=told.lowered,
        reason=told.reason,
    )


def tell_in_vain(c: FleetState) -> None:
    """Say it once where the view's members wait for more and none can come: the restarts are used up, or every host
    that may have a replica has one."""
    if c.view is None or c.reports.held_back != c.view.id:
        return
    if hosts := wait_in_vain(c, c.view):
        c.reports.held_back = None
        text = f"view {c.view.id} waits for other hosts: the run's robust rule needs {hosts}"
        remedy = "outlast agent has another join, and a drained one is given back by outlast drain --undo"
        c.journal("notice", level="warning", text=f"{text}: {remedy}")
        return
    if c.roster.may_grow(c.view.members):
        return
    c.reports.held_back = None
    told = f"view {c.view.id} waits for more replicas, and none may be started any more ({c.roster.restarts} restarts)"
    remedy = "outlast scale --replicas starts another one; outlast stop ends the run"
    c.journal("notice", level="warning", text=f"{told}: {remedy}")


def accused(c: FleetState, now_s: float, told: m.Accused) -> None:
    """One member's finding. The step is held anyway: every member leaves the view."""
    if not c.roster.is_alive(told.member):
        return
    votes = c.roster.accusations.setdefault((told.view, told.step), {})
    votes[told.member] = told.culprit
    why = f"its slice of bucket {bucket_name(told.bucket)} in step {told.step} is not what the rows give"
    if told.culprit != told.reducer:
        why = f"it accused {told.reducer} falsely in step {told.step}"
    said = sorted(name for name, culprit in votes.items() if culprit == told.culprit)
    if len(told.members) == 2:
        if len(votes) == 1:
            _write(c, told, said, "stop")
            text = f"{told.accuser} and {told.reducer} disagree on a reduced slice, and two cannot tell who is wrong"
            c.finish("failed", 5, told.step, text)
    elif 2 * len(said) > len(told.members) and c.roster.is_alive(told.culprit):
        _write(c, told, said, "evict")
        c.condemn(told.culprit, why)
        if told.culprit in c.current:
            _change.begin(c, f"{told.culprit}: {why}")


_REMEDIES = {
    "evict": "take the device out of service and test it, or ask who controls its host; the run goes on without it",
    "stop": "start with three replicas or more: then it can be told which one is wrong; test the devices of both",
}


def _write(c: FleetState, told: m.Accused, said: list[str], decision: str) -> None:
    culprit = c.roster.peers.get(told.culprit)
    rank, bucket = lane_and_bucket(told.bucket)
    c.journal(
        "reducer_accused",
        replica=told.culprit,
        step=told.step,
        bucket=bucket,
        rank=rank,
        reducer=told.reducer,
        accuser=told.accuser,
        votes=said,
        members=list(told.members),
        decision=decision,
        host=culprit.agent if culprit else "",
        device=culprit.device if culprit else "",
        confidence=len(said) / len(told.members),
        remedy=_REMEDIES[decision],
    )
