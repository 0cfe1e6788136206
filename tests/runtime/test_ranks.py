"""Replicas of several ranks: one fingerprint for every width and number of them, whatever is killed, and when."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.checkpoint import CheckpointEngine as Archive
from outlast.cli import main
from outlast.core import events as ev
from outlast.prove._process_tree import of_run, processes
from outlast.runtime.faults.flips import Flip
from outlast.runtime.settings.fault_points import Fault

pytestmark = [pytest.mark.process, pytest.mark.campaign]
SCRIPT = Path(__file__).with_name("sharded.py")
WAYS = Path(__file__).with_name("sharded_ways.py")
HABITS = Path(__file__).with_name("sharded_habits.py")
STEPS = 6


@functools.cache
def undisturbed(script: Path = SCRIPT, steps: int = STEPS, *options: str) -> dict[str, Any]:
    """By one rank alone, in a process of its own."""
    with tempfile.TemporaryDirectory() as out:
        subprocess.run([sys.executable, script, "--steps", str(steps), "--out", out, *options], check=True, timeout=300)
        (file,) = Path(out).glob("*.json")
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def check(run: Any, survivors: set[str], ranks: int, recoveries: int, script: Path = SCRIPT) -> None:
    """It ended well, nothing is left, and each rank of each survivor has the bits of the undisturbed run."""
    assert run.finish() == 0, run.logs()
    assert of_run(run.driven.run_dir) == []
    results = run.results()
    assert set(results) == {f"{name}-{place}" for name in survivors for place in range(ranks)}, run.logs()
    for name, found in results.items():
        assert found == undisturbed(script), f"{name}\n{run.logs()}"
    told = run.driven.recoveries()
    assert all(recovery.lost_steps == 0 for recovery in told)
    assert len(told) == recoveries, run.logs()


def fault(replica: str, phase: str, action: Any = "SIGKILL", **where: Any) -> Fault:
    return Fault(replica=replica, phase=phase, action=action, **where)


@pytest.mark.parametrize(("replicas", "ranks"), [(1, 4), (2, 2), (3, 1)])
def test_every_width_has_the_bits_of_one(fleet: Callable[..., Any], replicas: int, ranks: int) -> None:
    run = fleet(replicas=replicas, ranks=ranks, steps=STEPS, script=[SCRIPT], max_restarts=0)
    check(run, {f"r{slot}.1" for slot in range(replicas)}, ranks, 0)


def test_a_sharded_replica_of_one_rank_that_died_joins_again(fleet: Callable[..., Any]) -> None:
    """Before it takes part it goes through a step forward only, after which FSDP keeps the root's whole weights."""
    run = fleet(fault("r1.1", "header", step=2), replicas=2, steps=60, script=[SCRIPT], gates=(4, 30, 55))
    run.gate(4, "a new process was served", lambda: run.served("r1.2"))
    run.gate(30, "it had caught up", lambda: run.caught_up("r1.2"))
    run.gate(55, "it trained again", lambda: len(run.driven.members) == 2)
    assert run.finish() == 0, run.logs()
    want, results = undisturbed(SCRIPT, 60), run.results()
    assert set(results) == {"r0.1-0", "r1.2-0"}, run.logs()
    for found in results.values():
        assert found["fingerprint"] == want["fingerprint"], run.logs()
        assert found["losses"].items() <= want["losses"].items()
    assert results["r0.1-0"] == want
    assert "59" in results["r1.2-0"]["losses"]


def test_a_replica_of_two_ranks_that_died_joins_again(fleet: Callable[..., Any]) -> None:
    """Each rank is fed by those of its place. The first that is started again loses a rank as it loads the state."""
    run = fleet(
        fault("r1/1.1", "merge", step=2), fault("r1/1.2", "join_schema"),
        replicas=2, ranks=2, steps=60, script=[SCRIPT], gates=(4, 20, 40, 55),
    )  # fmt: skip
    run.gate(4, "a new replica was served", lambda: run.served("r1.2"))
    run.gate(20, "it had died, and the next one was served", lambda: run.served("r1.3"))
    run.gate(40, "that had caught up", lambda: run.caught_up("r1.3"))
    run.gate(55, "it trained again", lambda: len(run.driven.members) == 2)
    assert run.finish() == 0, run.logs()
    assert of_run(run.driven.run_dir) == []
    want, results = undisturbed(SCRIPT, 60), run.results()
    assert set(results) == {"r0.1-0", "r0.1-1", "r1.3-0", "r1.3-1"}, run.logs()
    for name, found in results.items():
        assert found["fingerprint"] == want["fingerprint"], f"{name}\n{run.logs()}"
        assert found["losses"].items() <= want["losses"].items()
        assert "59" in found["losses"]
    assert results["r0.1-1"] == want


