"""The threads of saves: what works is never given up, what failed is not said to hang, none stays behind, and where
none is to be had that is said."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from outlast.checkpoint import CheckpointEngine, LocalStore
from outlast.checkpoint import save_events as events
from outlast.checkpoint import threads as _threads
from outlast.checkpoint.threads import Threads, be_nice, begin, within


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((5000,), value)}


SCRIPT = """
import atexit, threading, torch
from outlast.checkpoint import CheckpointEngine, LocalStore, _writer
from outlast.checkpoint.fs import Disk

_writer.CHUNK_BYTES, _writer._GROUP_BYTES, _writer._RUN_BYTES = 4096, 4096, 8192
go_on, met = threading.Event(), threading.Event()

class Slow(Disk):
    def pwrite(self, *args, **kwargs):
        met.set()
        assert go_on.wait(60)
        return super().pwrite(*args, **kwargs)

engine = CheckpointEngine(LocalStore({place!r}, fs=Slow()), drain_to={far!r}, timeout_s=5.0)
handle = engine.save(1, {{"w": torch.arange(100_000)}})
engine.commit_later(handle)
handle.wait_copied()
assert met.wait(20)
atexit.register(go_on.set)  # runs just before the threads are asked to end
"""


def test_a_save_that_is_being_written_when_the_process_ends_is_published_and_drained(tmp_path: pathlib.Path) -> None:
    near, far = str(tmp_path / "near"), str(tmp_path / "far")
    script = SCRIPT.format(place=near, far=far)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert LocalStore(near).generations() == [0]
    loaded = CheckpointEngine(near).load()
    assert loaded is not None
    assert torch.equal(loaded.tensors["w"], torch.arange(100_000))
    if sys.version_info < (3, 12):  # later ones start no threads that late
        assert LocalStore(far).generations() == [0]


def test_who_waited_for_a_long_write_was_not_silent(tmp_path: pathlib.Path) -> None:
    """Else a process that ends then would not wait for the publication."""
    silent, go_on, met = list[bool](), threading.Event(), threading.Event()

    def probe(phase: str) -> None:
        if phase == "save.written":
            met.set()
            assert go_on.wait(20)
        elif phase == "publish.began":
            silent.append(engine._publisher.is_silent)

    engine = CheckpointEngine(str(tmp_path), probe=probe, timeout_s=60.0)
    handle = engine.save(1, state(1.0))
    assert handle is not None
    done = engine.commit_later(handle)
    assert met.wait(20)
    engine._publisher._crew.moved_s -= 1000  # so long does the writing take
    go_on.set()
    assert done.result(20) == 0
    engine.close()
    assert silent == [False]


def test_a_pool_that_had_nothing_to_do_is_not_silent() -> None:
    gate = threading.Event()
    pool = Threads(1, "t", limit_s=60.0, prepare=lambda: gate.wait(20) and None)
    pool._crew.moved_s -= 1000
    work = pool.submit(int)
    assert not pool.is_silent
    pool._crew.moved_s -= 1000
    pool.submit(int)
    assert pool.is_silent, "more work is no sign of life of what is under way"
    gate.set()
    assert work.result(20) == 0
    pool.shutdown()


def test_work_for_a_pool_that_the_end_of_the_process_has_stopped_is_refused() -> None:
    pool = Threads(1, "t")
    pool._crew.stop()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(int)


def test_a_system_that_refuses_a_priority_holds_no_work_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuses)
    pool = Threads(1, "t", prepare=lambda: be_nice(7))
    assert pool.submit(lambda: 3).result(20) == 3
    pool.shutdown()


def test_a_drain_that_failed_is_not_said_to_hang_when_the_next_begins_much_later(tmp_path: pathlib.Path) -> None:
    log: list[Any] = []
    (tmp_path / "file").touch()
    far = str(tmp_path / "file" / "far")
    engine = CheckpointEngine(str(tmp_path / "near"), drain_to=far, on_event=log.append, num_retries=0, timeout_s=60.0)
    drainer = engine._drainer
    assert drainer is not None
    for step in (1, 2):
        handle = engine.save(step, state(step))
        assert handle is not None
        engine.commit(handle)
        assert drainer.threads._crew.idle.acquire(timeout=20)  # it is done
        drainer.threads._crew.idle.release()
        drainer.threads._crew.moved_s -= 1000
    engine.close()
    failures = [e for e in log if isinstance(e, events.DrainFailed)]
    assert [e.generation for e in failures] == [0, 1]
    assert not any("has not answered" in e.reason for e in failures)


def test_little_patience_with_a_disk_is_none_with_copying(tmp_path: pathlib.Path) -> None:
    engine, gate = CheckpointEngine(str(tmp_path), timeout_s=0.05), threading.Event()
    engine._copier.submit(gate.wait, 20)  # a large tensor comes first
    handle = engine.save(1, state(1.0))
    assert handle is not None
    concurrent.futures.wait([handle.durable], 0.2)  # many times what a disk has
    handle._timeout_s = 60.0  # and this disk is well, however busy the machine
    gate.set()
    assert handle.durable.result(20).writer == 0
    engine._copier.shutdown()
    engine._writers.shutdown()
    assert engine.slots.arena.num_leased == 0, "its slot must come back"
    engine.close()


def test_saves_may_settle_while_bases_are_looked_up(tmp_path: pathlib.Path) -> None:
    engine = CheckpointEngine(str(tmp_path))
    handles = [engine.save(step, state(step)) for step in (1, 2)]
    first, second = (handle for handle in handles if handle is not None)
    concurrent.futures.wait([first.durable, second.durable], 20)

    class Settles:
        @property
        def base(self) -> Any:
            engine.saves.handles.pop(second.save, None)  # as another thread does it in between
            return {}, None

    engine.saves.handles[first.save] = Settles()  # type: ignore[assignment]
    engine.prune()
    assert second.save not in engine.saves.handles, "it did settle while the bases were being looked up"
    engine.close()


def test_what_waits_for_a_result_cannot_cancel_it() -> None:
    work: concurrent.futures.Future[int] = concurrent.futures.Future()
    outcome = within(work, 60.0, TimeoutError, since=concurrent.futures.Future())
    assert not outcome.cancel()
    work.set_result(3)
    assert outcome.result(0) == 3


def test_no_thread_stays_behind_after_many_saves(tmp_path: pathlib.Path) -> None:
    engine = CheckpointEngine(str(tmp_path), num_slots=2)
    before = set(threading.enumerate())
    for step in range(1, 41):
        handle = engine.save(step, state(step), wait=True)
        assert handle is not None
        engine.commit_later(handle).result(20)
    engine.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)  # a timer that was cancelled ends when it wakes
        assert not thread.is_alive(), thread.name


STARVED = """
import os, resource, signal, threading
from outlast.checkpoint import threads

