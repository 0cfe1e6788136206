"""A rank that is forked from a process with torch loaded is what `python train.py` is; and that process may die."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import py_compile
import select
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.runtime.host import _nursery
from outlast.runtime.host._children import Child, Exit
from outlast.runtime.host._nursery import Nursery, Preloading

pytestmark = pytest.mark.process

SCRIPT = '''
"""Its doc."""
import concurrent.futures, json, multiprocessing, os, pickle, random, sys
import beside

class Mine:
    def __eq__(self, other):
        return type(other) is Mine

def square(x):
    return x * x

def look():
    import numpy
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        squares = pool.map(square, [1, 2, 3])
    return {
        "name": __name__, "doc": __doc__, "file": __file__, "argv": sys.argv, "flags": list(sys.argv[1:]),
        "path": sys.path[0], "first": beside.ANSWER,
        "same": pickle.loads(pickle.dumps(Mine())) == Mine(), "squares": squares,
        "fds": sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in (0, 1, 2)),
        "sockets": sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
                       for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")),
        "session": os.getsid(0) == os.getpid(), "keys": sorted(k for k in os.environ if k.startswith("OUTLAST")),
        "variable": os.environ.get("ONE"), "safe": sys.flags.safe_path, "buffered": sys.stdout.line_buffering,
        "command": open("/proc/self/cmdline").read(), "parent": os.getppid(),
        "drawn": [random.random(), float(numpy.random.rand())],
        "future": concurrent.futures.ThreadPoolExecutor(1).submit(square, 4).result(),
    }

if __name__ == "__main__":
    what = os.environ.get("WHAT", "look")
    if what == "look":
        print(json.dumps(look()))
    elif what == "raise":
        raise LookupError("a bug of mine")
    elif what == "exit":
        import atexit
        atexit.register(print, "at exit")
        sys.exit(7)
    elif what == "garbage":
        import gc
        collections = gc.get_stats()[2]["collections"]
        gc.collect()  # the tests' processes look for none before their first
        print(json.dumps({
            "collections": collections, "objects": len(gc.get_objects()), "loaded": gc.get_freeze_count(),
            "enabled": gc.isenabled(), "thresholds": gc.get_threshold(),
        }))
    elif what == "words":
        sys.exit("some words")
    elif what == "wait":
        print("up", flush=True)
        import signal
        signal.pause()
'''


def _wait_for(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(60_000), "nothing came within a minute"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("script")
    (base / "train.py").write_text(SCRIPT)
    (base / "beside.py").write_text("ANSWER = 42\n")
    return base


@contextlib.contextmanager
def ready(command: list[str]) -> Iterator[Nursery]:
    """One for this command that has loaded."""
    made = Nursery(command, os.environ, ())
    try:
        _wait_for(made.fd)
        assert made.hear()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def nursery(place: Path) -> Iterator[Nursery]:
    with ready([sys.executable, str(place / "train.py"), "a", "-b"]) as made:
        yield made


def _end(child: Child) -> Exit:
    _wait_for(child.fd)
    how = child.reap()
    assert how is not None
    return how


def forked(nursery: Nursery, log: Path, **environ: str) -> tuple[Exit, str]:
    with log.with_suffix(".progress").open("w") as progress:
        child = nursery.start({"OUTLAST_MEMBER": "r0.1", **environ}, log, progress.fileno())
    return _end(child), log.read_text()


def alone(place: Path, **environ: str) -> tuple[int, str]:
    """The script as Python starts it."""
    done = subprocess.run(
        [sys.executable, str(place / "train.py"), "a", "-b"], env=os.environ | environ, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_a_script_finds_what_it_would_find_by_itself(nursery: Nursery, place: Path, tmp_path: Path) -> None:
    how, text = forked(nursery, tmp_path / "log", ONE="1")
    assert how == Exit(signal=None, code=0), text
    here = json.loads(text)
    code, text = alone(place, ONE="1")
    assert code == 0, text
    there = json.loads(text)
    assert here["keys"] == ["OUTLAST_MEMBER", "OUTLAST_PROGRESS_FD"]
    assert here["parent"] == os.getpid(), "the agent's own child"
    own = {
        "command",
        "keys",
        "parent",
        "drawn",
        "fds",
        "buffered",
        "safe",
    }  # what differs with any two processes, and the log
    assert {k: v for k, v in here.items() if k not in own} == {k: v for k, v in there.items() if k not in own}
    again = json.loads(forked(nursery, tmp_path / "again")[1])
    assert not set(again["drawn"]) & set(here["drawn"]), "no two ranks draw alike"


@pytest.mark.parametrize("what", ["raise", "exit", "words"])
def test_a_script_ends_as_by_itself(nursery: Nursery, place: Path, tmp_path: Path, what: str) -> None:
    how, text = forked(nursery, tmp_path / "log", WHAT=what)
    assert (how.code, text) == alone(place, WHAT=what)


@pytest.mark.parametrize(
    ("name", "source", "said"),
    [
        ("bad.py", "x = (\n", "SyntaxError"),
        ("gone.py", None, "FileNotFoundError"),
        ("kept.pyc", "print('ran', __name__)", "ran __main__"),
        (
            "app.zip",
            "import sys, __main__; print('ran', __name__, sys.path[0], __main__.sys is sys)",
            "ran __main__ app.zip True",
        ),
        ("here.py", "import os; os.chdir('/'); print('ran', __file__)", "ran {}/here.py"),
    ],
)
def test_other_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str | None, said: str
) -> None:
    """By a relative path, as people give it."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / name
    if name.endswith(".pyc"):
        (tmp_path / "kept.py").write_text(source or "")
        py_compile.compile(str(tmp_path / "kept.py"), str(script))
    elif name.endswith(".zip"):
        with zipfile.ZipFile(script, "w") as archive:
            archive.writestr("__main__.py", source or "")
    elif source is not None:
        script.write_text(source)
    with ready([sys.executable, name]) as made:
        how, text = forked(made, tmp_path / "log")
    assert said.format(tmp_path) in text
    assert "_preloaded" not in text
    assert how.code == (0 if said.startswith("ran") else 1)


