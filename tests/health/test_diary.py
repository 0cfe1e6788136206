"""The diary outlives runs, and anything done to its file; the ranking names lemons and says how sure it is."""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outlast.cli import main
from outlast.cli._run import _remember
from outlast.core import events as ev
from outlast.errors import ConfigError, EnvironmentFault
from outlast.health import Diary, DiaryEntry, default_diary, learn_run, rank_devices, records_of, suspicion
from outlast.journal import Journal


def entry(device: str = "gpu-1", kind: Any = "note", **more: Any) -> DiaryEntry:
    return DiaryEntry(**({"at_s": 1.0, "device": device, "kind": kind} | more))


def test_what_is_written_is_read_in_order(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "folder" / "diary.jsonl")
    assert diary.entries() == []
    rows = [entry(text=f"say {i} ü\n") for i in range(5)]
    diary.add(rows[0])
    diary.add(*rows[1:])
    assert Diary(diary.path).entries() == rows
    assert diary.skipped == {}


def test_a_line_that_was_cut_short_costs_itself_and_nothing_else(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "diary.jsonl")
    diary.add(*(entry(text=str(i)) for i in range(4)))
    whole = diary.path.read_bytes()
    newest = whole.rindex(b"\n", 0, -1) + 1
    for cut in range(newest + 1, len(whole) - 1, 7):
        diary.path.write_bytes(whole[:cut])
        assert [e.text for e in diary.entries()] == ["0", "1", "2"]
        assert diary.skipped == {"cut short": 1}
        diary.add(entry(text="after"))
        assert [e.text for e in diary.entries()] == ["0", "1", "2", "after"]


def test_damaged_lines_and_other_versions_are_left_out_and_counted(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "diary.jsonl")
    diary.add(*(entry(text=f"entry {i}") for i in range(4)))
    lines = diary.path.read_bytes().splitlines(keepends=True)
    lines[0] = lines[0].replace(b"entry 0", b"entry 9")
    lines[1] = lines[1].replace(b'"v":1', b'"v":2')
    lines.insert(2, b"\xff\xfe nonsense\n")
    lines.insert(3, b'{"v":3,"else":[]}\n')
    diary.path.write_bytes(b"".join(lines))
    assert [e.text for e in diary.entries()] == ["entry 2", "entry 3"]
    assert diary.skipped == {"damaged": 2, "of version 2": 1, "of version 3": 1}


def _write_many(path: Path, writer: int) -> None:
    for number in range(50):
        Diary(path).add(entry(device=f"gpu-{writer}", text=str(number)))


@pytest.mark.process
def test_several_processes_may_write_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(tmp_path / "diary.jsonl", i)) for i in range(3)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(60)
    diary = Diary(tmp_path / "diary.jsonl")
    found = diary.entries()
    assert (len(found), diary.skipped) == (150, {})
    assert [e.text for e in found if e.device == "gpu-1"] == [str(i) for i in range(50)]


def test_a_place_that_cannot_be_used_is_told_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        Diary(tmp_path / "file" / "diary.jsonl").add(entry())
    with pytest.raises(EnvironmentFault, match="cannot be read"):
        Diary(tmp_path).entries()
    with pytest.raises(ConfigError, match="bytes"):
        Diary(tmp_path / "diary.jsonl").add(entry(text="x" * 20_000))
    assert default_diary({"OUTLAST_DIARY": "/x/y"}) == Path("/x/y")
    assert default_diary({"XDG_STATE_HOME": "/s"}) == Path("/s/outlast/diary.jsonl")


def test_a_device_is_meant_by_a_part_of_its_name_if_it_is_the_only_one(tmp_path: Path) -> None:
    diary, rows = Diary(tmp_path / "diary.jsonl"), [entry("gpu-aa1"), entry("gpu-aa2"), entry("gpu-b")]
    assert diary.named("gpu-b", rows) == diary.named("b", rows) == "gpu-b"
    for wrong, words in (("aa", "may be 2 devices"), ("gpu-c", "knows no device"), ("", "knows no device")):
        with pytest.raises(ConfigError, match=words):
            diary.named(wrong, rows)


