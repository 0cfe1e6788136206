"""A run as its journal tells it: four replicas and a spare; one is killed, one hangs, the coordinator dies."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from outlast.core import events as ev
from outlast.core.step_parts import PairWait

START_S = 1_000.0


def started() -> list[ev.AnyEvent]:
    """The start: nothing has formed yet."""
    return [
        ev.RunStarted(
            at_s=START_S,
            run_id="brave-otter",
            command=["train.py"],
            num_replicas=4,
            num_spares=1,
            signature={},
            config={},
        ),
        ev.CoordinatorStarted(at_s=START_S + 0.1, epoch=1, pid=100, takeover=False),
        ev.AgentStarted(at_s=START_S + 0.2, agent="a0", pid=200),
        *(ev.ReplicaStarted(at_s=START_S + 0.3, replica=f"r{slot}.0", agent="a0", pid=300 + slot) for slot in range(5)),
    ]


def training() -> list[ev.AnyEvent]:
    """The first view, and a spare that has caught up."""
    return [
        ev.ViewInstalled(
            at_s=START_S + 1.9, epoch=1, n=1, members=[f"r{slot}.0" for slot in range(4)], cause="start",
            planned=False, num_microbatches=8,
        ),
        ev.ViewFormed(at_s=START_S + 2.0, epoch=1, n=1, step=0, roll_call_s=0.01),
        ev.JoinerServed(at_s=START_S + 2.5, replica="r4.0", step=3, donors=["r0.0", "r1.0"]),
        ev.JoinerCaughtUp(at_s=START_S + 3.0, replica="r4.0", step=5, seconds=0.5),
        ev.ProgressMade(
            at_s=START_S + 4.0, view=[1, 1], stable=20, losses=[(19, 4.0), (20, 3.0)], step_s=0.1, first=0,
            committed=20, committed_at_s=START_S + 4.0, seconds={"productive": 2.0},
        ),
    ]  # fmt: skip


def killed() -> list[ev.AnyEvent]:
    """r2 is killed; the run goes on with three, then the spare joins."""
    return [
        ev.ReplicaExited(
            at_s=START_S + 5.0, replica="r2.0", cause="signal", detail="SIGKILL", noticed_by="agent a0", step=30
        ),
        ev.ViewInstalled(
            at_s=START_S + 5.0, epoch=1, n=2, members=["r0.0", "r1.0", "r3.0"], cause="r2.0 died", planned=False
        ),
        ev.ViewFormed(at_s=START_S + 5.04, epoch=1, n=2, step=30, roll_call_s=0.01),
        ev.ProgressMade(
            at_s=START_S + 5.0, view=[1, 1], stable=29, losses=[], step_s=0.1, first=20, committed=30,
            committed_at_s=START_S + 5.0, seconds={"productive": 1.0},
        ),
        ev.Recovery(
            at_s=START_S + 5.05, cause="signal", replica="r2.0", noticed_by="agent a0", detect_s=0.01, downtime_s=0.05,
            microbatches_recomputed=2, lost_steps=0, step=30, view=[1, 2], detail="SIGKILL",
        ),
        ev.ReplicaStarted(at_s=START_S + 6.0, replica="r2.1", agent="a0", pid=400),
        ev.ViewInstalled(
            at_s=START_S + 6.95, epoch=1, n=3, members=["r0.0", "r1.0", "r3.0", "r4.0"], cause="planned",
            planned=True,
        ),
        ev.ViewFormed(at_s=START_S + 7.05, epoch=1, n=3, step=50, roll_call_s=0.01),
        ev.ProgressMade(
            at_s=START_S + 8.0, view=[1, 3], stable=60, losses=[(60, 2.0)], step_s=0.1, first=30, committed=60,
            committed_at_s=START_S + 8.0,
            seconds={"productive": 2.4, "degraded": 0.5, "recovery": 0.06, "lost": 0.04},
        ),
    ]  # fmt: skip


def coordinator_lost() -> list[ev.AnyEvent]:
    """The coordinator dies and another takes over."""
    return [
        ev.CoordinatorLost(at_s=START_S + 8.5, epoch=1, cause="SIGKILL", noticed_by="launcher"),
        ev.CoordinatorStarted(at_s=START_S + 8.9, epoch=2, pid=101, takeover=True),
        ev.Recovery(
            at_s=START_S + 8.9, cause="coordinator", replica="coordinator", noticed_by="launcher", detect_s=0.0,
            downtime_s=0.0, microbatches_recomputed=0, lost_steps=0, step=60, view=[1, 3], detail="SIGKILL",
        ),
    ]  # fmt: skip


def finished() -> list[ev.AnyEvent]:
    """The end."""
    return [
        ev.ProgressMade(
            at_s=START_S + 11.0,
            view=[1, 3],
            stable=90,
            losses=[(90, 1.0)],
            step_s=0.1,
            first=60,
            committed=90,
            committed_at_s=START_S + 11.0,
            seconds={"productive": 3.0},
        ),
        ev.StepAnatomy(
            at_s=START_S + 11.1,
            replica="r0.0",
            steps=90,
            seconds={"load": 0.9, "compute": 5.4, "exchange": 0.9, "wait": 1.8},
            waits={"r1.0": PairWait(waited_s=0.2, exchanges=90), "r3.0": PairWait(waited_s=1.6, exchanges=90, late=9)},
            batches=(185, 5.4),
        ),
        ev.StepAnatomy(
            at_s=START_S + 11.1,
            replica="r3.0",
            steps=90,
            seconds={"load": 0.9, "compute": 7.2, "exchange": 0.9, "wait": 0.1},
        ),
        ev.RunFinished(at_s=START_S + 12.0, outcome="finished", steps=91, detail="", exit_code=0, seconds={}),
    ]


@dataclass(frozen=True, kw_only=True)
class Story:
    """The run's chapters, each a list of events; `start_s`: when it began."""

    start_s: float
    started: list[ev.AnyEvent]
    training: list[ev.AnyEvent]
    killed: list[ev.AnyEvent]
    coordinator_lost: list[ev.AnyEvent]
    finished: list[ev.AnyEvent]

    @property
    def whole(self) -> list[ev.AnyEvent]:
        return [*self.started, *self.training, *self.killed, *self.coordinator_lost, *self.finished]


@pytest.fixture(scope="session")
def story() -> Story:
    return Story(
        start_s=START_S,
        started=started(),
        training=training(),
        killed=killed(),
        coordinator_lost=coordinator_lost(),
        finished=finished(),
    )