def test_a_module_runs_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import sys; print(__name__, sys.argv[1:], sys.path[0], __spec__.name)")
    with ready([sys.executable, "-m", "mine", "x"]) as made:
        how, text = forked(made, tmp_path / "log")
    assert (how.code, text) == (0, f"__main__ ['x'] {tmp_path} mine\n")


def test_one_whose_device_is_lost_to_forks_starts_as_a_program(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library may ask CUDA for its devices when it is imported; torch then refuses them to whoever is forked."""
    (tmp_path / "sitecustomize.py").write_text("import torch\ntorch.cuda._is_in_bad_fork = lambda: True\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with ready([sys.executable, str(place / "train.py"), "a", "-b"]) as made:
        how, text = forked(made, tmp_path / "log", ONE="1")
    assert how.code == 0, text
    found = json.loads(text)
    assert (found["parent"], found["session"], found["variable"]) == (os.getpid(), True, "1")
    assert found["argv"][1:] == ["a", "-b"]
    assert "_preloaded" not in found["command"]


def test_what_was_loaded_is_not_looked_through_for_garbage(nursery: Nursery, place: Path, tmp_path: Path) -> None:
    """Neither as it is loaded nor by a rank; what the rank makes itself is, as by itself."""
    how, text = forked(nursery, tmp_path / "log", WHAT="garbage")
    assert how == Exit(signal=None, code=0), text
    here, there = json.loads(text), json.loads(alone(place, WHAT="garbage")[1])
    assert here["collections"] == 0
    assert here["objects"] < here["loaded"] / 10
    assert (here["enabled"], here["thresholds"]) == (True, there["thresholds"])


def test_without_the_agent_s_word_no_rank_begins(nursery: Nursery, tmp_path: Path) -> None:
    """The agent gave up waiting for its number and started the same rank otherwise: there must not be two."""
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)
    go_r, go_w = os.pipe()
    with (tmp_path / "log").open("wb") as log:
        import msgspec

        request = msgspec.msgpack.encode({"OUTLAST_MEMBER": "r0.1"})
        socket.send_fds(nursery._sock, [request], [log.fileno(), log.fileno(), go_r])
        pid = int(nursery._sock.recv(16))
        os.close(go_r)
        os.close(go_w)
    libc.prctl(36, 0, 0, 0, 0)
    assert _end(Child(pid)).code == 1
    assert (tmp_path / "log").read_text() == ""


def test_it_adopts_nobody_but_ranks_and_they_die_with_the_agent(place: Path, tmp_path: Path) -> None:
    agent = """
import os, select, signal, sys
from pathlib import Path
from outlast.runtime.host._nursery import Nursery
import ctypes
nursery = Nursery([sys.executable, sys.argv[1]], os.environ, ())
select.select([nursery.fd], [], [])
nursery.hear()
child = nursery.start({"OUTLAST_MEMBER": "r0.1", "WHAT": "wait"}, Path(sys.argv[2]), 0)
flag = ctypes.c_int(-1)
ctypes.CDLL(None).prctl(37, ctypes.byref(flag), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
print(child.pid, nursery.pid, flag.value, flush=True)
signal.pause()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", agent, str(place / "train.py"), str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    rank, nursery, adopts = map(int, process.stdout.readline().split())
    assert adopts == 0
    ends = [os.pidfd_open(pid) for pid in (rank, nursery)]
    process.kill()
    for fd in ends:
        _wait_for(fd)
        os.close(fd)
    process.wait()
    process.stdout.close()


PROGRAM = """
import os, signal, socket, sys
sock = socket.socket(fileno=int(os.environ["OUTLAST_NURSERY_FD"]))
if os.environ["MODE"] == "never":
    sys.exit(1)
if os.environ["MODE"] == "half":
    between = os.fork()
    if between == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(between, os.WUNTRACED)
    open(os.environ["BETWEEN"], "w").write(str(between))
if os.environ["MODE"] != "loads":
    sock.send(b"ready")
request, *_ = socket.recv_fds(sock, 1000, 3)
if os.environ["MODE"] == "full":
    sock.send(b"0")
signal.pause()
"""


def preloading(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float = 60.0) -> Preloading:
    """With a program that does no more than to misbehave."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(_nursery, "_PROGRAM", str(tmp_path / "program.py"))
    made = Preloading([sys.executable], os.environ | {"MODE": mode}, (), wanted=True, patience_s=patience_s)
    made.begin()
    return made


def heard(made: Preloading) -> None:
    _wait_for(made.fd)
    made.hear()


def test_another_follows_one_that_dies_and_not_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, pids = preloading("ready", tmp_path, monkeypatch), set()
    while made.pid > 0:
        heard(made)
        assert not made.loading
        pids.add(made.pid)
        os.kill(made.pid, signal.SIGKILL)
        heard(made)
    assert len(pids) == _nursery._MOST
    assert made.start({}, tmp_path / "log", 0) is None


def test_one_that_is_stuck_is_left_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nursery, "_FORK_S", 0.1)
    made = preloading("stuck", tmp_path, monkeypatch)
    heard(made)
    before = made.pid
    assert made.start({}, tmp_path / "log", 0) is None
    assert made.loading
    assert made.pid not in (before, -1)
    heard(made)
    assert made.pid > 0
    assert not made.loading
    made.close()


def test_who_was_stopped_before_it_was_a_rank_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first line nothing ends it with who forked it."""
    monkeypatch.setattr(_nursery, "_FORK_S", 0.1)
    monkeypatch.setenv("BETWEEN", str(tmp_path / "between"))
    made = preloading("half", tmp_path, monkeypatch)
    heard(made)
    stopped = os.pidfd_open(int((tmp_path / "between").read_text()))
    assert made.start({}, tmp_path / "log", 0) is None
    _wait_for(stopped)
    os.close(stopped)
    made.close()


def test_what_would_meet_any_start_is_no_fault_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = preloading("full", tmp_path, monkeypatch)
    heard(made)
    before = made.pid
    with pytest.raises(FileNotFoundError):
        made.start({}, tmp_path / "gone" / "log", 0)
    with pytest.raises(BlockingIOError, match="no process"):
        made.start({}, tmp_path / "log", 0)
    assert made.pid == before
    made.close()


def test_one_that_cannot_load_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = preloading("never", tmp_path, monkeypatch)
    assert made.loading
    heard(made)
    assert (made.pid, made.loading) == (-1, False)
    made.begin()
    assert made.pid == -1


def test_nobody_waits_for_ever_for_one_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = preloading("loads", tmp_path, monkeypatch, patience_s=0.0)
    assert made.pid > 0
    assert not made.loading
    assert made.start({}, tmp_path / "log", 0) is None
    made.close()


@pytest.mark.campaign
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_fleet_outlasts_the_process_that_its_ranks_come_from(
    fleet: Callable[..., Any], number: signal.Signals
) -> None:
    run = fleet(replicas=2, spares=1, steps=114, gates=(3, 60, 110))  # to become members takes steps
    run.until("steps were made", lambda: run.driven.step == 2)
    ranks = {run.pid(name) for name in ("r0.1", "r1.1", "r2.1")}
    agent = run.parent(run.pid("r0.1"))
    children = map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split())
    (nursery,) = set(children) - ranks
    run.strike(nursery, number)
    run.strike(run.pid("r1.1"))
    run.gate(3, "it was seen", lambda: run.exited("r1.1"))
    run.gate(60, "its successor was served", lambda: run.served("r1.2"))
    run.gate(110, "it had caught up", lambda: run.caught_up("r1.2"))
    run.assert_unchanged(survivors={"r0.1", "r2.1"}, recoveries=1)
