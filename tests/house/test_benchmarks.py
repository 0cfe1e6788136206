"""The benchmarks' arithmetic and harness: what they would report must be right before anything is measured."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def member(steps: Sequence[tuple[int, float]], *, num_computed: int = 2, again: dict[int, int] | None = None) -> Any:
    """A member that committed (step, at second) …, computing 0.01 s a microbatch."""
    from benchmarks._fleet import Commit, Member

    counts = [num_computed + (again or {}).get(index, 0) for index in range(len(steps))]
    commits = [
        Commit(step=step, at_s=at_s, compute_s=0.01 * count, num_computed=count)
        for (step, at_s), count in zip(steps, counts, strict=True)
    ]
    with socket.socket() as link:
        return Member(pid=1, rank=0, greeted_s=0.0, link=link, commits=commits)


def test_interruption_is_the_gap_less_a_median_step_and_what_was_computed_again() -> None:
    from benchmarks._analysis import measure_survivors

    calm = [(step, step * 0.1) for step in range(10)]
    kept = member([*calm, (10, 1.5), (11, 1.6), (12, 1.7)], again={10: 3})
    late = member([*calm, (10, 1.52), (11, 1.6), (12, 1.7)])
    found = measure_survivors([kept], at_s=0.95)
    assert found.net_s == pytest.approx(0.6 - 0.1 - 0.03)
    assert found.gross_s == pytest.approx(0.55)
    assert (found.recomputed, found.redone_steps) == (3, 0)
    assert measure_survivors([kept, late], at_s=0.95).net_s == pytest.approx(0.52), "the worst survivor counts"


def test_a_fault_after_the_last_exchange_shows_in_the_next_step() -> None:
    from benchmarks._analysis import measure_survivors

    calm = [(step, step * 0.1) for step in range(10)]
    found = measure_survivors([member([*calm, (10, 1.0), (11, 2.1), (12, 2.2)])], at_s=0.95)
    assert found.net_s == pytest.approx(1.0)


def test_steps_redone_in_the_same_process_are_taken_off() -> None:
    from benchmarks._analysis import measure_survivors

    calm = [(step, step * 0.1) for step in range(10)]
    again = [(8, 3.0), (9, 3.1), (10, 3.2), (11, 3.3)]
    found = measure_survivors([member([*calm, *again])], at_s=0.95)
    assert found.redone_steps == 2
    assert found.net_s == pytest.approx(3.2 - 0.9 - 0.3)


def test_restarted_processes_are_measured_to_the_first_step_beyond() -> None:
    from benchmarks._analysis import measure_restart, newest_step

    old = [member([(step, step * 0.1) for step in range(10)])]
    new = [member([(5 + step, 7.0 + step * 0.1) for step in range(8)])]
    reached = newest_step(old, 0.95)
    assert reached == 9
    found = measure_restart(old, new, 0.95, reached)
    assert found.redone_steps == 5
    assert found.net_s == pytest.approx((7.5 - 0.9) - 0.1 * 6)


def test_spread_and_bounds() -> None:
    from benchmarks._common import Bounds, spread

    assert spread([3.0, 1.0, 2.0]).median == 2.0
    assert spread([5.0]).quartile3 == 5.0
    with pytest.raises(ValueError, match="no samples"):
        spread([])
    bounds = Bounds()
    bounds.check("fast", 0.1, 0.1)
    assert bounds.hold
    bounds.check("slow", float("inf"), 0.1)
    assert not bounds.hold


def test_results_keep_the_other_sections(tmp_path: Path) -> None:
    from benchmarks._common import _replace_section

    page = tmp_path / "RESULTS.md"
    for name, text in [("a", "one"), ("b", "two"), ("a", "three")]:
        _replace_section(page, name, text)
    text = page.read_text()
    assert "one" not in text
    assert text.index("three") < text.index("two")


def test_models_have_the_parameters_that_their_names_say() -> None:
    from benchmarks._workload import MODELS, build

    for name in sorted(MODELS.keys() - {"none"}):
        millions = sum(p.numel() for p in build(name, 0)[0].parameters()) / 1e6
        assert millions == pytest.approx(float(name.removesuffix("M")), rel=0.02)


def test_the_formula_of_memory_counts_what_the_tree_holds_at_a_time() -> None:
    import torch
    from benchmarks._memory import BUCKET_BYTES, FIXED_BYTES, needs

    params = [torch.zeros(BUCKET_BYTES // 8) for _ in range(8)]  # two a bucket
    size = 4 * BUCKET_BYTES
    shared = needs(params, 4, 8, "shm")
    assert (shared.gradient, shared.sums, shared.ddp) == (size, 1, 2 * size)  # two leaves: the second joins the first
    assert shared.own == size + size + size // 4
    assert shared.mapped == 3 * size // 4 + 3 * size // 4  # of each peer: a slice of its sum, and its slice
    assert needs(params, 2, 8, "shm").sums == 2  # (0, 1), then 2 beside it
    assert needs(params, 1, 8, "shm").sums == 3
    assert needs(params, 4, 8, "c10d").own == size + size + 3 * size // 4
    assert needs(params, 1, 1, "c10d").over_ddp == FIXED_BYTES["c10d"]  # nothing that grows with the model


def test_every_benchmark_is_listed_with_a_line() -> None:
    from benchmarks.__main__ import available, main

    names = available()
    assert {"recovery", "overhead", "membership"} <= set(names)
    assert all(names.values())
    assert main([]) == 0
    assert main(["recoverry"]) == 2


@pytest.mark.process
def test_a_fleet_hears_its_members_and_leaves_nobody_behind() -> None:
    from benchmarks._fleet import Fleet

    worker = "from benchmarks._probe import Probe\np = Probe(3)\nfor step in range(10**9):\n"
    worker += "    with p.computing(): pass\n    p.commit(step)\n"
    with Fleet("two loops", [[sys.executable, "-c", worker]] * 2) as fleet:
        fleet.set_block(0)
        fleet.wait_for("commits", lambda: sum(len(m.commits) > 50 for m in fleet.living) == 2, 60)
        pids = [member.pid for member in fleet.members]
        assert [commit.step for commit in fleet.members[0].commits[:3]] == [0, 1, 2]
        assert fleet.members[0].commits[0].num_computed == 1
        os.kill(pids[0], signal.SIGKILL)
        fleet.wait_for("death", lambda: len(fleet.living) == 1, 60)
        os.kill(pids[1], signal.SIGSTOP)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.process
def test_a_block_ends_when_released_and_a_fleet_that_ends_is_reported() -> None:
    from benchmarks._fleet import Fleet, FleetStuck

    worker = "from benchmarks._probe import Probe\np = Probe(0)\nfor step in range(10): p.commit(step)\n"
    fleet = Fleet("one loop", [[sys.executable, "-c", worker]])
    fleet.set_block(5)
    with fleet:
        fleet.wait_for("first block", lambda: fleet.all_wait(1), 60)
        assert [commit.step for commit in fleet.members[0].commits] == [0, 1, 2, 3, 4]
        assert fleet.members[0].peak_bytes > 2**20
        fleet.release()
        fleet.wait_for("second block", lambda: fleet.all_wait(1), 60)
        fleet.release()
        with pytest.raises(FleetStuck, match="no third block"):
            fleet.wait_for("third block", lambda: fleet.all_wait(1), 60)


@pytest.mark.process
def test_a_harness_that_is_ended_leaves_nobody_behind() -> None:
    worker = "from benchmarks._probe import Probe\np = Probe(0)\nfor step in range(10**9): p.commit(step)\n"
    harness = f"""