def fleet(seed: int) -> tuple[list[DiaryEntry], set[str]]:
    """200 devices for 2,000 hours at one failure in 5,000 hours; ten of them at twenty times that."""
    draw = np.random.default_rng(seed)
    lemons = {f"gpu-{i}" for i in range(10)}
    rows = []
    for i in range(200):
        device = f"gpu-{i}"
        rows.append(entry(device, "hours", hours=2000.0))
        rate = 1 / 250 if device in lemons else 1 / 5000
        rows += [entry(device, "failure")] * int(draw.poisson(2000 * rate))
    return rows, lemons


def test_lemons_come_first_with_how_sure_that_is() -> None:
    rows, lemons = fleet(0)
    ranked = rank_devices(records_of(rows))
    assert {r.device for r in ranked[:10]} == lemons
    assert sorted(r.lemon or 0 for r in ranked[:10])[5] > 0.8
    good = [r for r in ranked if r.device not in lemons]
    assert sum((r.lemon or 0) > 0.5 for r in good) == 0
    covered = [(r.rate_low or 0) <= (4.0 if r.device in lemons else 0.2) <= (r.rate_high or 0) for r in ranked]
    assert np.mean(covered) > 0.9


def test_the_chance_of_a_failure_within_a_week_follows_how_often_and_how_lately() -> None:
    rows, lemons = fleet(0)
    assert {row.at_s for row in rows} == {rows[0].at_s}
    now_s = rows[0].at_s + 60 * 86400.0
    calm = next(r.device for r in rank_devices(records_of(rows)) if r.device not in lemons and not r.failures)
    rows += [entry(calm, "failure", at_s=now_s)]
    lately = {r.device: r.week or 0 for r in rank_devices(records_of(rows))}
    rows[-1] = entry(calm, "failure", at_s=now_s - 30 * 86400.0)
    rows.append(entry("other", "note", at_s=now_s))
    long_ago = {r.device: r.week or 0 for r in rank_devices(records_of(rows))}
    assert 0.1 < lately[calm] - long_ago[calm] < 0.2, "most of `excite`"
    assert min(lately[name] for name in lemons) > np.mean([lately[name] for name in lately if name not in lemons])
    assert all(0 < chance < 1 for name, chance in long_ago.items() if name != "other")


def test_the_chance_of_a_failure_follows_the_age_at_which_others_failed() -> None:
    """100 devices of the same record, half of which worked four times as long; all failures came after 3,000 hours."""
    year_h, start_s, rows = 365.25 * 24, 1.7e9, []
    for i in range(100):
        old = i < 50
        worked = year_h * (4 if old else 1)
        rows.append(entry(f"gpu-{i}", "hours", at_s=start_s + 3600 * worked, hours=worked))
        if old and i % 2 == 0:
            rows.append(entry(f"gpu-{i}", "failure", at_s=start_s + 3600 * 3.5 * year_h))
    ranked = {r.device: r for r in rank_devices(records_of(rows))}
    assert ranked["gpu-0"].failed_after_h == [pytest.approx(3.5 * year_h)]
    assert (ranked["gpu-1"].week or 0) > 2 * (ranked["gpu-99"].week or 1), "neither has failed; one is at the age of it"


def test_a_new_device_with_one_failure_is_not_yet_a_lemon() -> None:
    rows, _ = fleet(0)
    rows += [entry("new", "hours", hours=5.0), entry("new", "failure"), entry("idle", "failure")]
    ranked = rank_devices(records_of(rows))
    new = next(r for r in ranked if r.device == "new")
    assert 0.02 < (new.lemon or 0) < 0.9
    assert (new.rate_high or 0) > 5 * (new.rate or 0) / 5 > 0
    assert (ranked[-1].device, ranked[-1].lemon) == ("idle", None)


