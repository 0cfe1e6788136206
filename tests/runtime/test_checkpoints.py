"""Whole fleets die and go on from their checkpoints, to the bits of the run that nothing happened to."""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.checkpoint import LocalStore, heads, verify
from outlast.checkpoint.head_facts import sections
from outlast.checkpoint.occupancy import occupy
from outlast.core import events as ev
from outlast.core.policy import RunRecord
from outlast.observe import accounting, status
from outlast.prove._process_tree import processes
from outlast.runtime.settings.fault_points import Fault

pytestmark = pytest.mark.process


def steps_in(path: Path) -> list[int]:
    return sorted(head.step for head in heads(LocalStore(str(path)))[0])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB: room for one generation of the scenario's state."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("this process may not mount a small file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_killed_whole_and_resumed_at_another_replica_count(fleet: Callable[..., Any], tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    first = fleet(replicas=2, steps=16, gates=(9,), checkpoint_dir=str(place), checkpoint_every=2)
    first.until("a save was published", lambda: len(first.saved()) > 1)
    first.kill_whole()
    newest, before = steps_in(place)[-1], sections(heads(LocalStore(str(place)))[0][0].extra)
    again = fleet(replicas=3, steps=16, checkpoint_dir=str(place), checkpoint_every=4, resume="auto")
    again.assert_unchanged(survivors={"r0.1", "r1.1", "r2.1"}, recoveries=0)
    assert set(again.results()["r0.1"]["losses"]) == {str(step) for step in range(newest, 16)}
    loaded = [e for e in again.driven.events if isinstance(e, ev.CheckpointLoaded)]
    assert [(e.step, e.tier) for e in loaded] == [(newest, "disk")] * 3
    assert again.saved()[-1].step == 16, "the end is saved"
    assert {e.num_writers for e in again.saved()} == {3}
    then, now = before, sections(heads(LocalStore(str(place)))[0][0].extra)
    assert [(s["config"]["replicas"], s["checkpoint"]["every"]) for s in (then, now)] == [(2, 2), (3, 4)]
    assert then["facts"] == now["facts"]
    assert then["facts"]["microbatches"] == "8"
    assert not any(isinstance(e, ev.CheckpointDiffers) for e in again.driven.events), "another fleet, the same bits"
    assert all(verify(LocalStore(str(place)), g).problems == [] for g in LocalStore(str(place)).generations())


