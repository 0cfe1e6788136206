"""A host that is short of processes or descriptors for a moment: nobody is ended for it, nor left unwatched."""

from __future__ import annotations

import errno
import os
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outlast.config import RunConfig, encoded
from outlast.runtime.host import _children
from outlast.runtime.host._heir import HeirWatch
from outlast.runtime.host.probes import Probes
from outlast.runtime.host.silence import cpu_s, is_full
from outlast.runtime.member._heartbeat import ping
from outlast.runtime.transport.connections import Listener
from outlast.runtime.transport.rank_channel import RankPipe


def test_a_thread_that_ends_takes_no_processor_time_with_it() -> None:
    """Else a replica would seem not to work in each look in which one of its threads ends, and be taken for hung."""
    worked, ends = threading.Event(), threading.Event()

    def work() -> None:
        while time.thread_time() < 0.1:
            pass
        worked.set()
        ends.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    assert worked.wait(30)
    before_s = cpu_s(os.getpid())
    ends.set()
    thread.join()
    assert cpu_s(os.getpid()) >= before_s >= 0.1


def test_a_process_that_is_gone_has_no_processor_time() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert cpu_s(pid) == 0.0


def test_an_agent_outlasts_that_there_is_no_process_for_an_heir(tmp_path: Path) -> None:
    now_s, tries, child = [0.0], list[float](), SimpleNamespace(pid=77, reap=lambda: None)

    def start(*_: Any, **__: Any) -> Any:
        tries.append(now_s[0])
        if len(tries) == 1:
            raise BlockingIOError(errno.EAGAIN, "no process to be had")
        return child

    config = RunConfig(record="etcd://127.0.0.1:2379", endpoint="10.0.0.1:29400", nnodes="2")
    environ = {"OUTLAST_CONFIG": encoded(config), "OUTLAST_RUN_DIR": str(tmp_path)}
    system: Any = SimpleNamespace(start=start, now_s=lambda: now_s[0])
    heir = HeirWatch(environ, system)
    for now_s[0] in (0.0, 1.0, 2.5):
        heir.turn()
    assert (tries, heir.pid) == ([0.0, 2.5], 77)


def test_a_member_that_has_no_thread_to_report_its_paths_trains_on(refuse: set[str]) -> None:
    pinged, told = list[str](), list[Any]()
    mesh: Any = SimpleNamespace(ping=lambda: pinged.append("all"), answered=set())
    refuse.add("Thread-")
    ping(mesh, told.append)
    assert (pinged, told) == (["all"], [])


