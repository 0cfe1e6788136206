"""Strikes from outside: what is drawn, what is seen of processes, what is judged wrong, and two fleets for real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outlast.cli import main
from outlast.core import events as ev
from outlast.prove._commit_log import Commit, CommitLog, StepWriter
from outlast.prove._patience import Patience
from outlast.prove._process_tree import (
    Running,
    first_queued_s,
    left_behind,
    processes,
    processor_s,
    queued_s,
    send,
    state_of,
)
from outlast.prove._strike_numbers import _lost_steps, number_findings
from outlast.prove.strike_findings import Undisturbed, Watched, judge
from outlast.prove.strike_plan import ROLES, STEPS, StruckFleet, fleet_of
from outlast.prove.striker import Life, StatusSample, StrangerSeen, StrikeDone, StrikeRecord

RIGHT = Undisturbed(fingerprint="f", losses=dict.fromkeys(range(STEPS), "0x1p0"), folder="")


# --- what is drawn ---------------------------------------------------------------------------------------------------
def test_fleets_are_drawn_by_their_numbers_alone_and_spread() -> None:
    fleets = [fleet_of(number, 3) for number in range(200)]
    assert fleets == [fleet_of(number, 3) for number in range(200)]
    assert fleets[:20] != [fleet_of(number, 4) for number in range(20)]
    assert {fleet.replicas for fleet in fleets} == {1, 2, 3, 4}
    for field, values in (
        ("spares", {0, 1}),
        ("agents", {1, 2}),
        ("exchange", {"shm", "c10d"}),
        ("keeps", {True, False}),
        ("stranger", {True}),
    ):
        assert {getattr(fleet, field) for fleet in fleets} == values
    assert {fleet.setting.dtype for fleet in fleets} == {"float32", "bfloat16"}
    assert len({fleet.setting.aggregation for fleet in fleets}) == 5
    assert {bool(fleet.setting.audit) for fleet in fleets} == {True, False}
    assert all(5 <= len(fleet.strikes) <= 17 for fleet in fleets)
    struck = {(strike.kind, strike.roles[0]) for fleet in fleets for strike in fleet.strikes}
    kinds = {"SIGKILL", "SIGSEGV", "SIGTERM", "SIGSTOP", "SIGSTOP, SIGCONT"}
    assert struck == {(kind, role) for kind in kinds for role in ROLES}
    assert all(set(strike.roles) == set(ROLES) for fleet in fleets for strike in fleet.strikes)


# --- what is seen of processes ---------------------------------------------------------------------------------------
def test_processes_are_known_by_their_logs_and_struck_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    environ = os.environ | {"OUTLAST_RUN_DIR": str(tmp_path.resolve())}
    started = {}
    for name in ("coordinator", "agent-a0.2"):
        with (tmp_path / "logs" / f"{name}.log").open("w") as log:
            started[name] = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log, env=environ)
    try:
        found = {seen.name: seen for seen in processes(os.getpid())}
        assert found["coordinator"].pid == started["coordinator"].pid
        assert found["a0.2"].pid == started["agent-a0.2"].pid
        assert len(left_behind(tmp_path, "")) == 2
        with (tmp_path / "logs" / "r0.1.log").open("w") as log:
            untold = {name: value for name, value in environ.items() if name != "OUTLAST_RUN_DIR"}
            started["r0.1"] = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log, env=untold)
        assert len(left_behind(tmp_path, "")) == 3, "one that has no environment, as in the middle of an exec"
        assert send(found["coordinator"], signal.SIGKILL)
        started["coordinator"].wait()
        assert not state_of(found["coordinator"])
        assert not send(found["coordinator"], signal.SIGKILL)
        assert not send(msgspec.structs.replace(found["a0.2"], born="0"), signal.SIGKILL), "another with its number"
        assert state_of(found["a0.2"])
    finally:
        for process in started.values():
            process.kill()
            process.communicate()
    assert left_behind(tmp_path, "") == []


def test_a_line_of_the_commit_log_is_read_once_and_whole(tmp_path: Path) -> None:
    writer, log = StepWriter(tmp_path, "r0.1"), CommitLog(tmp_path)
    writer.committed(0, 1.5)
    log.read()
    writer.committed(1, 0.1)
    (half,) = tmp_path.iterdir()
    with half.open("a") as file:
        file.write("2 17.")
    log.read()
    assert [(c.step, c.loss, c.who) for c in log.commits] == [(0, (1.5).hex(), "r0.1"), (1, (0.1).hex(), "r0.1")]
    assert log.newest_step() == 1
    assert log.newest_step(before_s=log.commits[0].at_s) == 0


# --- what is judged --------------------------------------------------------------------------------------------------
def finished(**changes: Any) -> ev.RunFinished:
    fields = {"at_s": 130.0, "outcome": "finished", "steps": STEPS, "detail": "", "exit_code": 0, "seconds": {}}
    return msgspec.convert(fields | changes, ev.RunFinished)


def hit(name: str = "r0.1", kind: str = "SIGKILL", role: Any = "replica") -> StrikeDone:
    return StrikeDone(at_s=5.0, kind=kind, role=role, pid=7, name=name, state="R")


def story(
    state: str = "finished", lost: int = 0, gone: int = 0, wall_s: float = 30.1, unexplained_s: float = 0.0
) -> Any:
    cost = {"wall_s": wall_s, "unexplained_s": unexplained_s}
    return {"state": state, "lost_steps": lost + gone, "gone_steps": gone, "cost": cost}


def watched(*, fleet: StruckFleet | None = None, steps: int = STEPS, **changes: Any) -> Watched:
    """A fleet of which r0.1 was killed at 5 s, which was told, and r1.1 reached the end."""
    record = StrikeRecord(
        started_s=1000.0, unix_s=100.0, ended_s=30.0, exit_code=0, done=[hit()],
        lives=[
            Life(name="r0.1", pid=7, first_s=1.0, last_s=5.0), Life(name="r1.1", pid=8, first_s=1.0, last_s=29.9)
        ],
        why=story(), status={"step": steps},
    )  # fmt: skip
    exited = ev.ReplicaExited(at_s=105.1, replica="r0.1", cause="signal", detail="SIGKILL", noticed_by="agent")
    fields: dict[str, Any] = {
        "fleet": fleet or msgspec.structs.replace(fleet_of(0, 1), keeps=False, stranger=False), "record": record,
        "commits": [Commit(1006.0 + 0.05 * step, step, "0x1p0", "r1.1") for step in range(steps)],
        "events": [exited, finished()], "ends": [("r1.1.8", {"fingerprint": "f"})], "folder": Path(),
    }  # fmt: skip
    for key, value in changes.items():
        if key in fields:
            fields[key] = value
        else:
            setattr(record, key, value)
    told = [event for event in fields["events"] if isinstance(event, ev.Recovery)]
    rows = [{"kind": "recovery", **msgspec.to_builtins(event)} for event in told]
    sums = {name: sum(row[name] for row in rows) for name in ("downtime_s", "microbatches_recomputed")}
    record.why = {"timeline": rows, **sums, **record.why}
    return Watched(**fields)


def checks(seen: Watched) -> set[str]:
    return {finding.check for finding in judge(seen, RIGHT)[1]}


def test_a_fleet_with_the_bits_and_the_numbers_has_no_findings() -> None:
    assert judge(watched(), RIGHT) == ("same bits", [])


def recovered(downtime_s: float) -> ev.Recovery:
    return ev.Recovery(
        at_s=116.0, cause="signal", replica="r0.1", noticed_by="agent", detect_s=0.1, downtime_s=downtime_s,
        microbatches_recomputed=4, lost_steps=0, step=200, view=[1, 2],
    )  # fmt: skip


def test_a_downtime_is_a_pause_of_the_stopwatch() -> None:
    late = [commit._replace(at_s=commit.at_s + 0.6 * (commit.step >= 200)) for commit in watched().commits]
    assert judge(watched(commits=late, events=[*watched().events, recovered(0.65)]), RIGHT) == ("same bits", [])


def test_who_takes_over_tells_the_step_once_more_that_it_was_handed() -> None:
    late = [
        commit._replace(who="r0.1") if commit.step < 200 else commit._replace(at_s=commit.at_s + 0.6)
        for commit in watched().commits
    ]
    late.insert(200, late[199]._replace(at_s=late[200].at_s - 0.04, who="r1.1"))
    assert judge(watched(commits=late, events=[*watched().events, recovered(0.65)]), RIGHT) == ("same bits", [])


def test_a_downtime_that_began_before_the_first_commit_cannot_be_measured() -> None:
    early = msgspec.structs.replace(recovered(4.0), at_s=106.2)  # the first commit was at 106.0
    assert judge(watched(events=[*watched().events, early]), RIGHT) == ("same bits", [])
    assert checks(watched(events=[*watched().events, recovered(12.0)])) == {"why: downtime"}  # longer than it trained


ODD = [*watched().commits[:-1], Commit(1026.0, STEPS - 1, "0x1p1", "r1.1")]
LOST = finished(outcome="failed", exit_code=6, detail="all replicas failed")
FAILED = finished(outcome="failed", exit_code=5, detail="two replicas failed in step 3")
GONE = ev.ReplicaExited(at_s=105.1, replica="r1.1", cause="evicted", detail="silent", noticed_by="peers")

SPOKEN = ev.Refused(at_s=110.0, reason="no answer", peer="?", count=1)


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"commits": ODD}, "bits"),
        ({"ends": [("r1.1.8", {"fingerprint": "g"})]}, "bits"),
        ({"ends": []}, "end"),
        ({"steps": 17}, "end"),
        ({"hung": "no step and no end"}, "hang"),
        ({"exit_code": None}, "end"),
        ({"exit_code": -9}, "end"),
        ({"exit_code": 5, "events": [FAILED]}, "end"),
        ({"exit_code": 6, "events": [finished()]}, "end"),
        ({"exit_code": 6, "events": [LOST], "steps": 17}, "end"),  # r1.1 held the state and was not struck
        ({"left": ["process 8"]}, "left behind"),
        ({"why": {"error": "Traceback"}}, "why"),
        ({"why": story(state="failed")}, "why: state"),
        ({"why": story(wall_s=28.0)}, "why: wall"),
        (
            {"why": story(lost=2)},
            "why: lost steps",
        ),
        (
            {"why": story(unexplained_s=0.5)},
            "why: unexplained",
        ),
        ({"status": {"step": 0}}, "status: step"),
        ({"events": [*watched().events, recovered(0.6)]}, "why: downtime"),
        ({"events": [finished()]}, "journal: deaths"),
        ({"events": [*watched().events, GONE]}, "journal: blame"),
        ({"events": [*watched().events, SPOKEN]}, "journal: strangers"),
    ],
)
def test_what_is_wrong_is_found(changes: dict[str, Any], check: str) -> None:
    assert check in checks(watched(**changes))


def test_a_stranger_is_told_of_where_there_was_one() -> None:
    fleet = msgspec.structs.replace(fleet_of(0, 1), keeps=False, stranger=True)
    member, launcher = (StrangerSeen(reached={name: 400}) for name in ("r0.1", "launcher"))
    heard = StrangerSeen(told_secret=["tcp of the launcher"])
    assert checks(watched(fleet=fleet, stranger=member)) == {"journal: strangers"}
    assert checks(watched(fleet=fleet, stranger=launcher)) == set()  # who answers everybody tells of nobody
    assert checks(watched(fleet=fleet, stranger=heard)) == {"strangers: secret"}
    assert checks(watched(fleet=fleet, stranger=member, events=[*watched().events, SPOKEN])) == set()


def test_who_may_have_been_a_process_that_was_struck_is_no_untrue_stranger_once_something_was_struck() -> None:
    half = msgspec.structs.replace(SPOKEN, reason="a connection that ended before it proved anything")
    told = {"events": [*watched().events, half]}
    assert "journal: strangers" in checks(watched(**told, done=[]))
    assert "journal: strangers" not in checks(watched(**told, done=[hit()]))


def test_a_loss_is_true_when_all_who_held_the_state_were_struck_and_nothing_was_kept() -> None:
    lost: dict[str, Any] = {
        "exit_code": 6, "steps": 17, "why": story(state="failed", gone=17),
    }  # fmt: skip
    told = watched().events[0]
    struck = [hit(), hit("r1.1")]
    assert judge(watched(**lost, events=[told, LOST], done=struck), RIGHT) == ("fleet lost", [])
    under = ev.ReplicaStarted(at_s=101.0, replica="r1.1", agent="a0", pid=8)
    ended = ev.AgentLost(at_s=105.0, agent="a0", cause="SIGKILL", replicas=["r1.1"])
    by_agent = [hit(), hit("a0", role="agent")]
    assert judge(watched(**lost, events=[under, told, ended, LOST], done=by_agent), RIGHT)[0] == "fleet lost"
    saved = msgspec.convert(
        {"at_s": 1.0, "step": 9, "generation": 0, "view": [1, 1], "num_writers": 1, "state_bytes": 1, "url": "",
         "written_bytes": 1, "blocked_s": 0.0, "copied_s": 0.0, "durable_s": 0.0, "reason": ""}, ev.CheckpointSaved,
    )  # fmt: skip
    assert judge(watched(**lost, events=[saved, told, LOST], done=struck), RIGHT)[0] == "wrong"
    asked = msgspec.structs.replace(LOST, outcome="stopped", exit_code=143, detail="every replica was asked to leave")
    stopped = lost | {"exit_code": 143}
    assert judge(watched(**stopped, events=[saved, told, asked], done=struck), RIGHT)[0] == "wrong"
    early = msgspec.structs.replace(saved, reason="r0.1 was asked to leave")
    assert "end" in checks(watched(**stopped, events=[early, told, asked], done=struck)), "steps after it are lost"
    kept = msgspec.structs.replace(early, step=STEPS)
    assert "end" not in checks(watched(**stopped, events=[kept, told, asked], done=struck))


@pytest.mark.parametrize(
    ("asked_s", "said", "check"),
    [
        (12.0, {"step": 119, "step_at_s": 111.9}, None),
        (12.0, {"step": 119, "step_at_s": 112.1}, "status: age"),
        (12.0, {"step": 300, "step_at_s": 121.0}, "status: step"),
        (12.0, {"step": 20, "step_at_s": 107.0}, None),  # old, as it says
        (33.0, {"step": STEPS, "step_at_s": 125.95}, "status: state"),
        (33.0, {"step": STEPS, "step_at_s": 125.95, "detail": "the end of the script is awaited"}, None),
        (33.0, {"step": STEPS, "step_at_s": 125.95, "state": "stalled"}, None),
        (12.0, {"error": "Traceback"}, "status"),
    ],
)
def test_what_status_prints_meanwhile_is_held_against_the_stopwatch(
    asked_s: float, said: dict[str, Any], check: str | None
) -> None:
    said = {"state": "training", "detail": "", **said}
    seen = watched(samples=[StatusSample(asked_s=asked_s, answered_s=asked_s + 0.2, said=said)])
    found = number_findings(seen.fleet, seen.record, seen.commits, seen.events)
    assert {name for name, _ in found} == ({check} if check else set())


def test_a_step_that_only_the_dead_had_committed_may_be_in_no_line_of_the_log() -> None:
    """It told the step to its agent, and died before its script wrote it down; the step was made again later."""
    said = {"state": "training", "detail": "", "step": 119, "step_at_s": 112.1}
    sample = StatusSample(asked_s=12.2, answered_s=12.3, said=said)
    for struck_s, right in ((12.15, True), (12.7, False), (11.9, False)):
        seen = watched(samples=[sample], done=[hit(), msgspec.structs.replace(hit("r1.1"), at_s=struck_s)])
        found = {name for name, _ in number_findings(seen.fleet, seen.record, seen.commits, seen.events)}
        assert found == (set() if right else {"status: age"})


def test_who_works_or_waits_for_a_processor_does_not_hang_yet() -> None:
    """On a machine where starting a process took minutes, a fleet that was still starting was called hung."""
    sums = {"worked": 0.0, "queued": 0.0}
    patience = Patience(30.0, lambda seen: (sums["worked"], sums["queued"]))
    one = Running(pid=1, name="r0.1", born="7")
    given = []
    for now_s, worked, queued in ((11.0, 0, 0), (22.0, 1, 0), (33.0, 2, 9), (44.0, 2, 18), (55.0, 2, 18)):
        sums |= {"worked": worked, "queued": queued}
        patience.look(now_s, [one])
        given.append(patience.seconds(now_s))
    assert given == [30.0, 120.0, 1920.0, 480.0, 30.0]
    mine = Running(pid=os.getpid(), name="r0.1", born="")
    assert queued_s(mine) >= 0.0
    gone = msgspec.structs.replace(mine, pid=2**22 + 1)
    assert queued_s(gone) == first_queued_s(gone) == 0.0


def test_two_that_want_one_processor_wait_for_it() -> None:
    wants = "import os\nos.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\nprint(flush=True)\nwhile True: pass"
    both = [subprocess.Popen([sys.executable, "-c", wants], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for process in both:
            assert process.stdout is not None
            process.stdout.readline()
        one = Running(pid=both[0].pid, name="", born=Path(f"/proc/{both[0].pid}/stat").read_text().split()[21])
        before_s, used_s = first_queued_s(one), processor_s(one)
        while processor_s(one) < used_s + 0.2:
            with pytest.raises(subprocess.TimeoutExpired):
                both[0].wait(0.01)
        assert first_queued_s(one) > before_s + 0.05
    finally:
        for process in both:
            process.kill()
            process.communicate()


# --- the command -----------------------------------------------------------------------------------------------------
def test_the_command_refuses_what_cannot_be(tmp_path: Path) -> None:
    assert main(["prove", "strikes", "--fleets", "0"]) == 2
    (tmp_path / "results").write_text("no result\n")
    assert main(["prove", "strikes", "--resume", str(tmp_path / "results")]) == 2


@pytest.mark.campaign
@pytest.mark.soak
@pytest.mark.process
@pytest.mark.timeout(300)
def test_fleets_that_are_struck_from_outside_end_with_the_same_bits_or_truly_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a fresh seed each time, which the report names."""
    args = ["prove", "strikes", "--fleets", "2", "--minutes", "1", "--json"]
    main([*args, "--resume", str(tmp_path / "results"), "--keep", str(tmp_path / "runs")])
    report = json.loads(capsys.readouterr().out)
    assert report["outcomes"]["wrong"] == 0, json.dumps(report, indent=1)
    assert sum(row["same bits"] + row["fleet lost"] for row in report["table"]) == report["strikes"] > 0
    again = main([*args, "--resume", str(tmp_path / "results"), "--fleets", str(report["fleets"])])
    assert json.loads(capsys.readouterr().out)["results"] == report["results"], again