import signal, sys
from benchmarks.__main__ import _ended
from benchmarks._fleet import Fleet
signal.signal(signal.SIGTERM, _ended)
with Fleet("one loop", [[sys.executable, "-c", {worker!r}]]) as fleet:
    fleet.wait_for("commits", lambda: any(m.commits for m in fleet.living), 60)
    print(fleet.members[0].pid, flush=True)
    fleet.wait_for("the end", lambda: False, 60)
"""
    for number, status in ((signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)):
        with subprocess.Popen([sys.executable, "-c", harness], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            watch = os.pidfd_open(pid)
            process.send_signal(number)
            assert process.wait(timeout=60) == status
            poll = select.poll()
            poll.register(watch, select.POLLIN)
            assert poll.poll(60_000), "the worker outlived its harness"
            os.close(watch)


def test_a_joiner_is_blamed_until_it_is_a_member_like_any_other() -> None:
    from benchmarks._analysis import join_stall, quiet_wait

    gaps = [0.1] * 60
    gaps[3], gaps[15], gaps[30], gaps[50] = 0.5, 0.13, 0.14, 0.9  # long before, before, while it joins, and after
    times = [sum(gaps[:i]) for i in range(len(gaps))]
    one = member([(step, at_s) for step, at_s in enumerate(times)])
    since_s, until_s = times[25] - 0.01, times[40] + 0.01
    assert join_stall([one], since_s, until_s) == pytest.approx(0.04)
    assert join_stall([one], since_s, until_s, waits_only=True) == pytest.approx(0.04)
    assert join_stall([one], since_s, times[59], waits_only=True) == pytest.approx(0.8)
    assert join_stall([one], since_s, math.inf) == pytest.approx(0.8), "and all that follows is a figure of its own"
    assert quiet_wait([one], times[22], since_s, until_s) == pytest.approx(0.03)
    assert join_stall([], since_s, until_s) == quiet_wait([], 1.0, since_s, until_s) == 0.0


def test_an_interpreter_is_found_from_wherever_a_fleet_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks._systems import SYSTEMS, interpreter

    folder = tmp_path / "peers" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)  # as an environment's is
    monkeypatch.chdir(tmp_path)
    for given in ("peers/bin/python", str(folder / "python")):
        assert interpreter(given) == folder / "python"
    monkeypatch.setenv("PATH", str(folder))
    assert interpreter("python") == folder / "python"
    launch = launched(python=interpreter("peers/bin/python"))
    assert all(Path(command[0]).is_absolute() for command in SYSTEMS["torchft"].commands(launch))


def launched(**more: Any) -> Any:
    from benchmarks._systems import Launch

    values = {"replicas": 3, "model": "0.15M", "microbatches": 8, "seed": 0, "scratch": Path("/nowhere")}
    return Launch(**{**values, **more})  # type: ignore[arg-type]


def test_what_computes_alone_has_the_share_of_a_replica() -> None:
    from benchmarks._systems import COMPUTING

    one, all_at_once = (COMPUTING[name].commands(launched(python=Path(sys.executable))) for name in ("alone", "apart"))
    assert [command[-2:] for command in one] == [["--world=3", "--rank=0"]]
    assert [command[-1] for command in all_at_once] == ["--rank=0", "--rank=1", "--rank=2"]


def test_a_rate_is_read_between_two_commits_and_never_outside_of_them() -> None:
    from benchmarks.serving import rate

    commits = [(10.0, 100), (12.0, 120), (20.0, 160)]
    assert rate(commits, 11.0, 12.0) == pytest.approx(10.0)
    assert rate(commits, 11.0, 16.0) == pytest.approx((140 - 110) / 5)
    for begin_s, end_s in ((9.0, 11.0), (11.0, 21.0)):
        with pytest.raises(ValueError, match="outside"):
            rate(commits, begin_s, end_s)


def test_a_strike_of_ranks_ends_with_the_step_of_the_last_survivor(tmp_path: Path) -> None:
    """Of the ranks that were not killed, one ended with its replica; half a line is no commit."""
    from benchmarks.ranks import Side, first_after

    (tmp_path / "out").mkdir()
    for pid, text in {
        1: "0 1.0\n1 2.0\n", 2: "0 1.0\n1 2.0\n2 3.05\n", 3: "1 2.0\n2 3.5\n3 4.0\n4 4.5\n",
        4: "1 2.0\n2 3.6\n3 4.1\n4 4.6\n5 4", 5: "2 9.0\n",
    }.items():  # fmt: skip
        (tmp_path / "out" / str(pid)).write_text(text)
    (tmp_path / "turn").write_bytes(bytes(8))
    side = Side(name="outlast", folder=tmp_path, living=lambda: True)
    assert side.commits()[4] == {1: 2.0, 2: 3.6, 3: 4.1, 4: 4.6}
    assert first_after(side, 3.0, doomed={2, 3, 4}, victim=1) == 3.6


def test_a_block_of_ranks_takes_as_long_as_its_slowest(tmp_path: Path) -> None:
    from benchmarks.ranks import Side

    (tmp_path / "out").mkdir()
    for pid, pace in enumerate((1.0, 1.0, 1.5, 1.2)):
        (tmp_path / "out" / str(pid)).write_text("".join(f"{step} {step * pace}\n" for step in range(12)))
    (tmp_path / "turn").write_bytes(bytes(8))
    side = Side(name="hsdp", folder=tmp_path, living=lambda: True)
    side.allow(3)
    assert side.block(8) == pytest.approx(1.5)
    assert (tmp_path / "turn").read_bytes() == (12).to_bytes(8, "little")


def test_work_has_followed_speed_once_the_slowed_host_gets_less(tmp_path: Path) -> None:
    """Not by what was told of another one, or before: hosts start without quotas, all at once."""
    from benchmarks._host_speeds import newest_notice, shares_changed

    from outlast.core import events as ev
    from outlast.journal import Journal

    def slow(agent: str, done: str = "it gets 3 of 16 in place of 4") -> ev.Notice:
        text = f"r1 on {agent} is slow to compute: a microbatch takes it 1 s; {done}"
        return ev.Notice(at_s=0.0, level="warning", text=text)

    with Journal.create(tmp_path) as journal:
        for at in (1, 3):
            journal.append(ev.AgentStarted(at_s=0.0, agent=f"a{at}", pid=1, host=f"h{at}"))
        journal.append(slow("a3"))
        journal.flush()
        since = newest_notice(tmp_path)
        assert since > 0
        for told, changed in ((slow("a1"), False), (slow("a3", "its work stays as it is"), False), (slow("a3"), True)):
            journal.append(told)
            journal.flush()
            assert shares_changed(tmp_path, "h3", since) == changed


def test_outages_of_hosts_are_told_by_their_kind() -> None:
    from benchmarks.hosts import Outage, tabulate

    def outage(kind: str, downtime_s: float) -> Outage:
        return Outage(kind=kind, detect_s=0.01, downtime_s=downtime_s, noticed_by="r0.1", lost_steps=1)

    death, power = tabulate([outage("death", 0.03), outage("off", 0.6), outage("death", 0.05)]).rows
    assert death == ["death", "10 (10 to 10, n = 2)", "40 (30 to 50, n = 2)", "r0.1", "2"]
    assert power[2] == "600 (n = 1)"