def test_who_can_open_nothing_more_is_seen_from_outside() -> None:
    begun = [sys.executable, "-c", "print(flush=True); input()"]  # else it might need a descriptor to begin, and end
    with subprocess.Popen(begun, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        for at_most, full in ((64, False), (3, True), (2, True)):  # it has three, and keeps what is above its limit
            resource.prlimit(other.pid, resource.RLIMIT_NOFILE, (at_most, 64))
            assert is_full(other.pid) is full
        assert other.stdin is not None
        other.stdin.close()
    assert not is_full(other.pid), "it is gone"


def test_a_socket_s_thread_that_does_not_begin_is_not_waited_for(stillborn: set[str]) -> None:
    """What cannot go on without it ends with a sentence, and is started anew: it would stand there for ever."""
    stillborn |= {"outlast-door", "outlast-rank-", "probes"}
    with pytest.raises(RuntimeError, match="did not begin"):
        Listener("short", "r0.1", b"s" * 32)
    near, far = socket.socketpair()
    with near, far, pytest.raises(RuntimeError, match="did not begin"):
        RankPipe(near, 1)
    with pytest.raises(RuntimeError, match="did not begin"):
        Probes("127.0.0.1:0")


class Full(socket.socket):
    """A listening socket of a process that has no descriptor left, `times` times."""

    times = 1

    def accept(self) -> Any:
        self.times -= 1
        if self.times >= 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


class Watches(selectors.DefaultSelector):
    """`full`: the system watches no more; `waits`: what each look would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.full, self.waits = False, list[float]()

    def register(self, fileobj: Any, events: int, data: Any = None) -> Any:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().register(fileobj, events, data)

    def select(self, timeout: float | None = None) -> Any:
        self.waits.append(timeout or 0.0)
        return super().select(0.0)


@pytest.fixture
def probed() -> Iterator[tuple[Probes, Watches, socket.socket]]:
    """Somebody who calls at a listening socket for probes, which is watched."""
    with Full() as listening, socket.socket() as caller, Watches() as watches:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.setblocking(False)
        caller.connect(listening.getsockname())
        caller.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        probes = Probes("")
        probes._listening = listening
        watches.register(listening, selectors.EVENT_READ)
        yield probes, watches, caller
        for sock in probes._open:
            sock.close()


def answered(probes: Probes, watches: Watches, caller: socket.socket) -> bool:
    """What a few turns make of the call."""
    for _ in range(4):
        probes._turn(watches)
    caller.setblocking(False)
    try:
        return caller.recv(15) == b"HTTP/1.1 200 OK"
    except BlockingIOError:
        return False


def test_probes_for_which_there_is_no_descriptor_are_not_looked_at_without_an_end(
    probed: tuple[Probes, Watches, socket.socket],
) -> None:
    probes, watches, caller = probed
    for _ in range(2):
        probes._turn(watches)
    assert [wait_s < 1.0 for wait_s in watches.waits] == [False, True]
    assert probes._listening.times == 0, "in the second turn nobody was let in"  # type: ignore[attr-defined]
    assert answered(probes, watches, caller)
    assert watches.waits[-1] > 1.0


def test_a_probe_that_cannot_be_watched_is_let_go_and_the_next_is_answered(
    probed: tuple[Probes, Watches, socket.socket],
) -> None:
    probes, watches, caller = probed
    probes._listening.times, watches.full = 0, True  # type: ignore[attr-defined]
    probes._turn(watches)
    with pytest.raises(ConnectionResetError):  # what it had said was not read
        caller.recv(1)
    watches.full = False
    with socket.create_connection(probes._listening.getsockname()) as another:
        another.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert answered(probes, watches, another)


def test_who_cannot_be_watched_is_not_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def short(pid: int, flags: int = 0) -> int:
        started.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", short)
    with pytest.raises(OSError, match="Too many open files"):
        _children.start([sys.executable, "-c", "import time; time.sleep(600)"], environ=os.environ)
    assert not Path(f"/proc/{started[0]}").exists()


def test_a_child_without_memory_to_begin_is_a_want_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who started it tries again."""

    def short(*_: int) -> None:
        raise MemoryError

    monkeypatch.setattr(_children._libc, "prctl", short)
    with pytest.raises(OSError, match="preexec_fn") as refused:
        _children.start([sys.executable, "-c", ""], environ=os.environ)
    assert refused.value.errno == errno.ENOMEM


def test_a_child_that_is_stopped_before_it_is_its_program_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then whoever starts it waits for it alone: an agent heard of nothing any more, and the run never ended."""
    monkeypatch.setattr(_children._libc, "prctl", lambda *_: [os.kill(os.getpid(), signal.SIGSTOP) for _ in range(2)])
    before, _ = signal.getsignal(signal.SIGALRM), signal.setitimer(signal.ITIMER_REAL, 900.0)
    child = _children.start([sys.executable, "-c", "raise SystemExit(7)"], environ=os.environ)
    assert select.select([child.fd], [], [], 60)[0]
    ended = child.reap()
    assert ended is not None
    assert ended.code == 7
    assert signal.getsignal(signal.SIGALRM) == before
    assert 0.0 < signal.setitimer(signal.ITIMER_REAL, 0.0)[0] <= 900.0