def test_steps_of_a_fleet_that_is_lost_twice_with_no_step_between_are_done_twice_once() -> None:
    """At 110 s by the wall's clock and at 111: steps 8 and 9 are made again."""
    commits = [*(Commit(1000.0 + step, step, "0x1p0", "r0.1") for step in range(10))]
    commits += [Commit(1012.0 + step, step, "0x1p0", "r0.2") for step in range(8, 12)]
    record = watched().record
    at_s = record.unix_s - record.started_s
    lost = [ev.FleetGone(at_s=at_s + when_s, step=10, detail="") for when_s in (1010.0, 1011.0)]
    assert _lost_steps(record, commits, lost) == 2
    made_s = 1009.9  # whoever is killed as it commits writes nothing, and its block has the step
    told = ev.ProgressMade(
        at_s=at_s + 1009.99, view=[1, 1], stable=9, losses=[], step_s=0.0, messages=1, until=20, first=10,
        committed=11, committed_at_s=at_s + made_s, seconds={}, stalls=[],
    )  # fmt: skip
    for early_s, steps in ((0.001, 3), (0.1, 2)):
        killed = msgspec.structs.replace(hit(), at_s=made_s + early_s - record.started_s)
        assert _lost_steps(msgspec.structs.replace(record, done=[killed]), commits, [told, *lost]) == steps
