"""A disk that never answers: nobody waits for it for good, it is said, and what it held comes back when it does."""

from __future__ import annotations

import concurrent.futures
import pathlib
import subprocess
import sys
import threading
from typing import Any

import pytest

from outlast.checkpoint import CheckpointEngine, Hold, LocalStore
from outlast.checkpoint import save_events as events
from outlast.checkpoint import threads as _threads
from outlast.checkpoint.retention import Retention
from outlast.checkpoint.threads import Threads, within
from outlast.errors import CheckpointError

from .dead import LIMIT_S, PATIENT_S, Dead, set_patience, state


def engine_on(disk: Dead, place: pathlib.Path, log: list[Any], **more: Any) -> CheckpointEngine:
    """With generation 0, of step 1, published before the disk dies."""
    engine = CheckpointEngine(LocalStore(str(place), fs=disk), on_event=log.append, timeout_s=PATIENT_S, **more)
    first = engine.save(1, state(1.0))
    assert first is not None
    engine.commit(first)
    return engine


@pytest.mark.parametrize("call", ["open", "pwrite", "fsync", "sync_dir", "rename"])
@pytest.mark.parametrize("held", [False, True])
def test_a_write_that_hangs_fails_its_save_and_gives_its_memory_back_when_it_returns(
    disk: Dead, tmp_path: pathlib.Path, log: list[Any], call: str, held: bool
) -> None:
    hold = Hold.create(1, 3) if held else None
    engine = engine_on(disk, tmp_path, log, hold=hold, num_slots=3 if held else 2, retention=Retention(keep_last=1))
    for step in (2, 3):  # so that a spare file is there to be renamed
        handle = engine.save(step, state(step))
        assert handle is not None
        engine.commit(handle)
    disk.call = call
    set_patience(engine, LIMIT_S)
    stuck = [engine.save(step, state(step)) for step in (4, 5)]
    for handle in stuck:
        assert handle is not None
        handle.wait_copied()  # the step is not held up by the disk
        with pytest.raises(CheckpointError, match=f"of step {handle.save.step} has not returned for 0.3 s") as caught:
            handle.durable.result(20)
        assert caught.value.remedy
        engine.settle(handle.save, None)  # the coordinator says so too: no reason to write over what is being read
    assert sorted(e.step for e in log if isinstance(e, events.SaveFailed)) == [4, 5]
    assert not engine.can_save
    assert engine.save(6, state(6.0)) is None
    assert engine.save(6, state(6.0), wait=True) is None, "nor is it waited for without an end"
    assert "step 4, 5" in log[-1].reason
    assert "has not returned" in log[-1].reason
    disk.back.set()
    set_patience(engine, PATIENT_S)
    saved = engine.save(7, state(7.0), wait=True)
    while saved is None:  # the two come back in their own time
        saved = engine.save(7, state(7.0), wait=True)
    engine.commit(saved)
    loaded = CheckpointEngine(str(tmp_path)).load()
    assert loaded is not None
    assert loaded.step == 7
    assert sorted(e.step for e in log if isinstance(e, events.SaveFailed)) == [4, 5], "none is told twice"
    engine.close()


def test_the_previous_generation_stays_and_nothing_late_is_promised(
    disk: Dead, tmp_path: pathlib.Path, log: list[Any]
) -> None:
    engine = engine_on(disk, tmp_path, log)
    disk.call = "fsync"
    set_patience(engine, LIMIT_S)
    handle = engine.save(2, state(2.0))
    assert handle is not None
    done = engine.commit_later(handle)
    with pytest.raises(CheckpointError, match="has not returned"):
        done.result(20)
    disk.back.set()
    engine.close()
    assert LocalStore(str(tmp_path)).generations() == [0]
    loaded = CheckpointEngine(str(tmp_path)).load()
    assert loaded is not None
    assert loaded.step == 1


def test_a_publication_that_hangs_is_said_to_have_failed(disk: Dead, tmp_path: pathlib.Path, log: list[Any]) -> None:
    engine = engine_on(disk, tmp_path, log)
    disk.call = "link"
    handles = [handle for step in (2, 3) if (handle := engine.save(step, state(step))) is not None]
    concurrent.futures.wait([handle.durable for handle in handles])  # what is well has the time of a busy machine
    set_patience(engine, LIMIT_S)
    done = [engine.commit_later(handle) for handle in handles]
    for future in done:
        with pytest.raises(CheckpointError, match="its publication has not returned"):
            future.result(20)
    assert LocalStore(str(tmp_path)).generations() == [0]
    engine.close()  # returns, though the publisher does not
    assert not engine._publisher.finish()
    disk.back.set()
    for thread in engine._publisher._crew.threads:
        thread.join(20)
    assert LocalStore(str(tmp_path)).generations() == [0, 1, 2], "whole, and newer: what came late is no harm"


