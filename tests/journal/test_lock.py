"""One run a directory, held by real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.errors import EnvironmentFault
from outlast.journal import Journal, RunLock, is_held

HOLDER = """
import pathlib, sys
from outlast.journal import Journal
journal = Journal.open_writer(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""
COORDINATOR = """
import pathlib, sys
from outlast.journal import Journal
with Journal.open_writer(pathlib.Path(sys.argv[1]), lock_fd=int(sys.argv[2])) as journal:
    epoch = journal.claim()
    print(epoch, flush=True)
    sys.stdin.readline()
    print(journal.put(epoch, "view", str(epoch).encode()), flush=True)
"""


def start(script: str, *args: str, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", script, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
        pass_fds=pass_fds,
    )  # fmt: skip


def say(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.process
def test_two_runs_in_one_directory(tmp_path: Path) -> None:
    Journal.create(tmp_path).close()
    with start(HOLDER, str(tmp_path)) as holder:
        assert say(holder) == "held"
        with pytest.raises(EnvironmentFault, match="two runs in one directory") as caught:
            Journal.open_writer(tmp_path)
        assert str(holder.pid) in caught.value.message
        assert "--run-dir" in caught.value.remedy
        Journal.open_reader(tmp_path).close()
        assert is_held(tmp_path)
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(10)
        assert is_held(tmp_path) is False
        Journal.open_writer(tmp_path).close()  # the kernel released it


@pytest.mark.process
def test_the_run_s_lock_passes_to_coordinators_and_epochs_tell_them_apart(tmp_path: Path) -> None:
    Journal.create(tmp_path).close()
    lock = RunLock.take(tmp_path)
    args = (str(tmp_path), str(lock.fileno()))
    with start(COORDINATOR, *args, pass_fds=(lock.fileno(),)) as old:
        assert say(old) == "1"
        os.kill(old.pid, signal.SIGSTOP)  # stopped, not dead: it holds the lock's descriptor still
        with start(COORDINATOR, *args, pass_fds=(lock.fileno(),)) as new:
            assert say(new) == "2"
            print("go", file=new.stdin, flush=True)
            assert say(new) == "True"
        os.kill(old.pid, signal.SIGCONT)
        print("go", file=old.stdin, flush=True)
        assert say(old) == "False"
    with pytest.raises(EnvironmentFault, match="two runs"):
        Journal.open_writer(tmp_path)
    lock.release()
    with Journal.open_writer(tmp_path) as journal:
        assert journal.get("view") == b"2"


def test_another_directory_s_lock_is_not_taken_for_ours(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Journal.create(tmp_path / name).close()
    lock = RunLock.take(tmp_path / "a")
    with pytest.raises(EnvironmentFault, match="is not the lock"):
        Journal.open_writer(tmp_path / "b", lock_fd=lock.fileno())
    lock.release()


def test_a_refused_creation_lets_go_of_the_directory(tmp_path: Path) -> None:
    Journal.create(tmp_path).close()
    with pytest.raises(ValueError, match="already holds"):
        Journal.create(tmp_path)
    RunLock.take(tmp_path).release()


def test_whether_a_run_is_held_is_read_from_the_kernel_s_table(tmp_path: Path) -> None:
    assert is_held(tmp_path) is None  # no lock was ever taken
    Journal.create(tmp_path / "run").close()
    inode = (tmp_path / "run" / "run.lock").stat().st_ino
    table = tmp_path / "locks"
    table.write_text(
        f"1: POSIX  ADVISORY  WRITE 7 fe:00:{inode} 0 EOF\n2: FLOCK  ADVISORY  WRITE 7 fe:00:{inode}1 0 EOF\n"
    )
    assert is_held(tmp_path / "run", table) is False
    table.write_text(f"1: FLOCK  ADVISORY  WRITE 7 fe:00:{inode} 0 EOF\n")
    assert is_held(tmp_path / "run", table) is True
    assert is_held(tmp_path / "run", tmp_path / "absent") is None