def test_states_follow_from_what_was_written() -> None:
    def state(*kinds: Any) -> str:
        return records_of([entry(kind=k, hours=h) for k, h in kinds])[0].state

    assert state(("note", 0)) == "in service"
    assert state(("retired", 0)) == state(("returned", 0), ("retired", 0)) == "retired"
    assert state(("retired", 0), ("returned", 0)) == state(("repair", 0), ("hours", 99)) == "probation"
    assert state(("repair", 0), ("hours", 60), ("hours", 60)) == "in service"


def run_events() -> list[tuple[int, ev.AnyEvent]]:
    started = {"command": [], "num_replicas": 2, "num_spares": 0, "signature": {}, "config": {}}
    return list(enumerate([
        ev.RunStarted(at_s=0, run_id="abc", **started),
        ev.ReplicaStarted(at_s=0, replica="r0.1", agent="a0", pid=1),
        ev.ReplicaStarted(at_s=0, replica="r1.1", agent="a0", pid=2),
        ev.ReplicaExited(at_s=3600, replica="r1.1", cause="signal", detail="SIGKILL\nmore", noticed_by="agent"),
        ev.ReplicaStarted(at_s=3600, replica="r1.2", agent="a0", pid=3),
        ev.DeviceFinding(at_s=4000, replica="r1.2", host="a0", device="cpu", source="checks", step=3, microbatch=1,
                         evidence="mm did not add up", action="recomputed", remedy=""),
        ev.RunFinished(at_s=7200, outcome="finished", steps=9, detail="", exit_code=0, seconds={}),
    ], 1))  # fmt: skip


def test_a_run_is_learned_once() -> None:
    events = run_events()
    rows = learn_run(events, "node7", [])
    assert {(e.kind, e.device) for e in rows} == {
        ("failure", "node7/a0/r1"), ("finding", "node7/a0/r1"), ("hours", "node7/a0/r0"), ("hours", "node7/a0/r1"),
        ("learned", ""),
    }  # fmt: skip
    assert {e.device: e.hours for e in rows if e.kind == "hours"} == {"node7/a0/r0": 2.0, "node7/a0/r1": 2.0}
    assert learn_run(events, "node7", rows) == []
    assert learn_run(events[:1][:0], "node7", []) == []


