"""A failure log as the strikes of a run: which failures, dealt to whom, and what the run is told to have come to."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tests.prove.test_script_report import report, result

from outlast.cli import main
from outlast.cli._prove_report import exit_code, replayed_words
from outlast.errors import ConfigError
from outlast.plan.replay_comparison import ReplayComparison, ReplayCosts
from outlast.plan.traces import read_trace
from outlast.prove.host_namespaces import unavailable
from outlast.prove.script_page import page_of
from outlast.prove.script_plan import Shape, planned, read_schedule, schedule_of
from outlast.prove.striker import StrikeDone, Striker, StrikeRecord
from outlast.prove.trace_outcome import outages_of, outcome_of
from outlast.prove.trace_schedule import Hit, busiest

SCRIPTS = Path(__file__).parent / "scripts"

HITS = [
    Hit(1.0, "n7", ""), Hit(50.0, "n1", "gpu"), Hit(50.5, "n2", "NCCL timeout"), Hit(51.0, "n1", "gpu"),
    Hit(99.0, "n3", ""),
]  # fmt: skip


def test_the_busiest_stretch_of_a_log_becomes_seconds() -> None:
    stretch = busiest(HITS, hours=2.0, most=8)
    assert (stretch.start_h, stretch.machines, stretch.failures) == (50.0, 2, 3)
    strikes, faults = read_schedule(stretch.schedule(replicas=2, trains_s=10.0))
    assert faults == ()
    assert [strike.wait_s for strike in strikes] == [0.0, 2.25, 2.25], "two hours are nine seconds"
    assert [strike.named for strike in strikes] == ["kill", "stop", "kill"]
    assert [strike.pick for strike in strikes] == [0.25, 0.75, 0.25], "a machine that fails again is the same replica"
    assert stretch.scale(10.0) == pytest.approx(2 / 9)
    assert busiest(HITS, hours=1000.0, most=8).hits == tuple(HITS)
    few = busiest(HITS, hours=1000.0, most=2)
    assert (few.hits, few.failures) == (tuple(HITS[:2]), 5)


def test_hosts_are_away_for_as_long_as_their_machines_were() -> None:
    hits = [
        Hit(0.0, "n1", "", 1.0), Hit(0.5, "n3", "", 0.6), Hit(1.5, "n2", "NCCL timeout", None),
        Hit(2.0, "n1", "", 2.001), Hit(3.0, "n2", "", 4.0),
    ]  # fmt: skip
    stretch = busiest(hits, hours=9.0, most=8)
    strikes, faults = read_schedule(stretch.schedule_of_hosts(3, trains_s=10.0))
    assert faults == ()
    assert [strike.named for strike in strikes] == ["power", "hang", "power"], "n3 is on n1's host, which is away"
    assert [strike.continue_s for strike in strikes] == [1.0, 9.0, 0.2], "n2 was not seen again"
    assert [strike.wait_s for strike in strikes] == [0.0, 1.5, 0.5]
    assert {strike.roles[0] for strike in strikes} == {"host"}
    assert [strike.pick for strike in strikes] == [0.25, 0.75, 0.25]


@pytest.mark.parametrize(
    ("hits", "hours", "most"), [([], 24.0, 8), (HITS, 0.0, 8), (HITS, math.nan, 8), (HITS, 24.0, 0)]
)
def test_a_stretch_that_is_none_is_refused(hits: list[Hit], hours: float, most: int) -> None:
    with pytest.raises(ConfigError, match="of a log with"):
        busiest(hits, hours, most)


def test_a_trace_needs_a_log_that_can_be_read_and_a_script(tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "scripts" / "cnn.py")
    log = tmp_path / "log.csv"
    log.write_text("time_h,node,event,level,class,desc\n1,n1,down,a,b,c\n")
    assert main(["prove", "trace", "--preset", "infinitehbd", str(log)]) == 2
    assert main(["prove", "trace", str(log), script]) == 2
    assert main(["prove", "trace", "--preset", "infinitehbd", str(tmp_path / "none.csv"), script]) == 2
    assert main(["prove", "trace", "--preset", "infinitehbd", "--hours", "0", str(log), script]) == 2


def test_only_failures_of_some_machines_are_replayed() -> None:
    hits = [Hit(hour + 0.1 * node, f"n{node}", "") for hour in range(3) for node in range(8)]
    stretch = busiest(hits, hours=9.0, most=100, machines=2)
    assert {hit.node for hit in stretch.hits} == {"n0", "n4"}
    assert (stretch.machines, stretch.failures, len(stretch.hits)) == (2, 24, 6)
    assert busiest(hits, hours=9.0, most=100, machines=9) == busiest(hits, hours=9.0, most=100)


SPOT = """trace,time_ms,event,node
p,0,add,a
p,0,add,b
p,3600000,remove,a
p,7200000,remove,b
p,10800000,add,c
p,14400000,remove,c
p,18000000,add,d
p,18000000,add,e
p,21600000,add,f
p,25200000,remove,f
"""


def test_who_joins_a_spot_fleet_fills_the_place_that_is_empty_longest(tmp_path: Path) -> None:
    log = tmp_path / "spot.csv"
    log.write_text(SPOT)
    trace = read_trace(str(log), preset_name="bamboo")
    assert [failure.up_h for failure in trace.failures] == [None] * 4, "no machine comes back"
    found = [(f.node, round(f.down_h, 6), f.up_h and round(f.up_h, 6)) for f in trace.by_place().failures]
    assert found == [
        ("place 0001", 1.0, 3.0), ("place 0002", 2.0, 5.0), ("place 0001", 4.0, 5.0), ("place 0003", 7.0, None)
    ]  # fmt: skip
    assert [node for _, node in trace.cut(2.5, 5.5).joined] == ["c", "d", "e"]
    fixed = read_trace(str(_hbd(tmp_path)), preset_name="infinitehbd")
    assert fixed.by_place() is fixed, "its machines come back themselves"


def _hbd(folder: Path) -> Path:
    log = folder / "log.csv"
    log.write_text("time_h,node,event,level,class,desc\n1,n1,down,a,b,c\n2,n1,up,a,b,c\n")
    return log


# --- from when on ----------------------------------------------------------------------------------------------------
def test_a_schedule_says_that_its_strikes_wait_until_all_train() -> None:
    text = "training,1:power~2:host:0.1"
    fleet = planned(0, 1, Shape(), text, 1, "auto", True)
    assert (fleet.from_training, schedule_of(fleet), len(fleet.strikes)) == (True, text, 1)
    assert not planned(0, 1, Shape(), "1:power~2:host:0.1", 1, "auto", True).from_training


class Driven:
    """In place of a run: who its journal says is in the view."""

    def __init__(self) -> None:
        self.members: list[str] = []


def test_strikes_wait_for_the_last_replica_and_for_a_step(tmp_path: Path) -> None:
    fleet = planned(0, 1, Shape(replicas=2), "training,1:power~2:host:0.1", 1, "auto", True)
    striker, run = Striker(tmp_path, fleet), Driven()
    run.members = ["r0.1", "r1.1"]
    assert not striker._all_train(run), "no step is made"  # type: ignore[arg-type]
    lines = [f"{step} {1.0 + step} 0x1p0\n" for step in range(11)]
    (tmp_path / "commits" / "r0.1.7").write_text("".join(lines[:3]))
    striker.log.read()
    assert not striker._all_train(run), "too few to know how long one takes"  # type: ignore[arg-type]
    with (tmp_path / "commits" / "r0.1.7").open("a") as log:
        log.write("".join(lines[3:]))
    striker.log.read()
    assert striker._all_train(run)  # type: ignore[arg-type]
    run.members = ["r0.1"]
    assert not striker._all_train(run)  # type: ignore[arg-type]


# --- what it came to -------------------------------------------------------------------------------------------------
def done(at_s: float, name: str, role: str, continued_s: float | None = None) -> StrikeDone:
    kind = "power" if role == "host" else "SIGKILL"
    return StrikeDone(at_s=at_s, kind=kind, role=role, pid=0, name=name, state="", continued_s=continued_s)  # type: ignore[arg-type]


def test_outages_are_what_was_done_and_not_what_was_meant() -> None:
    record = StrikeRecord(started_s=0.0, unix_s=1000.0)
    record.done = [done(3.0, "h2", "host", 4.5), done(5.0, "h1", "host"), done(6.0, "r1.2", "replica")]
    found = [(each.host, each.at_s, each.until_s) for each in outages_of(record)]
    assert found == [("h2", 1003.0, 1004.5), ("h1", 1005.0, None), ("r1", 1006.0, 1006.0)]


@pytest.mark.parametrize(
    ("shape", "replicas", "spares"),
    [
        (Shape(hosts=4, slots=2), 3, 1), (Shape(hosts=4, slots=1), 3, 0), (Shape(hosts=4), 3, 1),
        (Shape(hosts=4, slots=2), 6, 2),
    ],
)  # fmt: skip
def test_hosts_with_room_for_others_are_no_machines_of_a_plan(shape: Shape, replicas: int, spares: int) -> None:
    fleet = planned(0, 1, Shape(replicas=replicas, spares=spares), "training,1:power~2:host:0.1", 1, "auto", True)
    record = StrikeRecord(started_s=0.0, unix_s=0.0)
    record.done = [done(3.0, "h2", "host", 4.5)]
    assert outcome_of(fleet, shape, record, []) is None


def test_no_trace_is_compared_where_none_was_replayed() -> None:
    fleet = planned(0, 1, Shape(replicas=2, spares=0), "1:kill:replica:0.1", 1, "auto", True)
    assert outcome_of(fleet, Shape(), StrikeRecord(started_s=0.0, unix_s=0.0), []) is None


def told(apart: float) -> ReplayComparison:
    costs = ReplayCosts(
        stall_s=1.5, stalls=3, join_s=0.5, joins=2, return_s=None, returns=0, write_s=0.02, saves=4, interval_s=9.0,
        step_s=0.2,
    )  # fmt: skip
    return ReplayComparison(
        measured=0.5 * (1 + apart), predicted=0.5, points=50 * apart, apart=apart, bound=0.05,
        within=abs(apart) <= 0.05, seconds=80.0, outages=3, away=0.2, costs=costs,
        measured_shares={"productive": 0.5, "stalled": 0.01}, predicted_shares={"productive": 0.5},
    )  # fmt: skip


def test_what_it_came_to_is_told_and_fails_nothing_unless_asked() -> None:
    near, off = (report(result(0, replayed=told(apart))) for apart in (-0.04, 0.2))
    assert (exit_code(near, strict=True), exit_code(off, strict=False), exit_code(off, strict=True)) == (0, 0, 8)
    assert "48.0 % measured, 50.0 % by outlast plan for the same 3 outages" in replayed_words(told(-0.04))
    assert "-2.0 points, -4.0 %; within 5 %" in replayed_words(told(-0.04))
    assert "+20.0 %; NOT within 5 %" in replayed_words(told(0.2))
    assert "a return none was seen" in replayed_words(told(0.2))
    assert "not within 5 %" in page_of(off)
    assert "Beside the plan" not in page_of(report(result(0)))


# --- real hosts ------------------------------------------------------------------------------------------------------
@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(400)
def test_a_spot_fleet_s_trace_over_hosts_ends_with_the_same_bits_and_is_told_beside_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three places of a fleet of spot machines: two are taken away, and others come for them."""
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    minutes = [("add", "a", 0), ("add", "b", 0), ("remove", "a", 10), ("add", "c", 14), ("remove", "b", 50),
               ("add", "d", 55), ("remove", "c", 90)]  # fmt: skip
    log = tmp_path / "spot.csv"
    log.write_text("trace,time_ms,event,node\n" + "".join(f"p,{at * 60_000},{e},{n}\n" for e, n, at in minutes))
    words = ["--preset", "bamboo", "--only", "trace=p", "--hours", "1.5", "--hosts", "3", "--spares", "0", "--json"]
    script = [str(SCRIPTS / "paced.py"), "--steps", "160", "--takes", "0.2"]
    assert main(["prove", "trace", *words, str(log), *script]) == 0, "no lost run, no wrong bit"
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["same_bits"], found["fleet_lost"]) == ("held", 1, 0)
    (row,) = found["results"]
    assert [each["kind"] for each in row["done"]] == ["power"] * 3
    told = row["replayed"]
    assert 0.0 < told["predicted"] < 1.0
    assert told["apart"] == pytest.approx(told["measured"] / told["predicted"] - 1)
    assert told["costs"]["returns"] >= 1
    assert sum(told["predicted_shares"].values()) == pytest.approx(1.0)
    assert sum(told["measured_shares"].values()) == pytest.approx(1.0, abs=0.01)