def test_a_fleet_that_goes_on_with_other_settings_says_so_once(fleet: Callable[..., Any], tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    fleet(replicas=2, steps=4, checkpoint_dir=str(place), guards="default").finish()
    again = fleet(replicas=2, steps=6, checkpoint_dir=str(place), guards="off")
    assert again.finish() == 0, again.logs()
    (told,) = [e for e in again.driven.events if isinstance(e, ev.CheckpointDiffers)]
    assert told.step == 4
    assert told.detail.startswith("guards: ")
    over = fleet(replicas=2, steps=6, checkpoint_dir=str(place), guards="off")
    assert over.finish() == 0, over.logs()
    assert over.logs().count("the checkpoint is at step 6 and until is 6: nothing is left to train") == 1


@pytest.mark.campaign
@pytest.mark.parametrize("shape", [
    pytest.param({"by_script": False, "agents": 1, "struck": ("r0.1", "r1.1")}, marks=pytest.mark.soak),
    {"by_script": True, "agents": 2, "struck": ("r0.1", "r1.1")},
    {"by_script": False, "agents": 2, "struck": ("a0", "a1")},
], ids=["ranks", "ranks of two agents", "agents"])  # fmt: skip
def test_the_fleet_dies_under_a_living_launcher(
    fleet: Callable[..., Any], tmp_path: Path, shape: dict[str, Any]
) -> None:
    """All at once, or with their agents: it begins again by itself, from the host's memory, and reads no disk."""
    keep: dict[str, Any] = {"checkpoint_dir": str(tmp_path / "c"), "checkpoint_every": 4}
    if shape["by_script"]:
        keep = {"checkpoint": {"dir": str(tmp_path / "c"), "every": 4}}
    run = fleet(replicas=2, agents=shape["agents"], steps=9, gates=(5,), **keep)
    run.until("step 4 was saved", lambda: any(e.step == 4 for e in run.saved()))
    for name in shape["struck"]:
        run.strike(run.pid(name))
    run.gate(5, "they were gone", lambda: run.exited("r0.1") and run.exited("r1.1"))
    run.assert_unchanged(may_lose=True)
    # A successor that was due when the second agent died counts as well.
    assert {e.replica for e in run.driven.recoveries()} - {"r1.2", "r0.2"} == {"r0.1", "r1.1"}
    assert {name.partition(".")[0] for name in run.results()} == {"r0", "r1"}
    assert {r.lost_steps for r in run.driven.recoveries()} <= {0, 1}
    assert [e.step for e in run.driven.events if isinstance(e, ev.FleetGone)] != []
    loaded = [e for e in run.driven.events if isinstance(e, ev.CheckpointLoaded)]
    assert [(e.step, e.tier, e.bytes_read.get("disk", 0)) for e in loaded] == [(4, "memory", 0)] * 2
    assert all(e.bytes_read["memory"] > 2_000_000 for e in loaded)


def test_steps_are_lost_with_an_agent_and_counted(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """What its replicas had done since their last heartbeats is in their progress blocks, and these outlive them."""
    keep = {"checkpoint_dir": str(tmp_path / "c"), "checkpoint_every": 4}
    run = fleet(replicas=2, steps=12, gates=(7,), heartbeat_s=30.0, **keep)
    run.until("step 4 was saved", lambda: any(e.step == 4 for e in run.saved()))
    run.until("both wait before step 7", lambda: run.at_gates({run.pid("r0.1"), run.pid("r1.1")}))
    run.strike(run.pid("a0"))
    run.gate(7, "they were gone", lambda: run.exited("r0.1") and run.exited("r1.1"))
    run.assert_unchanged(may_lose=True)
    assert [e.step for e in run.exits()[:2]] == [7, 7]
    assert {r.lost_steps for r in run.driven.recoveries()} == {3}


@pytest.mark.campaign
def test_a_run_that_all_are_asked_to_leave_tells_its_last_steps(fleet: Callable[..., Any]) -> None:
    """Between heartbeats, and in a view that forms when the last of them has been asked. No checkpoint has them."""
    run = fleet(replicas=2, spares=1, steps=12, gates=(2, 4, 7), heartbeat_s=30.0, max_restarts=0)
    run.gate(2, "the spare was served", lambda: run.served("r2.1"))
    run.gate(4, "it had caught up", lambda: run.caught_up("r2.1"))
    run.until("two wait before step 7", lambda: run.at_gates({run.pid("r0.1"), run.pid("r1.1")}))
    run.strike(run.pid("r1.1"), signal.SIGTERM)
    run.until("the spare is to take its place", lambda: run.driven.members == ["r0.1", "r2.1"])
    run.strike(run.pid("a0"), signal.SIGTERM)
    run.gate(7, "who stays had said where it is", lambda: any(e.committed == 7 for e in _told(run)))
    assert run.finish() == 143
    (ended,) = [e for e in run.driven.events if isinstance(e, ev.RunFinished)]
    assert (ended.outcome, ended.steps) == ("stopped", 8)
    (formed,) = [i for i, e in enumerate(run.driven.events) if isinstance(e, ev.ViewFormed) and e.step == 8]
    assert run.driven.events.index(_told(run)[-1]) < formed, "when a step was reached is told before what names it"
    assert _told(run)[-1].committed == 8
    account = accounting(run.driven.events)
    assert (account.productive_s, account.degraded_s) == pytest.approx((0.0, 0.0), abs=1e-12)  # differences of sums


def _told(run: Any) -> list[ev.ProgressMade]:
    return [e for e in run.driven.events if isinstance(e, ev.ProgressMade)]


@pytest.mark.campaign
def test_a_stop_waits_for_the_save_wherever_it_was_said(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """The script alone keeps checkpoints; r1's disk hangs, and the stop waits as long as it may, in good order."""
    hangs = Fault(replica="r1", phase="save_data_durable", action="hang")
    keep = {"dir": str(tmp_path / "c"), "every": 1000}
    run = fleet(hangs, replicas=2, steps=10, gates=(4, 8), checkpoint=keep, stop_save_s=7.0)
    run.until("steps were made", lambda: run.driven.step == 3)
    run.strike(run.driven.process.pid, signal.SIGTERM)
    run.gate(4, "the save had begun", lambda: any(isinstance(e, ev.CheckpointInterval) for e in run.driven.events))
    assert run.finish() == 143
    (ended,) = [e for e in run.driven.events if isinstance(e, ev.RunFinished)]
    assert ended.outcome == "stopped"
    assert [e.reason for e in run.driven.events if isinstance(e, ev.CheckpointBegan)] == ["the run was asked to stop"]
    assert run.saved() == []


def both_wait_before(run: Any, step: int) -> None:
    run.until(f"there are two before step {step}", lambda: run.started("r0.1") and run.started("r1.1"))
    run.until(f"they wait before step {step}", lambda: run.at_gates({run.pid("r0.1"), run.pid("r1.1")}))


@pytest.mark.campaign
@pytest.mark.parametrize("first", ["coordinator", "replicas"])
def test_all_are_asked_to_leave_under_a_coordinator_that_took_over(
    fleet: Callable[..., Any], tmp_path: Path, first: str
) -> None:
    """It gives no orders in the view that it found, and makes no other just to end it; and what was said to the one
    before holds: the save is of the last step."""
    run = fleet(replicas=2, steps=60, gates=(6,), checkpoint={"dir": str(tmp_path / "c"), "every": 1000})
    both_wait_before(run, 6)
    started = lambda: [e.takeover for e in run.driven.events if isinstance(e, ev.CoordinatorStarted)]  # noqa: E731
    asked = lambda: [e.reason for e in run.driven.events if isinstance(e, ev.CheckpointInterval)]  # noqa: E731
    ask = lambda: [run.strike(run.pid(name), signal.SIGTERM) for name in ("r0.1", "r1.1")]  # noqa: E731
    if first == "replicas":
        ask()
        run.until("both were asked to leave", lambda: len(asked()) == 2)
    run.strike(run.driven.coordinator_pid)
    run.until("there is another", lambda: True in started())
    if first == "coordinator":
        ask()

    def known() -> int:
        """How many it was told of. Who came back as it was asked to leave says so twice."""
        began = max(i for i, e in enumerate(run.driven.events) if isinstance(e, ev.CoordinatorStarted))
        return len({e.reason for e in run.driven.events[began:] if isinstance(e, ev.CheckpointInterval)})

    run.gate(6, "it knows that both were", lambda: known() == 2)
    assert run.finish() == 143
    assert len([e for e in run.driven.events if isinstance(e, ev.ViewInstalled)]) == 1
    (ended,) = [e for e in run.driven.events if isinstance(e, ev.RunFinished)]
    assert [e.step for e in run.saved()] == [ended.steps]
    assert ended.steps >= 7


def test_nothing_was_saved_yet(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """The same bits, only later."""
    run = fleet(replicas=1, steps=6, gates=(2,), checkpoint_dir=str(tmp_path / "c"), checkpoint_every=100)
    run.until("steps were made", lambda: run.driven.step == 1)
    run.strike(run.pid("r0.1"))
    run.gate(2, "it was gone", lambda: run.exited("r0.1"))
    run.assert_unchanged(survivors={"r0.2"}, recoveries=1, may_lose=True)
    assert run.driven.recoveries()[0].lost_steps == 2


def test_nothing_was_made_yet(fleet: Callable[..., Any]) -> None:
    """Who was being served begins in the place of who was to serve it: without checkpoints, too."""
    fault = Fault(replica="r1.1", phase="connect", action="SIGKILL")
    run = fleet(fault, replicas=2, steps=6, gates=(0,))
    run.until("a new process was to be served", lambda: run.started("r1.2") and run.at_gates({run.pid("r0.1")}))
    run.until("it is being served", lambda: run.served("r1.2"))
    run.strike(run.pid("r0.1"))
    run.gate(0, "it was gone", lambda: run.exited("r0.1"))
    run.assert_unchanged(may_lose=True)


@pytest.mark.campaign
@pytest.mark.parametrize(("every", "left"), [(100, 0), (3, 6)])
def test_who_stops_after_all_were_lost_has_done_the_steps_that_are_left(
    fleet: Callable[..., Any], tmp_path: Path, every: int, left: int
) -> None:
    run = fleet(replicas=1, steps=20, gates=(8,), checkpoint_dir=str(tmp_path / "c"), checkpoint_every=every)
    run.until("it waits before step 8", lambda: run.started("r0.1") and run.at_gates({run.pid("r0.1")}))
    run.until("what is due was saved", lambda: [e.step for e in run.saved()][-1:] == [left][: bool(left)])
    run.strike(run.parent(run.pid("r0.1")), signal.SIGSTOP)  # nobody comes in its place yet
    run.strike(run.pid("r0.1"))
    run.until("it is missed", lambda: any(isinstance(e, ev.FleetGone) for e in run.driven.events))
    run.strike(run.driven.process.pid, signal.SIGTERM)
    assert run.finish() == 143, run.logs()
    (ended,) = [e for e in run.driven.events if isinstance(e, ev.RunFinished)]
    assert ended.steps == left
    told = status(run.driven.events)
    assert (told.state, told.step or 0) == ("stopped", left)


@pytest.mark.campaign
def test_the_budget_of_restarts_holds_for_the_whole_fleet(fleet: Callable[..., Any], tmp_path: Path) -> None:
    run = fleet(replicas=2, steps=9, gates=(3,), checkpoint_dir=str(tmp_path / "c"), max_restarts=1)
    run.until("steps were made", lambda: run.driven.step == 2)
    for name in ("r0.1", "r1.1"):
        run.strike(run.pid(name))
    assert run.finish() == 6


@pytest.mark.campaign
def test_a_disk_with_room_for_one_generation(fleet: Callable[..., Any], tmp_path: Path, small_disk: Path) -> None:
    """Training goes on and says so; what was published before stays; the end has a code of its own."""
    place = small_disk / "c"
    run = fleet(replicas=2, steps=12, checkpoint_dir=str(place), checkpoint_every=3, checkpoint_keep=2)
    assert run.finish() == 10
    failed = [e for e in run.driven.events if isinstance(e, ev.CheckpointFailed)]
    assert {e.cause for e in failed} == {"writer_failed"}
    assert "No space left on device" in failed[0].reason
    assert [verify(LocalStore(str(place)), g).problems for g in LocalStore(str(place)).generations()] == [[]]
    assert steps_in(place) == [e.step for e in run.saved()] == [3]


@pytest.mark.campaign
def test_a_place_that_is_no_directory(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """Only the script knows it: said at the start, and the run trains all the same."""
    (tmp_path / "file").write_text("no directory")
    run = fleet(replicas=2, steps=6, checkpoint={"dir": str(tmp_path / "file" / "c"), "every": 2})
    assert run.finish() == 10
    first = next(e for e in run.driven.events if isinstance(e, ev.CheckpointFailed))
    assert (first.step, first.cause, "Not a directory" in first.reason) == (-1, "unwritable", True)


@pytest.mark.campaign
@pytest.mark.parametrize("whom", ["the launcher", "everybody"])
def test_asked_to_stop_it_saves_first(fleet: Callable[..., Any], tmp_path: Path, whom: str) -> None:
    """SIGTERM to the launcher, or to every process of the run, and again: so schedulers give notice. The next run goes
    on from there."""
    place = tmp_path / "c"
    beat_s = 20.0  # what is saved is counted, though no heartbeat tells of it any more
    run = fleet(replicas=2, steps=10, gates=(4,), checkpoint_dir=str(place), checkpoint_min_s=600.0, heartbeat_s=beat_s)
    both = lambda: len(run.driven.members) == 2 and run.at_gates({run.pid("r0.1"), run.pid("r1.1")})  # noqa: E731
    run.until("both wait before step 4", both)  # no heartbeat has told of the steps before it
    launcher = run.driven.process.pid
    struck = [launcher] if whom == "the launcher" else [launcher, *(each.pid for each in processes(launcher))]
    for _ in range(1 if whom == "the launcher" else 3):
        for pid in struck:
            with contextlib.suppress(ProcessLookupError):
                run.strike(pid, signal.SIGTERM)
    told = lambda: any(isinstance(e, ev.CheckpointInterval) and "stop" in e.reason for e in run.driven.events)  # noqa: E731
    run.gate(4, "the coordinator was told", told)
    assert run.finish() == 143
    (saved,) = run.saved()
    assert "asked to stop" in saved.reason
    assert steps_in(place) == [saved.step]
    (ended,) = [e for e in run.driven.events if isinstance(e, ev.RunFinished)]
    assert ended.steps == saved.step, "what was committed is what was saved"
    assert _told(run)[-1].committed == saved.step, "and how long the last step took is told too"
    again = fleet(replicas=1, steps=10, checkpoint_dir=str(place))
    again.assert_unchanged(survivors={"r0.1"}, recoveries=0)
    assert min(map(int, again.results()["r0.1"]["losses"])) == saved.step


@pytest.mark.campaign
def test_a_replica_that_is_asked_to_leave_is_in_the_save(fleet: Callable[..., Any], tmp_path: Path) -> None:
    gates = (3, *range(10, 60, 5))
    run = fleet(replicas=2, steps=60, gates=gates, checkpoint_dir=str(tmp_path / "c"), max_restarts=0)
    run.until("steps were made", lambda: run.driven.step == 2)
    run.strike(run.pid("r1.1"), signal.SIGTERM)
    told = lambda: any(isinstance(e, ev.CheckpointInterval) and "leave" in e.reason for e in run.driven.events)  # noqa: E731
    run.gate(3, "the coordinator was told", told)
    run.step_on("it had left", lambda: run.exited("r1.1"))  # once it is saved; who waits at a gate cannot leave
    run.open_gates()
    run.assert_unchanged(survivors={"r0.1"}, recoveries=0)
    first = run.saved()[0]
    assert (first.reason, first.num_writers) == ("r1.1 was asked to leave", 2)


@pytest.mark.campaign
@pytest.mark.parametrize("gate", [3, 4])
def test_everybody_is_asked_to_leave_and_what_was_committed_is_what_was_saved(
    fleet: Callable[..., Any], tmp_path: Path, gate: int
) -> None:
    """The last who have the state are the run's stop, also with a save under way that nobody has asked for."""
    place = tmp_path / "c"
    run = fleet(replicas=2, steps=60, gates=(gate,), checkpoint_dir=str(place), checkpoint_every=3, max_restarts=0)
    both_wait_before(run, gate)
    for name in ("r0.1", "r1.1"):
        run.strike(run.pid(name), signal.SIGTERM)
    asked = lambda: [e.reason for e in run.driven.events if isinstance(e, ev.CheckpointInterval)]  # noqa: E731
    run.gate(gate, "both had said so", lambda: sum("asked to leave" in reason for reason in asked()) == 2)
    assert run.finish() == 143
    (ended,) = [e for e in run.driven.events if isinstance(e, ev.RunFinished)]
    assert (ended.outcome, ended.steps) == ("stopped", run.saved()[-1].step)
    assert steps_in(place)[-1] == ended.steps
    again = fleet(replicas=1, steps=60, checkpoint_dir=str(place))
    again.assert_unchanged(survivors={"r0.1"}, recoveries=0)
    assert min(map(int, again.results()["r0.1"]["losses"])) == ended.steps


@pytest.mark.campaign
def test_an_interval_that_outlast_chooses(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """Each decision is told with its reason; the first save is early and measures what one costs."""
    run = fleet(replicas=2, steps=60, gates=range(8, 50), checkpoint_dir=str(tmp_path / "c"), checkpoint_min_s=0.1)
    run.pace("the first save was taken", lambda: bool(run.saved()))  # due some time after the first steps
    run.strike(run.pid("r1.1"))
    run.until("a death taught the interval", lambda: any("the last failure was" in e.reason for e in decisions(run)))
    run.open_gates()
    run.assert_unchanged(recoveries=1)
    told = decisions(run)
    assert "the first save measures what one costs" in told[0].reason
    assert told[0].interval_s == 0.1
    assert all("a loss is expected every" in e.reason for e in told)
    longest = max(math.inf if e.interval_s is None else e.interval_s for e in told)  # None: not before the loop's end
    assert longest > 10 * told[0].interval_s, "a save costs little, and losses are rare"
    assert run.saved()[0].reason.startswith("due: ")
    assert run.saved()[-1].step == 60
    assert_decided_as_the_journal_says(run.driven.events)


def assert_decided_as_the_journal_says(events: list[ev.AnyEvent]) -> None:
    """To the last digit: what the coordinator decided at each moment is what its journal up to there gives."""
    record = RunRecord()
    for event in events:
        if isinstance(event, ev.CheckpointInterval) and event.mtbr_s:
            found = record.saving(event.at_s)
            told = math.inf if event.interval_s is None else event.interval_s
            assert (told, event.mtbr_s, event.reason) == (found.interval_s, found.mtbr_s, found.reason)
        record.take(event)


def decisions(run: Any) -> list[ev.CheckpointInterval]:
    return [e for e in run.driven.events if isinstance(e, ev.CheckpointInterval)]


@pytest.mark.campaign
def test_the_farther_place_serves_when_the_nearer_is_gone(fleet: Callable[..., Any], tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    run = fleet(
        replicas=2, steps=4, checkpoint_dir=str(near), checkpoint_drain_to=str(far), checkpoint_every=3,
    )  # fmt: skip
    run.assert_unchanged(survivors={"r0.1", "r1.1"}, recoveries=0)
    assert steps_in(far)[-1] == 4
    shutil.rmtree(near)
    again = fleet(replicas=1, steps=6, checkpoint_dir=str(near), checkpoint_drain_to=str(far))
    again.assert_unchanged(survivors={"r0.1"}, recoveries=0)
    assert set(again.results()["r0.1"]["losses"]) == {"4", "5"}


def test_nothing_whole_to_resume_from_is_an_error(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """Never silently from the start."""
    (tmp_path / "c" / "manifests").mkdir(parents=True)
    (tmp_path / "c" / "manifests" / "g0000000003.json").write_text("{}")
    run = fleet(replicas=2, steps=4, checkpoint_dir=str(tmp_path / "c"))
    assert run.finish() == 7
    (ended,) = [e for e in run.driven.events if isinstance(e, ev.RunFinished)]
    assert "no generation of 0 could be loaded" in ended.detail


@pytest.mark.campaign
def test_where_another_run_saves_nothing_is_trained(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """The other one is this process; a fleet waits a while, since a run that was killed takes a moment to end."""
    held = occupy(str(tmp_path / "c"), "another", wait_s=0.0)
    run = fleet(replicas=2, steps=4, checkpoint_dir=str(tmp_path / "c"))
    assert run.finish() == 2
    (ended,) = [e for e in run.driven.events if isinstance(e, ev.RunFinished)]
    assert "another run saves at" in ended.detail
    held.leave()


@pytest.mark.campaign
def test_what_the_guards_verify_makes_a_generation_certified(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """Fingerprints of the whole state agree at step 100: what was saved of step 90 is certified, the end is not yet."""
    run = fleet(replicas=2, steps=104, checkpoint_dir=str(tmp_path / "c"), checkpoint_every=90, rule={"guards": "full"})
    run.assert_unchanged(survivors={"r0.1", "r1.1"}, recoveries=0)
    found = {head.step: head.certified for head in heads(LocalStore(str(tmp_path / "c")))[0]}
    assert found == {90: True, 104: False}