def test_a_stream_is_read_on_by_whoever_joins(fleet: Callable[..., Any]) -> None:
    """Shuffled by random numbers, over many passes; every rank reads all of it."""
    steps = 26
    run = fleet(
        fault("r1/1.1", "merge", step=2), replicas=2, ranks=2, steps=steps, script=[SCRIPT, "--source", "stream"],
        gates=(4, 12, 22),
    )  # fmt: skip
    run.gate(4, "a new replica was served", lambda: run.served("r1.2"))
    run.gate(12, "it had caught up", lambda: run.caught_up("r1.2"))
    run.gate(22, "it trained again", lambda: len(run.driven.members) == 2)
    assert run.finish() == 0, run.logs()
    want, results = undisturbed(SCRIPT, steps, "--source", "stream"), run.results()
    assert set(results) == {"r0.1-0", "r0.1-1", "r1.2-0", "r1.2-1"}, run.logs()
    for found in results.values():
        assert found["fingerprint"] == want["fingerprint"], run.logs()
        assert found["losses"].items() <= want["losses"].items()
    assert results["r0.1-1"] == want


def test_the_same_samples_are_skipped_whichever_rank_meets_them(fleet: Callable[..., Any]) -> None:
    """One of them is met by a rank that dies in the same step."""
    run = fleet(
        fault("r1/1", "merge", step=2), replicas=2, ranks=2, steps=STEPS, script=[SCRIPT, "--source", "damaged"],
        max_restarts=0,
    )  # fmt: skip
    assert run.finish() == 0, run.logs()
    want, results = undisturbed(SCRIPT, STEPS, "--source", "damaged"), run.results()
    assert results == {"r0.1-0": want, "r0.1-1": want}, run.logs()
    skipped = [sample for e in run.driven.events if isinstance(e, ev.DataTrouble) for sample in e.samples]
    assert sorted(skipped) == [5, 30, 71], "each once"


def test_replicas_come_and_go_as_they_are_asked(fleet: Callable[..., Any]) -> None:
    """Another process in the place of one, and fewer: each replica with all its ranks, between two steps."""
    steps = 56
    run = fleet(replicas=2, ranks=2, steps=steps, script=[SCRIPT], gates=(4, 12, 24, 36, 48), max_restarts=0)
    at = str(run.driven.run_dir)

    def asked() -> list[str]:
        return [event.what for event in run.driven.events if isinstance(event, ev.Asked) and event.accepted]

    run.until("both train", lambda: len(run.driven.members) == 2)
    assert main(["evict", "r0", at]) == 0
    run.gate(4, "it was asked to go", lambda: asked() == ["evict"])
    run.gate(12, "it was gone, and another one served", lambda: run.exited("r0.1") and run.served("r0.2"))
    run.gate(24, "that had caught up", lambda: run.caught_up("r0.2"))
    run.until("it trains", lambda: set(run.driven.members) == {"r0.2", "r1.1"})
    assert main(["scale", at, "--replicas", "1"]) == 0
    run.gate(36, "one was enough", lambda: asked() == ["evict", "scale"])
    run.gate(48, "the other one was gone", lambda: run.exited("r1.1"))
    assert run.finish() == 0, run.logs()
    assert of_run(run.driven.run_dir) == []
    results = run.results()
    assert set(results) == {"r0.2-0", "r0.2-1"}, run.logs()
    assert {found["fingerprint"] for found in results.values()} == {undisturbed(SCRIPT, steps)["fingerprint"]}
    assert run.driven.recoveries() == []


def test_a_spare_of_two_ranks_takes_over(fleet: Callable[..., Any]) -> None:
    run = fleet(
        fault("r0/1", "merge", step=34), replicas=2, ranks=2, spares=1, steps=44, script=[SCRIPT], gates=(4, 30),
        max_restarts=0,
    )  # fmt: skip
    run.gate(4, "the spare was served", lambda: run.served("r2.1"))
    run.gate(30, "it had caught up", lambda: run.caught_up("r2.1"))
    assert run.finish() == 0, run.logs()
    want, results = undisturbed(SCRIPT, 44), run.results()
    assert set(results) == {"r1.1-0", "r1.1-1", "r2.1-0", "r2.1-1"}, run.logs()
    for found in results.values():
        assert found["fingerprint"] == want["fingerprint"], run.logs()
        assert "43" in found["losses"]


