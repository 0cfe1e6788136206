"""What a coordinator takes over from one that did not live to tell it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from outlast.core import events as ev
from outlast.core.protocol import Coordinator, Settings, View, ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet.reports import Reports
from outlast.journal import Journal
from outlast.runtime.coordinator._recalled import unreported

APART_S = 1000.0
INSTALLED = ev.ViewInstalled(
    at_s=1000.9, epoch=1, n=1, members=["r0.1", "r0.2"], cause="start", planned=False, num_microbatches=8
)
FORMED = ev.ViewFormed(at_s=1001.0, epoch=1, n=1, step=0, roll_call_s=0.0)
DEAD = ev.ReplicaExited(at_s=1010.0, replica="r0.1", cause="signal", detail="SIGSEGV", noticed_by="agent", step=10)
LOST = ev.FleetGone(at_s=1010.1, step=10, detail="r0.1: signal")
BACK = ev.ViewFormed(at_s=1030.0, epoch=5, n=1, step=4, roll_call_s=0.0)


GONE = ev.ReplicaExited(at_s=1031.0, replica="r0.2", cause="signal", detail="SIGSEGV", noticed_by="agent", step=4)
ONCE_MORE = ev.FleetGone(at_s=1031.1, step=4, detail="r0.2: signal")
TOLD = ev.Recovery(
    at_s=1031.0, cause="signal", replica="r0.1", noticed_by="agent", detect_s=0.0, downtime_s=20.0, step=4,
    microbatches_recomputed=0, lost_steps=6, view=[5, 1], detail="",
)  # fmt: skip
OF_BEFORE = ev.Recovery(
    at_s=1012.0, cause="signal", replica="r1.1", noticed_by="agent", detect_s=0.0, downtime_s=0.1, step=3,
    microbatches_recomputed=0, lost_steps=0, view=[4, 1], detail="",
)  # fmt: skip


@pytest.mark.parametrize(
    ("story", "lost_steps"),
    [
        ([FORMED, DEAD], 6),  # who has taken over finds out that nobody is left
        ([FORMED, DEAD, LOST], 6),
        ([FORMED, DEAD, LOST, BACK], 6),
        ([FORMED, DEAD, LOST, OF_BEFORE], 6),
        ([FORMED, DEAD, LOST, OF_BEFORE, BACK], 6),
        ([FORMED, DEAD, LOST, BACK, OF_BEFORE], 6),
        ([FORMED, DEAD, LOST, BACK, GONE, ONCE_MORE], 6),
        ([FORMED, DEAD, LOST, BACK, TOLD, GONE, ONCE_MORE], 0),
        ([FORMED, DEAD, LOST, BACK, GONE, msgspec.structs.replace(ONCE_MORE, step=7), TOLD], 3),
    ],
)
def test_steps_lost_with_the_fleet_are_told_whoever_is_there_when_it_is_back(
    tmp_path: Path, story: list[Any], lost_steps: int
) -> None:
    with Journal.create(tmp_path) as journal:
        for event in (INSTALLED, *story):
            journal.append(event)
        journal.flush(10.0)
        found = unreported(journal, APART_S)
    told: list[dict[str, Any]] = []
    reports = Reports(lambda kind, **fields: told.append(fields))
    reports.recall(*found)
    if LOST not in story:
        reports.fleet_lost(reports.steps)
    view = ViewId(5, 1)
    reports.formed["r0.2"] = m.Formed(member="r0.2", view=view, step=4, left_at_s=0.0, formed_at_s=30.0)
    reports.recoveries(view)
    reports.committed(9.9, 30.2)
    reports.resumed()
    dead = [e.replica for e in story if isinstance(e, ev.ReplicaExited)]
    assert [recovery["replica"] for recovery in told] == (dead[1:] if TOLD in story else dead)
    assert {recovery["lost_steps"] for recovery in told} == {lost_steps}
    assert [recovery["downtime_s"] for recovery in told] == pytest.approx([20.3] * len(told))


@pytest.mark.parametrize(
    ("told", "untold"),
    [
        ([], {"r0.1"}),
        ([DEAD], set()),
        ([ev.AgentLost(at_s=1010.0, agent="a0", cause="SIGKILL", replicas=["r0.1"])], set()),
    ],
)
def test_who_was_put_out_while_its_agent_could_not_say_that_it_had_ended_is_told_when_it_can(
    tmp_path: Path, told: list[Any], untold: set[str]
) -> None:
    """The coordinator died before the agent was continued; the end was in no journal."""
    out = ev.Suspected(at_s=1009.0, replica="r0.1", evidence="its connection to a peer ended", decision="evict")
    waits = ev.Suspected(at_s=1009.0, replica="r0.2", evidence="slow", decision="wait")
    with Journal.create(tmp_path) as journal:
        for event in (INSTALLED, FORMED, out, waits, *told):
            journal.append(event)
        journal.flush(10.0)
        found = unreported(journal, APART_S)
    assert found[2] == untold
    view = View(id=ViewId(1, 2), members=("r0.2",))
    record = m.FleetRecord(view=view, incarnations={"r0": 2}, placement={"r0.2": "a0"}, formed=True)
    c = Coordinator(Settings(num_replicas=2), 2, record)
    c.reports.recall(*found)
    c.handle(14.0, m.AgentHello(agent="a0", pid=1, members=("r0.2",)))
    gone = m.Exited(member="r0.1", cause="signal", detail="SIGSEGV", noticed_at_s=9.5, committed=7)
    written = [
        (a.fields["replica"], a.fields["cause"], a.fields["step"])
        for _ in range(2)
        for a in c.handle(14.1, gone)
        if isinstance(a, m.JournalEntry) and a.kind == "replica_exited"
    ]
    assert written == [("r0.1", "signal", 7)] * bool(untold)