def timed(own_s: list[float], steps: int = 200, ended: bool = True) -> list[tuple[int, ev.AnyEvent]]:
    """A run whose replicas spend so long on their own part of each step, and have told twice."""
    started = {"command": [], "num_replicas": len(own_s), "num_spares": 0, "signature": {}, "config": {}}
    rows: list[ev.AnyEvent] = [ev.RunStarted(at_s=0, run_id="abc", **started)]
    rows += [ev.ReplicaStarted(at_s=0, replica=f"r{i}.1", agent="a0", pid=i) for i in range(len(own_s))]
    for so_far in (steps // 2, steps):
        for i, seconds in enumerate(own_s):
            spent = {"load": 0.1 * seconds * so_far, "compute": 0.9 * seconds * so_far, "wait": 5.0 * so_far}
            rows.append(ev.StepAnatomy(at_s=so_far, replica=f"r{i}.1", steps=so_far, seconds=spent))
    if ended:
        rows.append(ev.RunFinished(at_s=900, outcome="finished", steps=9, detail="", exit_code=0, seconds={}))
    return list(enumerate(rows, 1))


def test_a_place_that_was_slower_than_the_others_has_a_note_and_no_finding() -> None:
    rows = learn_run(timed([0.08, 0.13, 0.08, 0.09]), "node7", [])
    assert [(e.device, e.text) for e in rows if e.kind == "note"] == [
        ("node7/a0/r1", "slow: its part of a step took 130 ms over 200 steps, 1.62 times the median of the other 3")
    ]
    (record,) = [r for r in records_of(rows) if r.device == "node7/a0/r1"]
    assert (record.failures, record.findings, record.last.partition(":")[0]) == (0, 0, "note")
    assert suspicion(record) == "", "slow is not wrong"


@pytest.mark.parametrize(
    "events",
    [
        timed([0.08, 0.13, 0.08], ended=False),  # it is told once, when the run is over
        timed([0.08, 0.13, 0.08], steps=60),  # too few steps
        timed([0.08, 0.13]),  # of two nobody can say which one is out of the ordinary
        timed([0.08, 0.09, 0.08]),
        timed([0.0010, 0.0016, 0.0010]),  # a fraction of a millisecond
    ],
)
def test_what_says_too_little_of_speed_is_no_note(events: list[tuple[int, ev.AnyEvent]]) -> None:
    assert [e for e in learn_run(events, "node7", []) if e.kind == "note"] == []


def test_a_host_that_joined_is_one_device_in_all_runs_whatever_its_process_was_called() -> None:
    """By its own name, as if it had started the run; an agent that was started again is the one that it follows."""
    started = {"command": [], "num_replicas": 2, "num_spares": 0, "signature": {}, "config": {}}
    finding = {"replica": "", "source": "readings", "step": -1, "microbatch": -1, "remedy": ""}
    rows = learn_run(list(enumerate([
        ev.RunStarted(at_s=0, run_id="abc", **started),
        ev.AgentStarted(at_s=0, agent="h1:4fa0", pid=1, host="h1", address="10.0.0.1"),
        ev.ReplicaStarted(at_s=0, replica="r0.1", agent="a0.2", pid=1),
        ev.ReplicaStarted(at_s=0, replica="r1.1", agent="h1:4fa0", pid=2),
        ev.DeviceFinding(at_s=5, host="h1:4fa0", device="mc0", evidence="edac.ue rose", action="fatal", **finding),
        ev.ReplicaExited(at_s=3600, replica="r1.1", cause="signal", detail="SIGKILL", noticed_by="agent"),
        ev.RunFinished(at_s=7200, outcome="finished", steps=9, detail="", exit_code=0, seconds={}),
    ], 1)), "node7", [])  # fmt: skip
    assert {(e.kind, e.device, e.host) for e in rows if e.kind != "learned"} == {
        ("failure", "h1/a0/r1", "h1"), ("hours", "h1/a0/r1", "h1"), ("hours", "node7/a0/r0", "node7"),
        ("finding", "h1/mc0", "h1"), ("alarm", "h1/a0", "h1"),
    }  # fmt: skip


def test_a_run_that_is_learned_while_it_runs_adds_up_to_the_same() -> None:
    events = run_events()
    for cut in range(1, len(events)):
        first = learn_run(events[:cut], "node7", [])
        both = first + learn_run(events, "node7", first)
        whole = records_of(learn_run(events, "node7", []))
        assert [
            (r.device, r.hours, r.failures, r.findings) for r in sorted(records_of(both), key=lambda r: r.device)
        ] == [(r.device, r.hours, r.failures, r.findings) for r in sorted(whole, key=lambda r: r.device)]


def test_an_end_that_the_script_brought_about_is_no_failure() -> None:
    events = run_events()
    for cause in ("exit", "exception", "left", "finished"):
        events[3] = (4, ev.ReplicaExited(at_s=3600, replica="r1.1", cause=cause, detail="", noticed_by="agent"))
        assert not any(e.kind == "failure" for e in learn_run(events, "node7", []))


def told(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any]:
    """(exit code, the JSON object)."""
    code = main(["health", *args, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_commands_from_an_empty_diary_to_a_retired_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTLAST_DIARY", str(tmp_path / "diary.jsonl"))
    assert main(["health", "ls"]) == 0
    assert "is empty" in capsys.readouterr().out
    with Journal.create(tmp_path / "run") as journal:
        for _, event in run_events():
            journal.append(event)
    assert told(capsys, "learn", str(tmp_path / "run"))[1]["added"] == {"failure": 1, "finding": 1, "hours": 2}
    assert told(capsys, "learn", str(tmp_path / "run"))[1]["added"] == {"failure": 0, "finding": 0, "hours": 0}
    code, listed = told(capsys, "ls")
    assert (code, [d["device"].rpartition("/")[2] for d in listed["devices"]]) == (0, ["r1", "r0"])
    assert told(capsys, "note", "r1", "fan replaced", "--repair")[1]["kind"] == "repair"
    assert told(capsys, "retire", "r1", "--reason", "again")[1]["kind"] == "retired"
    code, shown = told(capsys, "show", "r1")
    assert shown["record"]["state"] == "retired"
    assert [e["kind"] for e in shown["entries"]] == ["failure", "finding", "hours", "repair", "retired"]
    assert told(capsys, "retire", "r1", "--back")[1]["kind"] == "returned"
    assert told(capsys, "note", "gpu-9", "arrived", "--new")[0] == 0
    for args in (["ls"], ["show", "r1"]):
        assert main(["health", *args]) == 0
        assert "r1" in capsys.readouterr().out


def test_wrong_arguments_are_told_with_what_would_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTLAST_DIARY", str(tmp_path / "diary.jsonl"))
    for args, words in (
        (["show", "r1"], "knows no device"), (["note", "r1", "x"], "knows no device"),
        (["test", "--minutes", "-1"], "no duration"), (["test", "--size", "7"], "multiple of 4"),
        (["test", "--device", "cuda:99"], "cannot be used"), (["learn", str(tmp_path / "nowhere")], "remedy"),
    ):  # fmt: skip
        assert main(["health", *args]) == 2 or args[0] == "learn"
        assert words in capsys.readouterr().err


def test_a_test_is_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTLAST_DIARY", str(tmp_path / "diary.jsonl"))
    code, found = told(capsys, "test", "--device", "cpu", "--size", "32")
    assert (code, found["num_wrong"], found["rounds"]) == (0, 0, 1)
    (written,) = Diary(tmp_path / "diary.jsonl").entries()
    assert (written.kind, written.passed) == ("test", True)
    assert (tmp_path / "answers.json").exists()
    assert main(["health", "test", "--device", "cpu", "--size", "32", "--no-record"]) == 0
    assert "all" in capsys.readouterr().out
    assert len(Diary(tmp_path / "diary.jsonl").entries()) == 1


def test_a_run_is_remembered_where_a_diary_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal.create(tmp_path / "run") as journal:
        for _, event in run_events():
            journal.append(event)
    monkeypatch.setenv("OUTLAST_DIARY", str(tmp_path / "diary.jsonl"))
    _remember(tmp_path / "run")
    assert sum(e.kind == "failure" for e in Diary(tmp_path / "diary.jsonl").entries()) == 1
    monkeypatch.setenv("OUTLAST_DIARY", str(tmp_path))
    _remember(tmp_path / "run")
    assert "not in the diary" in capsys.readouterr().err


def test_reading_the_diary_needs_no_torch() -> None:
    import subprocess

    code = "import sys, outlast.health as h; h.Diary; h.rank_devices; h.learn_run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_options_before_a_command_s_name_mean_what_they_mean_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were read and left alone: `outlast health --diary X ls` listed the default diary."""
    monkeypatch.setenv("OUTLAST_DIARY", str(tmp_path / "default.jsonl"))
    mine, other = Diary(tmp_path / "mine.jsonl"), Diary(tmp_path / "other.jsonl")
    mine.add(entry("gpu-mine"))
    other.add(entry("gpu-other"))
    assert main(["health", "--diary", str(mine.path), "--json", "ls"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["diary"], [row["device"] for row in found["devices"]]) == (str(mine.path), ["gpu-mine"])
    assert main(["health", "--diary", str(mine.path), "ls", "--diary", str(other.path)]) == 0, "the nearer one counts"
    assert "gpu-other" in capsys.readouterr().out
