"""Real runs that cannot go well, and one that must though strangers shout at its port."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.core import events as ev
from outlast.journal import Journal
from outlast.prove._drive import Driven

pytestmark = pytest.mark.process

SCRIPT = """
import fcntl, os, signal, sys, threading, torch, outlast
what = sys.argv[1]
run = outlast.join()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
if what == "calm":
    print("nothing to train")
    sys.exit(0)
if what == "differs" and run.name.startswith("r1."):
    torch.nn.init.zeros_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training = run.protect(model, optimizer, list(torch.ones(64, 4)), global_batch_size=8, microbatches=2)
for step in training.steps(until=int((*sys.argv, 4)[2])):
    for batch in step:
        if what == "bug" and step.number == 2:
            raise LookupError("a bug of mine")
        if what == "leaves" and step.number == 2:
            sys.exit(0)
        step.backward(model(batch).mean())
    print(f"step {step.number} is over")
    if what == "forks" and step.number == 1:
        child = os.fork()
        if child == 0:
            sys.excepthook(LookupError, LookupError("of a child, which is no replica"), None)
            os._exit(1)
        os.waitpid(child, 0)
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(theirs, b"!")
            while True:
                signal.pause()
        os.read(ours, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    if what == "orphan" and step.number == 1:
        ours, theirs = os.pipe()
        if os.fork() == 0:
            print("forked", os.getpid(), flush=True)
            os.write(theirs, b"!")
            while True:
                signal.pause()
        os.read(ours, 1)  # who is swept before it has said so proves nothing
        os._exit(9)
    if what == "held" and step.number == 3:
        with open(sys.argv[3] + ".gate") as gate:
            fcntl.flock(gate, fcntl.LOCK_SH)
    if what == "slow":
        threading.Event().wait(0.02)
    if what == "break" and step.number == 1:
        break
if len(sys.argv) > 3 and run.is_writer:
    with open(sys.argv[3], "w") as file:
        file.write(training.fingerprint())
"""


def run(tmp_path: Path, what: str, *options: str) -> tuple[int, str, str, list[ev.AnyEvent]]:
    """(exit code, output, errors, journal) of a run of SCRIPT."""
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OUTLAST_")}
    command = [sys.executable, "-m", "outlast", "run", "--run-dir", str(run_dir), *options, str(script), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=85, env=environ)
    with Journal.open_reader(run_dir) as journal:
        events = [entry.event for entry in journal.events() if not isinstance(entry.event, ev.RunEnded)]
    return done.returncode, done.stdout, done.stderr, events


def unhurried(tmp_path: Path) -> list[str]:
    """Options: another process is started long after all have failed, however slow the last of them is."""
    config = tmp_path / "unhurried.toml"
    config.write_text("[run]\nrestart_backoff_s = 30.0\n")
    return ["--config", str(config)]


def alive(pid: int) -> bool:
    """Nobody may be there to reap who has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def num_sockets(pid: int) -> int:
    """How many a process holds."""
    found = 0
    for place in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(place).startswith("socket:")
    return found


def started(events: list[ev.AnyEvent]) -> list[str]:
    return [event.replica for event in events if isinstance(event, ev.ReplicaStarted)]


def test_more_replicas_than_microbatches_is_told_once_and_nobody_is_restarted(tmp_path: Path) -> None:
    code, out, err, events = run(tmp_path, "well", "--replicas", "3", *unhurried(tmp_path))
    assert code == 2
    assert (out + err).count("3 replicas cannot share 2 microbatches") == 1
    assert "protect(microbatches=3) or more, or at most --replicas 2" in out + err
    assert set(started(events)) <= {"r0.1", "r1.1", "r2.1"}


@pytest.mark.parametrize(
    ("what", "reason"),
    [("bug", "LookupError: a bug of mine"), ("differs", "replicas that must be equal differ in bias")],
)
def test_the_script_s_own_error_is_shown_once(tmp_path: Path, what: str, reason: str) -> None:
    code, out, err, events = run(tmp_path, what, "--replicas", "2", *unhurried(tmp_path))
    assert code == 5
    assert (out + err).count(reason) == 1
    assert (out + err).count("Traceback") == (what == "bug"), "an error of ours needs none"
    assert out.count("step 1 is over") == (what == "bug")
    assert set(started(events)) <= {"r0.1", "r1.1"}
    end = [event for event in events if isinstance(event, ev.RunFinished)][-1]
    assert (end.outcome, end.steps) == ("failed", 2 if what == "bug" else 0)
    assert not [event for event in events if isinstance(event, ev.Recovery)]


def test_what_the_script_forks_is_not_the_replica(tmp_path: Path) -> None:
    """One child raises, one is terminated, as `multiprocessing` does it: to the run nothing has happened."""
    code, out, err, events = run(tmp_path, "forks", "--replicas", "2")
    assert code == 0, err
    assert "step 3 is over" in out
    end = [event for event in events if isinstance(event, ev.RunFinished)][-1]
    assert (end.outcome, end.steps) == ("finished", 4)
    assert not [event for event in events if isinstance(event, ev.Recovery)]
    assert set(started(events)) == {"r0.1", "r1.1"}


def test_what_a_failed_replica_forked_dies_with_it(tmp_path: Path) -> None:
    code, out, _, _ = run(tmp_path, "orphan")
    assert code == 5
    forked = [int(line.split()[1]) for line in out.splitlines() if line.startswith("forked ")]
    assert forked
    assert not list(filter(alive, forked))


def test_a_script_that_never_trains_is_told_and_not_started_again(tmp_path: Path) -> None:
    """It ends with code 0: nothing failed, and nothing was trained."""
    code, out, err, events = run(tmp_path, "calm", "--replicas", "2", *unhurried(tmp_path))
    assert code == 5
    assert "steps() of outlast.join().protect(...) was never begun" in err
    assert "nothing to train" in out + err
    assert not [event for event in events if isinstance(event, ev.Recovery)], "nothing was outlasted"
    assert len(started(events)) <= 3, "as with a script that raises: once more at most while the other is starting"


def test_what_was_committed_before_a_script_ended_itself_is_on_record(tmp_path: Path) -> None:
    code, _, err, events = run(tmp_path, "leaves")
    assert code == 5, "not all steps were done"
    assert "the script ended by itself before all steps were done" in err
    end = [event for event in events if isinstance(event, ev.RunFinished)][-1]
    assert (end.outcome, end.steps) == ("stopped", 2)
    assert [step for event in events if isinstance(event, ev.ProgressMade) for step, _ in event.losses] == [0, 1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_the_run_in_order(number: signal.Signals, tmp_path: Path) -> None:
    """Who asked is told apart, and the exit code is not that of a run that did its work; no process stays behind."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, also by children
    with Driven(tmp_path / "run", [], [str(script), "slow", "5000"]) as driven:
        signal.signal(signal.SIGHUP, inherited)
        driven.until("training had begun", lambda: driven.step >= 1, 85.0, lambda: None)
        pids = [event.pid for event in driven.events if isinstance(event, ev.ReplicaStarted | ev.AgentStarted)]
        driven.process.send_signal(number)
        code = driven.finish(60.0, lambda: None)
    end = [event for event in driven.events if isinstance(event, ev.RunFinished)][-1]
    why = {signal.SIGINT: "interrupt", signal.SIGHUP: "hangup", signal.SIGTERM: "terminated"}[number]
    assert (end.outcome, end.detail, code, end.exit_code) == ("stopped", why, 128 + number, 128 + number)
    assert not list(filter(alive, pids))


@pytest.mark.campaign
def test_all_may_break_out_of_the_loop_after_the_same_step(tmp_path: Path) -> None:
    code, out, err, events = run(tmp_path, "break", "--replicas", "2")
    assert code == 0, err
    assert "step 1 is over" in out
    end = [event for event in events if isinstance(event, ev.RunFinished)][-1]
    assert (end.outcome, end.steps) == ("finished", 2)
    told = [event for event in events if isinstance(event, ev.ProgressMade)]
    assert [step for event in told for step, _ in event.losses] == [0, 1]
    assert max(max(event.stable, event.committed) for event in told) == 2
    parts = sum(seconds for name, seconds in end.seconds.items() if name != "wall")
    assert parts == pytest.approx(end.seconds["wall"], abs=1e-6)
    views = [event for event in events if isinstance(event, ev.ViewInstalled)]
    assert [view.num_microbatches for view in views] == [2]
    assert [event.agent for event in events if isinstance(event, ev.AgentStarted)] == ["a0"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a file system can be mounted by root alone")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_under_the_run_directory(small_disk: Path, tmp_path: Path) -> None:
    (small_disk / "ballast").write_bytes(b"x" * (4090 << 10))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "outlast", "run", "--run-dir", str(small_disk / "run"), str(script), "well"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    assert "full" in done.stderr or "No space left" in done.stderr
    assert "remedy" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.campaign
def test_a_disk_that_fills_while_training(small_disk: Path, tmp_path: Path) -> None:
    """Logs and events find no room; the run goes on, survives a death, and has the bits of a fleet of one."""
    script, told, alone = tmp_path / "train.py", tmp_path / "told", tmp_path / "alone"
    script.write_text(SCRIPT)
    gate = told.with_suffix(".gate").open("w")
    fcntl.flock(gate, fcntl.LOCK_EX)
    with gate, Driven(small_disk / "run", ["--replicas", "2"], [str(script), "held", "300", str(told)]) as driven:
        driven.until("training went on", lambda: driven.step >= 2, 85.0, lambda: None)
        with contextlib.suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as file:
            for size in (1 << 14, 1 << 10, 1):
                with contextlib.suppress(OSError):
                    while file.write(b"x" * size):
                        pass
        assert os.statvfs(small_disk).f_bavail == 0
        victim = next(e.pid for e in driven.events if isinstance(e, ev.ReplicaStarted) and e.replica == "r1.1")
        os.kill(victim, signal.SIGKILL)
        gate.close()
        code = driven.finish(85.0, lambda: None)
        assert code == 0, driven.process.communicate()
    subprocess.run([sys.executable, str(script), "well", "300", str(alone)], check=True, timeout=60)
    assert told.read_text() == alone.read_text()


@pytest.mark.campaign
def test_strangers_at_the_port_do_not_touch_the_run(fleet: Callable[..., Any]) -> None:
    run = fleet(replicas=2, steps=60, gates=(50,))
    run.until("training went on", lambda: run.driven.step >= 2)
    known = num_sockets(run.driven.coordinator_pid)
    environ = Path(f"/proc/{run.driven.coordinator_pid}/environ").read_bytes().split(b"\0")
    text = next(row for row in environ if row.startswith(b"OUTLAST_COORDINATOR=")).partition(b"=")[2].decode()
    address = (text.rpartition(":")[0], int(text.rpartition(":")[2]))
    draw = random.Random(1)
    idle = [socket.create_connection(address) for _ in range(100)]
    for number in range(60):
        with socket.create_connection(address) as sock:
            size = draw.choice([10, 4096, 4097, 1 << 24, 0xFFFFFFFF])
            sock.sendall(struct.pack(">I", size) + draw.randbytes(min(size, 4096)) + bytes([number]))
    state = subprocess.run(
        [sys.executable, "-m", "outlast", "status", "--json", str(run.driven.run_dir)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    shown = json.loads(state.stdout)
    assert shown["state"] in ("training", "stalled")  # it may have come to its gate before it was asked
    for process in (shown["coordinator"], *shown["agents"], *shown["replicas"]):
        assert process["pid"] > 1
        assert process["state"] in ("running", shown["state"])
        assert process["view"] == [1, 1]
        assert process["step"] >= 0
    assert [replica["replica"] for replica in shown["replicas"]] == ["r0.1", "r1.1"]
    for sock in idle:
        sock.close()
    with socket.create_connection(address) as sock:  # who comes last is answered when all before have come in
        sock.recv(1)
    run.gate(50, "all were turned away", lambda: num_sockets(run.driven.coordinator_pid) <= known)
    run.assert_unchanged(survivors={"r0.1", "r1.1"}, recoveries=0)
    refused = [event for event in run.driven.events if isinstance(event, ev.Refused)]
    counts = {event.reason: event.count for event in refused}
    assert sum(counts.values()) >= 150
    assert len(refused) <= sum(len(str(count)) + 1 for count in counts.values())  # the 1st, 10th, 100th; and the sum