POLICY = """
from outlast.core.policy import SparesPolicy
own = SparesPolicy.decide
def decide(self, belief, state):
    found = own(self, belief, state)
    return type(found)(spares=7.0 if belief.alpha[0] >= 1.0 else 0.0)
SparesPolicy.decide = decide
"""


def test_spares_that_the_run_chooses_have_all_their_ranks(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """A policy in place of outlast's own, which no run of seconds would move: seven from the first death on, and there
    are slots for three replicas. A death of both ranks of a replica is one death."""
    (tmp_path / "sitecustomize.py").write_text(POLICY)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = fleet(
        fault("r1/1", "merge", step=6), fault("r0/1", "merge", step=40), replicas=2, ranks=2, spares="auto", slots=3,
        steps=44, script=[SCRIPT], gates=(8, 24, 38), max_restarts=1, environ={"PYTHONPATH": path},
    )  # fmt: skip
    run.gate(8, "the spare was served", lambda: run.served("r2.1"))
    run.gate(24, "both had caught up", lambda: run.caught_up("r1.2") and run.caught_up("r2.1"))
    run.gate(38, "one of them trained", lambda: len(run.driven.members) == 2)
    assert run.finish() == 0, run.logs()
    results = run.results()
    assert set(results) == {f"{name}-{place}" for name in ("r1.2", "r2.1") for place in range(2)}, run.logs()
    assert {found["fingerprint"] for found in results.values()} == {undisturbed(SCRIPT, 44)["fingerprint"]}
    [held] = [e for e in run.driven.events if isinstance(e, ev.SparesHeld)]
    assert (held.number, held.worth) == (1, 7), "one slot is left"
    assert held.reason.startswith("1 deaths so far")


@pytest.mark.soak  # of one rank, too, checkpoints are read in the test that follows
def test_sharded_replicas_of_one_rank_go_on_from_a_checkpoint(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """Saved by two replicas, and read by three."""
    keep = {"checkpoint_dir": str(tmp_path / "kept"), "checkpoint_every": 2}
    first = fleet(replicas=2, steps=STEPS - 2, script=[SCRIPT], max_restarts=0, **keep)
    assert first.finish() == 0, first.logs()
    assert first.saved()[-1].step == STEPS - 2
    again = fleet(replicas=3, steps=STEPS, script=[SCRIPT], max_restarts=0, **keep)
    assert again.finish() == 0, again.logs()
    results = again.results()
    assert set(results) == {f"r{slot}.1-0" for slot in range(3)}, again.logs()
    for found in results.values():
        assert found["fingerprint"] == undisturbed()["fingerprint"], again.logs()
        assert set(found["losses"]) == {str(STEPS - 2), str(STEPS - 1)}


def test_checkpoints_of_one_width_are_gone_on_from_at_any_other(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """Each byte is written once over all ranks of all replicas. A rank that is killed while it writes its part takes
    that save with it; what follows is saved by those who are left, and read by four ranks, then by one."""
    keep = {"checkpoint_dir": str(tmp_path / "kept"), "checkpoint_every": 1}
    first = fleet(
        fault("r1/1", "save_written"), replicas=2, ranks=2, steps=STEPS - 2, script=[SCRIPT], max_restarts=0, **keep
    )
    assert first.finish() == 0, first.logs()
    saved = first.saved()
    assert saved[-1].step == STEPS - 2, first.logs()
    assert saved[-1].num_writers == 2
    assert [exit.replica for exit in first.exits() if exit.cause == "signal"] == ["r1.1"], first.logs()
    for replicas, ranks, steps in ((1, 4, STEPS - 1), (2, 1, STEPS)):
        again = fleet(replicas=replicas, ranks=ranks, steps=steps, script=[SCRIPT], **keep)
        assert again.finish() == 0, again.logs()
        results = again.results()
        assert len(results) == replicas * ranks
        for found in results.values():
            assert found["losses"] == {str(steps - 1): undisturbed()["losses"][str(steps - 1)]}
            assert steps < STEPS or found["fingerprint"] == undisturbed()["fingerprint"], again.logs()
    kept = Archive(str(tmp_path / "kept"))
    loaded = kept.load()
    kept.close()
    assert loaded is not None
    assert loaded.tree["model"]["0.up.weight"].shape == (333, 24)


def test_evaluations_have_the_numbers_of_one_process(fleet: Callable[..., Any]) -> None:
    """Before a step's inner loop, after it, and after all steps; a rank of a replica dies as it computes its batch."""
    run = fleet(
        fault("r1/1", "body", step=4, count=2, microbatch=-1), replicas=2, ranks=2, steps=STEPS,
        script=[SCRIPT, "--evaluate"], max_restarts=0,
    )  # fmt: skip
    assert run.finish() == 0, run.logs()
    results = run.results()
    assert set(results) == {"r0.1-0", "r0.1-1"}, run.logs()
    for found in results.values():
        assert found == undisturbed(SCRIPT, STEPS, "--evaluate"), run.logs()


def test_a_loop_that_is_left_saves_what_all_ranks_have(fleet: Callable[..., Any], tmp_path: Path) -> None:
    keep = {"checkpoint_dir": str(tmp_path / "kept"), "checkpoint_every": 100}
    run = fleet(replicas=2, ranks=2, steps=50, script=[SCRIPT, "--leave", "2"], **keep)
    assert run.finish() == 0, run.logs()
    assert [(event.step, event.num_writers) for event in run.saved()] == [(3, 4)], run.logs()
    again = fleet(replicas=1, ranks=2, steps=STEPS, script=[SCRIPT], max_restarts=0, **keep)
    assert again.finish() == 0, again.logs()
    assert {found["fingerprint"] for found in again.results().values()} == {undisturbed()["fingerprint"]}


@pytest.mark.parametrize(
    ("place", "says"), [(0, "the lead of this replica ended its loop"), (1, "this rank ended its loop")]
)
def test_a_rank_that_leaves_the_loop_alone_is_told_so(fleet: Callable[..., Any], place: int, says: str) -> None:
    """Its script goes on to collectives that the other ranks are not in: they failed, or nobody came back from them."""
    run = fleet(replicas=2, ranks=2, steps=STEPS, script=[SCRIPT, "--leave", "2", "--only", str(place)], max_restarts=0)
    assert run.finish() == 5, run.logs()
    (end,) = [e for e in run.driven.events if isinstance(e, ev.RunFinished)]
    assert says in end.detail
    assert "do the same on every rank" in end.detail


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (0, "the lead of this replica calls training.fingerprint(), and this rank does not"),
        (1, "the lead of this replica goes on with its loop, and this rank calls training.fingerprint()"),
    ],
)
def test_a_rank_that_takes_a_fingerprint_alone_is_told_so(fleet: Callable[..., Any], place: int, says: str) -> None:
    """It gathers what all ranks hold: nobody came back from it until `outside_s` had passed."""
    run = fleet(
        replicas=2, ranks=2, steps=STEPS, script=[SCRIPT, "--prints", "2", "--only", str(place)], max_restarts=0
    )
    assert run.finish() == 5, run.logs()
    (end,) = [e for e in run.driven.events if isinstance(e, ev.RunFinished)]
    assert says in end.detail


def test_all_ranks_may_take_a_fingerprint_amid_training(fleet: Callable[..., Any]) -> None:
    run = fleet(replicas=2, ranks=2, steps=STEPS, script=[SCRIPT, "--prints", "2"], max_restarts=0)
    check(run, {"r0.1", "r1.1"}, 2, 0)


def test_what_fsdp_is_used_with_keeps_the_bits(fleet: Callable[..., Any]) -> None:
    """Half precision, checkpointed activations, tied and frozen weights, BatchNorm, a model from the meta device. And a
    rank dies under its backward, as it offers the first bucket."""
    run = fleet(
        fault("r1/1", "scatter", step=2, bucket=0), replicas=2, ranks=2, steps=STEPS, script=[WAYS], max_restarts=0
    )
    check(run, {"r0.1"}, 2, 1, WAYS)


def test_what_loops_do_beside_is_kept_by_whoever_joins(fleet: Callable[..., Any]) -> None:
    """float16 under a scaler, an average of the weights, rates set by hand, a weight drawn before each step and added
    up after it, two optimizers, a loop that ends itself."""
    steps = 40
    run = fleet(fault("r1/1.1", "merge", step=2), replicas=2, ranks=2, steps=steps, script=[HABITS], gates=(4, 12, 20))
    run.gate(4, "a new replica was served", lambda: run.served("r1.2"))
    run.gate(12, "it had caught up", lambda: run.caught_up("r1.2"))
    run.gate(20, "it trained again", lambda: len(run.driven.members) == 2)
    assert run.finish() == 0, run.logs()
    want, results = undisturbed(HABITS, steps), run.results()
    assert want["stopped"] == "it has learned enough"
    assert 2 < want["overflows"] < 20
    assert set(results) == {"r0.1-0", "r0.1-1", "r1.2-0", "r1.2-1"}, run.logs()
    for name, found in results.items():
        for key in ("fingerprint", "average", "scale", "stopped", "tally"):
            assert found[key] == want[key], f"{name}: {key}\n{run.logs()}"
    assert results["r0.1-0"] == results["r0.1-1"] == want


def test_what_loops_do_beside_goes_on_from_a_checkpoint_at_another_width(
    fleet: Callable[..., Any], tmp_path: Path
) -> None:
    """Saved by one process, and read by two, of which each has its part of the average."""
    where = {"checkpoint_dir": str(tmp_path / "kept")}
    (tmp_path / "alone").mkdir()
    command = [sys.executable, HABITS, "--steps", "8", "--out", str(tmp_path / "alone")]
    subprocess.run(
        command, check=True, timeout=100, env=os.environ | {"OUTLAST_CHECKPOINT_DIR": where["checkpoint_dir"]}
    )
    again = fleet(replicas=1, ranks=2, steps=12, script=[HABITS], max_restarts=0, **where)
    assert again.finish() == 0, again.logs()
    want, results = undisturbed(HABITS, 12), again.results()
    assert len(results) == 2
    for found in results.values():
        for key in ("fingerprint", "average", "scale"):
            assert found[key] == want[key], f"{key}\n{again.logs()}"


def test_a_rank_that_can_open_nothing_more_is_not_waited_for(fleet: Callable[..., Any]) -> None:
    """Nobody can connect to it: its lead knows nothing of that, and in its own lane all reach each other."""
    run = fleet(replicas=2, spares=1, ranks=2, steps=60, script=[SCRIPT], formation_s=10.0)
    run.until("the spare has caught up", lambda: run.caught_up("r2.1"))
    for rank in processes(run.driven.process.pid):
        if rank.name == "r0.1" and rank.place:
            resource.prlimit(rank.pid, resource.RLIMIT_NOFILE, (4, 4))
    run.strike(run.pid("r1.1"))
    assert run.finish() == 0, run.logs()
    (ended,) = [e for e in run.exits() if e.replica == "r0.1"]
    assert (ended.cause, "out of file descriptors" in ended.detail) == ("evicted", True), run.logs()
    assert run.results()["r2.1-1"]["fingerprint"] == undisturbed(SCRIPT, 60)["fingerprint"], run.logs()


def test_a_rank_is_killed_and_its_replica_with_it(fleet: Callable[..., Any]) -> None:
    """One that is no lead in its backward, and a lead while its lanes are reduced."""
    run = fleet(
        fault("r1/1", "backward", step=1), fault("r2", "gathered", step=3),
        replicas=3, ranks=2, steps=STEPS, script=[SCRIPT], max_restarts=0,
    )  # fmt: skip
    check(run, {"r0.1"}, 2, 2)
    assert {e.replica for e in run.exits() if e.cause == "signal"} == {"r1.1", "r2.1"}


def test_killed_around_the_commit_point(fleet: Callable[..., Any]) -> None:
    """A rank that has offered its sums; a lead between the verdict and the word to its others; a rank after it."""
    run = fleet(
        fault("r2/1", "scattered", step=1), fault("r0", "verdict", step=3), fault("r3/1", "optimizer", step=4),
        replicas=4, ranks=2, steps=STEPS, script=[SCRIPT], max_restarts=0,
    )  # fmt: skip
    check(run, {"r1.1"}, 2, 3)


def test_lanes_over_the_network_have_the_same_bits(fleet: Callable[..., Any]) -> None:
    """Each lane is a group of its own (Gloo); a rank dies under its backward, and another replica joins."""
    run = fleet(
        fault("r1/1.1", "scatter", step=2, bucket=1), replicas=2, ranks=2, steps=24, script=[SCRIPT],
        gates=(4, 10, 20), exchange="c10d",
    )  # fmt: skip
    run.gate(4, "a new replica was served", lambda: run.served("r1.2"))
    run.gate(10, "it had caught up", lambda: run.caught_up("r1.2"))
    run.gate(20, "it trained again", lambda: len(run.driven.members) == 2)
    assert run.finish() == 0, run.logs()
    want, results = undisturbed(SCRIPT, 24), run.results()
    assert set(results) == {"r0.1-0", "r0.1-1", "r1.2-0", "r1.2-1"}, run.logs()
    assert {found["fingerprint"] for found in results.values()} == {want["fingerprint"]}, run.logs()
    assert results["r0.1-1"] == want


@pytest.mark.parametrize("dies", [False, True])
def test_an_outcome_is_handed_over_lane_by_lane(fleet: Callable[..., Any], dies: bool) -> None:
    """The dying replica's header reached one survivor only: it is ahead, and hands each lane its part. A rank that is
    killed while it takes its own leaves the others to go on."""
    run = fleet(
        fault("r2", "header", "mute", step=2, peer="r1.1"), fault("r2", "verdict", "hang", step=2),
        *[fault("r1/1", "hand_over_receive", step=2)] * dies,
        replicas=3, ranks=2, steps=STEPS, script=[SCRIPT], max_restarts=0, stall_floor_s=60.0,
    )  # fmt: skip
    run.until("one of the survivors was ahead", lambda: run.driven.step == 2)
    run.strike(run.pid("r2.1"))
    check(run, {"r0.1"} if dies else {"r0.1", "r1.1"}, 2, 2 if dies else 1)


def test_ranks_that_all_hear_a_notice_save_first(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """An engine sends SIGTERM to every process: a rank that is no lead stays, as its lead leaves for both."""
    run = fleet(
        replicas=2, ranks=2, steps=12, script=[SCRIPT], gates=(4,), checkpoint_dir=str(tmp_path / "kept"),
        checkpoint_min_s=600.0,
    )  # fmt: skip
    run.until("steps were made", lambda: run.driven.step == 3)
    for each in processes(run.driven.process.pid):
        with contextlib.suppress(ProcessLookupError):
            run.strike(each.pid, signal.SIGTERM)
    run.strike(run.driven.process.pid, signal.SIGTERM)
    told = lambda: any(isinstance(e, ev.CheckpointInterval) and "stop" in e.reason for e in run.driven.events)  # noqa: E731
    run.gate(4, "the coordinator was told", told)
    assert run.finish() == 143, run.logs()
    (saved,) = run.saved()
    assert saved.num_writers == 4


def test_a_rank_raises_or_is_stopped(fleet: Callable[..., Any]) -> None:
    """An exception in the loop of a rank that is no lead is told as its replica's; a stopped rank is continued."""
    run = fleet(
        fault("r2/1", "load", "raise", step=2), fault("r1/1", "load", "SIGSTOP", step=3),
        replicas=3, ranks=2, steps=STEPS, script=[SCRIPT], max_restarts=0, stall_floor_s=60.0,
    )  # fmt: skip
    check(run, {"r0.1", "r1.1"}, 2, 1)
    (gone,) = [exit for exit in run.exits() if exit.cause != "finished"]
    assert (gone.replica, gone.cause) == ("r2.1", "exception")
    assert "ordered for r2/1.1 in load" in gone.detail


def test_a_rank_that_is_silent_takes_its_replica_with_it(fleet: Callable[..., Any]) -> None:
    """In work of its own, and where it only waits for others."""
    run = fleet(
        fault("r1/1", "merge", "hang", step=4), fault("r2/1", "scattered", "hang", step=6),
        replicas=3, ranks=2, steps=8, script=[SCRIPT], stall_floor_s=6.0, max_restarts=0,
    )  # fmt: skip
    assert run.finish() == 0, run.logs()
    assert of_run(run.driven.run_dir) == []
    results = run.results()
    assert set(results) == {"r0.1-0", "r0.1-1"}, run.logs()
    assert all(found == undisturbed(SCRIPT, 8) for found in results.values()), run.logs()
    why = {exit.replica: exit.detail for exit in run.exits() if exit.cause == "evicted"}
    assert set(why) == {"r1.1", "r2.1"}, run.logs()
    assert "in merge" in why["r1.1"]
    assert "no sign of life" in why["r2.1"]


def test_a_script_that_shards_nothing_is_refused(fleet: Callable[..., Any]) -> None:
    run = fleet(replicas=1, ranks=2, steps=STEPS)
    assert run.finish() == 2, run.logs()
    assert "is not sharded by rows over the 2 ranks of this replica" in run.logs()


def found(run: Any) -> list[tuple[str, str, int]]:
    return [(e.culprit, e.verdict, e.step) for e in run.driven.events if isinstance(e, ev.AuditMismatch)]


def test_another_replica_audits_with_all_its_ranks(fleet: Callable[..., Any]) -> None:
    """A wrong gradient, a wrong slice and a sum that changed, each in a rank that is no lead: found in its lane, told
    of its replica, and gone before the step is committed."""
    flips = [
        Flip(replica="r1/1", step=1, microbatch=3, parameter="1.up.weight", element=300, bit=3),
        Flip(replica="r2/1", target="reducer", step=3, parameter=-1, bit=4),
        Flip(replica="r0/1", target="sum", step=5, parameter=-1, bit=9),
    ]
    run = fleet(replicas=3, ranks=2, steps=STEPS, script=[SCRIPT], flips=flips, audit="1.0", max_restarts=0)
    assert run.finish() == 0, run.logs()
    results = run.results()
    assert set(results) == {f"r{slot}.1-{place}" for slot in range(3) for place in range(2)}, run.logs()
    for name, each in results.items():
        assert each == undisturbed(SCRIPT), f"{name}\n{run.logs()}"
    assert found(run) == [("r1.1", "transient", 1), ("r2.1", "transient", 3), ("r0.1", "memory", 5)], run.logs()
    (slice_,) = [e.evidence for e in run.driven.events if isinstance(e, ev.AuditMismatch) and e.bucket >= 0]
    assert "of rank 1" in slice_
    gradient = next(e for e in run.driven.events if isinstance(e, ev.AuditMismatch))
    assert gradient.microbatch == 2
    assert "microbatches 2 to 3 of step 1" in gradient.evidence


def test_a_rank_that_repeats_a_wrong_gradient_costs_its_replica(fleet: Callable[..., Any]) -> None:
    """Over a network."""
    flip = Flip(replica="r2/1", step=2, parameter=0, element=5, bit=30, times=0)
    run = fleet(
        replicas=3, ranks=2, steps=STEPS, script=[SCRIPT], flips=[flip], audit="1.0", exchange="c10d", max_restarts=0
    )
    assert run.finish() == 0, run.logs()
    results = run.results()
    assert set(results) == {f"r{slot}.1-{place}" for slot in range(2) for place in range(2)}, run.logs()
    for name, each in results.items():
        assert each == undisturbed(SCRIPT), f"{name}\n{run.logs()}"
    assert ("r2.1", "persistent", 2) in found(run), run.logs()


def test_who_joins_believes_what_the_others_have_found(fleet: Callable[..., Any]) -> None:
    """Where outlast chooses the share, what was found is part of each rank's state; so is what a certified state holds
    of its rows."""
    flip = Flip(replica="r1/1.1", target="parameter", step=2, parameter="1.up.weight", element=300, bit=20)
    guards = {"agreement": 1, "certify_every": 3}
    run = fleet(
        replicas=3, ranks=2, steps=40, script=[SCRIPT, "--guards", json.dumps(guards)], flips=[flip], audit="auto",
        gates=(4, 20, 36),
    )  # fmt: skip
    run.gate(4, "a new replica was served", lambda: run.served("r1.2"))
    run.gate(20, "it had caught up", lambda: run.caught_up("r1.2"))
    run.gate(36, "it trained again", lambda: len(run.driven.members) == 3)
    assert run.finish() == 0, run.logs()
    results = run.results()
    assert set(results) == {f"{name}-{place}" for name in ("r0.1", "r1.2", "r2.1") for place in range(2)}, run.logs()
    assert {each["fingerprint"] for each in results.values()} == {undisturbed(SCRIPT, 40)["fingerprint"]}
    (verdict,) = [e for e in run.driven.events if isinstance(e, ev.VerdictReached)]
    assert (verdict.action, verdict.replica, verdict.step) == ("replace", "r1.1", 2), run.logs()
    assert "1.up.weight" in verdict.evidence