def test_a_drain_that_hangs_is_told_at_the_next_and_the_near_place_goes_on(
    disk: Dead, tmp_path: pathlib.Path, log: list[Any]
) -> None:
    far = LocalStore(str(tmp_path / "far"), fs=disk)
    engine = CheckpointEngine(str(tmp_path / "near"), drain_to=far, on_event=log.append, timeout_s=PATIENT_S)
    disk.call = "pwrite"
    for step in (1, 2, 3):
        handle = engine.save(step, state(step))
        assert handle is not None
        assert engine.commit(handle) == step - 1
        assert disk.met.wait(20)
        drainer = engine._drainer
        assert drainer is not None
        drainer.threads._crew.moved_s -= PATIENT_S  # as if so long had passed
    told = [e for e in log if isinstance(e, events.DrainFailed)]
    assert [(e.generation, "has not answered" in e.reason) for e in told] == [(0, True)]
    set_patience(engine, LIMIT_S)
    engine.close()
    disk.back.set()
    for thread in drainer.threads._crew.threads:
        thread.join(20)


SCRIPT = """
import sys, threading, torch
from outlast.checkpoint import CheckpointEngine, LocalStore
from outlast.checkpoint.fs import Disk

class Dead(Disk):
    def {call}(self, *args, **kwargs):
        if armed.is_set():
            met.set()
            threading.Event().wait()
        return super().{call}(*args, **kwargs)

armed, met = threading.Event(), threading.Event()
def lose_patience():
    engine._timeout_s = engine._writers._crew.limit_s = engine._publisher._crew.limit_s = 0.5

engine = CheckpointEngine(LocalStore({place!r}, fs=Dead()), timeout_s=60.0)
engine.commit(engine.save(1, {{"w": torch.zeros(5000)}}))
armed.set()
if {call!r} in ("pwrite", "fsync"):  # the others leave the write itself alone
    lose_patience()
handle = engine.save(2, {{"w": torch.ones(5000)}})
lose_patience()
done = engine.commit_later(handle)
{end}
print("trained")
"""


@pytest.mark.parametrize(
    ("call", "end"),
    [
        ("pwrite", ""), ("fsync", "engine.close()"), ("link", "engine.close()"),
        ("sync_dir", "met.wait(20); engine.close(wait=False)"), ("pwrite", "print(done.exception(20))"),
    ],
)  # fmt: skip
def test_the_process_ends_though_its_disk_never_answers(tmp_path: pathlib.Path, call: str, end: str) -> None:
    """Also for who closed nothing: the interpreter must not wait for such a thread."""
    script = SCRIPT.format(call=call, place=str(tmp_path), end=end)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "trained"
    assert "has not answered" in ran.stderr
    assert "Older generations stay" in ran.stderr
    loaded = CheckpointEngine(str(tmp_path)).load()
    assert loaded is not None
    assert loaded.step == 1


# the threads


class Clock:
    """In the place of `time`: it stands still until somebody moves it."""

    def __init__(self) -> None:
        self.now_s, self.asked = 0.0, threading.Semaphore(0)

    def monotonic(self) -> float:
        if threading.current_thread() is threading.main_thread():
            self.asked.release()
        return self.now_s


def test_what_works_is_waited_for_and_what_is_silent_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(_threads, "time", clock)
    monkeypatch.setattr(_threads, "_GRACE_S", 0.01)
    pool, go_on = Threads(1, "t", limit_s=0.1), threading.Event()

    def lively() -> int:
        for _ in range(20):
            assert clock.asked.acquire(timeout=20)  # the other one has looked whether there is life
            clock.now_s += 0.09
            pool.moved()
        return 19

    work = pool.submit(lively)
    assert pool.finish()
    assert work.result(0) == 19
    monkeypatch.undo()
    stuck = Threads(1, "t", limit_s=0.1)
    waiting = stuck.submit(go_on.wait)
    assert not stuck.finish()
    assert not waiting.done()
    with pytest.raises(RuntimeError, match="after shutdown"):
        stuck.submit(int)
    go_on.set()
    stuck.shutdown(wait=True)
    assert waiting.result(0)


def test_a_pool_runs_in_order_gives_failures_to_who_asks_and_cancels_what_waits() -> None:
    pool, gate, done = Threads(1, "t"), threading.Event(), list[int]()
    first = pool.submit(gate.wait)
    rest = [pool.submit(done.append, n) for n in range(5)]
    broken = pool.submit(lambda: 1 // 0)
    gate.set()
    concurrent.futures.wait([first, *rest, broken], 20)
    assert done == list(range(5))
    assert isinstance(broken.exception(0), ZeroDivisionError)
    gate.clear()
    pool.submit(gate.wait)
    waits = pool.submit(int)
    pool.shutdown(wait=False, cancel_futures=True)
    gate.set()
    pool.shutdown()
    assert waits.cancelled() or waits.done()


def test_a_result_in_time_is_given_and_a_late_one_is_not() -> None:
    since: concurrent.futures.Future[None] = concurrent.futures.Future()
    early: concurrent.futures.Future[int] = concurrent.futures.Future()
    late: concurrent.futures.Future[int] = concurrent.futures.Future()
    gave = within(early, 0.01, lambda: TimeoutError("late"), since=since)
    gives = within(late, 0.01, lambda: TimeoutError("late"), since=since)
    early.set_result(3)
    since.set_result(None)
    assert gave.result(20) == 3
    with pytest.raises(TimeoutError, match="late"):
        gives.result(20)
    late.set_result(4)
    assert isinstance(gives.exception(0), TimeoutError)