STACK, PAGE = 8 << 20, resource.getpagesize()
threading.stack_size(STACK)
threads._LOOKS = 1

def starve(room):
    signal.alarm(60)  # who hangs ends by it
    used = int(open("/proc/self/statm").read().split()[0]) * PAGE
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
    try:
        threads.Threads(1, "t", limit_s=0.0).submit(int).result()
    except MemoryError:
        os._exit(3)
    except RuntimeError as error:
        os._exit(4 if "did not begin" in str(error) else 3)
    os._exit(0)

def begun(room):
    pid = os.fork()
    if pid == 0:
        try:
            starve(room)
        finally:
            os._exit(9)
    return pid

# What its first frames need, beyond its stack, is a few pages: there each is tried.
rooms = [*range(0, 26 << 20, 200 << 10), *range(STACK, STACK + (200 << 10), PAGE)]
pids = [begun(room) for room in rooms]
print(*sorted({os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids}))
"""


def test_a_thread_without_memory_to_begin_with_is_refused_and_not_waited_for() -> None:
    """The system gives it a stack, and it dies before it can say that it lives: `Thread.start` waits for that."""
    ran = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True, timeout=120)
    assert ran.stdout.split() == ["0", "3", "4"], ran.stderr  # it worked, was refused, or did not begin


def test_a_thread_that_begins_after_it_was_refused_does_none_of_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_threads, "_LOOKS", 0)
    go_on, over, did = threading.Event(), threading.Event(), list[int]()
    thread = threading.Thread(target=did.append, args=(1,), daemon=True)
    bootstrap = thread._bootstrap  # type: ignore[attr-defined]

    def late() -> None:
        assert go_on.wait(20)
        bootstrap()
        over.set()

    vars(thread)["_bootstrap"] = late
    with pytest.raises(RuntimeError, match="did not begin"):
        begin(thread)
    go_on.set()
    assert over.wait(20)
    assert not did


def test_a_thread_that_runs_has_begun_though_there_was_no_memory_to_wait_for_that() -> None:
    did = threading.Event()

    class Unheard(threading.Thread):
        def start(self) -> None:
            super().start()
            assert did.wait(20)
            raise MemoryError

    begin(Unheard(target=did.set))


def test_work_that_was_refused_a_thread_is_not_done_by_the_next(refuse: set[str]) -> None:
    pool, did = Threads(2, "t"), list[int]()
    refuse.add("t_")
    with pytest.raises(RuntimeError, match="new thread"):
        pool.submit(did.append, 1)
    assert isinstance(pool.try_submit(did.append, 2).exception(0), RuntimeError)
    refuse.clear()
    pool.submit(did.append, 3).result(20)
    pool.shutdown()
    assert did == [3]


def test_a_wait_that_no_clock_can_be_started_for_ends_with_that(refuse: set[str]) -> None:
    since: concurrent.futures.Future[Any] = concurrent.futures.Future()
    outcome = within(concurrent.futures.Future[int](), 60.0, TimeoutError, since=since)
    refuse.add("Thread-")
    since.set_result(None)
    assert isinstance(outcome.exception(20), RuntimeError)


def test_a_state_that_no_thread_is_to_be_had_for_is_copied_by_the_caller(
    tmp_path: pathlib.Path, refuse: set[str]
) -> None:
    refuse |= {"outlast-copy", "outlast-prepare"}
    engine = CheckpointEngine(str(tmp_path))
    assert isinstance(engine.prepare_later(state(1.0)).exception(20), RuntimeError)
    handle = engine.save(1, state(1.0))
    assert handle is not None
    assert handle.copied
    assert engine.commit_later(handle).result(20) == 0
    engine.close()


@pytest.mark.parametrize("name", ["outlast-write", "outlast-watch"])
def test_a_save_that_no_thread_is_to_be_had_for_fails_and_the_next_does_not(
    tmp_path: pathlib.Path, refuse: set[str], name: str
) -> None:
    log: list[Any] = []
    engine = CheckpointEngine(str(tmp_path), on_event=log.append)
    refuse.add(name)
    handle = engine.save(1, state(1.0))
    assert handle is not None
    assert isinstance(engine.commit_later(handle).exception(20), RuntimeError)
    assert [event.reason for event in log if isinstance(event, events.SaveFailed)] == ["can't start new thread"]
    assert engine.slots.arena.num_leased == 0, "its slot must come back"
    refuse.clear()
    handle = engine.save(2, state(2.0))
    assert handle is not None
    assert engine.commit_later(handle).result(20) == 0
    engine.close()


def test_what_no_thread_can_publish_or_drain_is_told_and_what_is_published_stands(
    tmp_path: pathlib.Path, refuse: set[str]
) -> None:
    log: list[Any] = []
    engine = CheckpointEngine(str(tmp_path / "near"), drain_to=str(tmp_path / "far"), on_event=log.append)
    handle = engine.save(1, state(1.0))
    assert handle is not None
    refuse |= {"outlast-publish", "outlast-drain"}
    assert isinstance(engine.commit_later(handle).exception(20), RuntimeError)
    assert engine.commit(handle) == 0
    reasons = [event.reason for event in log if isinstance(event, events.DrainFailed)]
    assert reasons == ["RuntimeError: can't start new thread"]
    refuse.clear()
    engine.close()
