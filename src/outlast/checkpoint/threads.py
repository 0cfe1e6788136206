"""Threads for work that a disk or a store may hold up for good. No torch.

Role: an executor as `concurrent.futures` has them, but one that a process can leave behind. The interpreter joins the
threads of its own pools before it ends, however long: a write to a disk that is gone would keep a trained process
alive for ever. Invariants: nobody waits for a thread that gave no sign of life for `limit_s`, nor for one that never
began; who works is waited for, however long that takes; a process that ends without some of them says so. Cannot end a
thread that the kernel holds.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import itertools
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

__all__ = ["Threads", "be_nice", "begin", "failed", "within"]

_GRACE_S = 1.0  # for a thread that only has to wake to end
_LOOKS = 10  # of a second each: a process that was stopped for longer than all of them has spent only one

P = ParamSpec("P")
T = TypeVar("T")


class _Begun(threading.Event):
    """What `Thread.start` waits on. A thread that got its stack, but no memory for its first frames, never sets it."""

    def wait(self, timeout: float | None = None) -> bool:
        """Raises RuntimeError, as `Thread.start` does where there is no thread to be had."""
        for _ in range(_LOOKS):
            if super().wait(1.0):
                return True
        raise RuntimeError("can't start new thread: it did not begin")


def begin(thread: threading.Thread) -> None:
    """Start `thread`. Raises RuntimeError if it does not begin, where `Thread.start` alone would wait for ever.

    MemoryError, too; it does nothing then, however late it begins after all.
    """
    run, first = thread.run, threading.Lock()  # whoever takes it says whether it runs; nobody gives it back
    vars(thread)["run"] = lambda: run() if first.acquire(blocking=False) else None
    if "_started" in vars(thread):  # its name in CPython 3.11 to 3.13; elsewhere this is a plain start
        vars(thread)["_started"] = _Begun()
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        if first.acquire(blocking=False):
            raise


class _Crew:
    """What the threads share. They keep it alive, and not the pool: a pool that nobody holds stops them."""

    def __init__(self, name: str, limit_s: float, prepare: Callable[[], None]) -> None:
        self.name, self.limit_s, self._prepare = name, limit_s, prepare
        self.jobs: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self.idle = threading.Semaphore(0)
        self.moved_s = time.monotonic()
        self.threads: list[threading.Thread] = []
        self.stopped, self.number = False, next(_numbers)

    def start(self) -> None:
        thread = threading.Thread(target=self._work, name=f"{self.name}_{len(self.threads)}", daemon=True)
        begin(thread)
        self.threads.append(thread)
        if self.limit_s:  # the others belong to a thread that is waited for
            with _lock:
                _crews.add(self)

    def _work(self) -> None:
        self._prepare()
        while (job := self.jobs.get()) is not None:
            self.moved_s = time.monotonic()
            _run(*job)
            del job  # it holds a result that nobody here needs
            self.moved_s = time.monotonic()
            self.idle.release()
        self.jobs.put(None)

    def stop(self) -> None:
        self.stopped = True
        self.jobs.put(None)

    def finish(self) -> bool:
        """Wait for the threads while they show life. False if some were left."""
        for thread in self.threads:
            thread.join(_GRACE_S)
            while thread.is_alive() and (left_s := self.moved_s + self.limit_s - time.monotonic()) > 0:
                thread.join(left_s)
        return not any(thread.is_alive() for thread in self.threads)


def _run(future: concurrent.futures.Future[Any], work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - the boundary: whatever it is belongs to who asks the future
        future.set_exception(error)
    else:
        future.set_result(result)


_numbers = itertools.count()
_crews: weakref.WeakSet[_Crew] = weakref.WeakSet()
_lock = threading.Lock()
_registered = False


def _alive() -> list[_Crew]:
    with _lock:
        return [crew for crew in _crews if any(thread.is_alive() for thread in crew.threads)]


def _at_exit() -> None:
    """Each in its turn, in the order in which they were made: what one ends with may begin work of a later one."""
    asked: set[_Crew] = set()
    while crews := [crew for crew in _alive() if crew not in asked]:
        crew = min(crews, key=lambda crew: crew.number)
        asked.add(crew)
        crew.stop()
        crew.finish()
    left = sorted({crew.name for crew in _alive()})
    if left:
        print(
            f"outlast: a disk or a store has not answered ({', '.join(left)}); the process ends without it, and what "
            "was being written there is lost. Older generations stay.",
            file=sys.stderr,
            flush=True,
        )


class Threads(concurrent.futures.Executor):
    """At most `num` threads, started as they are needed. `limit_s`: how long one may be silent before it is given up.

    0: the end of the process does not ask for them, whoever made them waits. `prepare` runs first in each thread.
    """

    def __init__(
        self, num: int, name: str, *, limit_s: float = 600.0, prepare: Callable[[], None] = lambda: None
    ) -> None:
        global _registered
        self._num, self._crew, self._lock = num, _Crew(name, limit_s, prepare), threading.Lock()
        weakref.finalize(self, self._crew.stop).atexit = False
        with _lock:
            if not _registered:
                atexit.register(_at_exit)
            _registered = True

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[T]:
        """Raises RuntimeError after `shutdown`, once the process ends, and where no thread is to be had for the work.

        MemoryError, too; what was refused is not done by another thread later.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._lock:
            if self._crew.stopped:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._crew.jobs.put((future, lambda: fn(*args, **kwargs)))
            free = self._crew.idle.acquire(blocking=False)
            if free or len(self._crew.threads) < self._num:
                self.moved()  # nobody was silent while there was nothing to do
            if not free and len(self._crew.threads) < self._num:
                try:
                    self._crew.start()
                except (RuntimeError, MemoryError):
                    future.cancel()
                    raise
        return future

    def try_submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[T]:
        """As `submit`, but what it would raise is what the future has failed with: for who can only look at that."""
        try:
            return self.submit(fn, *args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            return failed(error)

    @property
    def is_silent(self) -> bool:
        """Whether its work, if it has any, has given no sign of life for too long."""
        return time.monotonic() - self._crew.moved_s > self._crew.limit_s

    def moved(self) -> None:
        """A sign of life of the work under way."""
        self._crew.moved_s = time.monotonic()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As every executor's: with `wait`, until all is done, however long. See `finish`."""
        with self._lock:
            if not self._crew.stopped:
                if cancel_futures:
                    self._cancel()
                self._crew.stop()
        if wait:
            for thread in self._crew.threads:
                thread.join()

    def _cancel(self) -> None:
        while True:
            try:
                job = self._crew.jobs.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                job[0].cancel()

    def finish(self) -> bool:
        """Take no more work and wait for what is under way, while it shows life. False if a thread is left behind."""
        self.shutdown(wait=False)
        return self._crew.finish()

    def leave(self, limit_s: float) -> None:
        """Take no more work. The end of the process waits no longer for what is under way than `limit_s`."""
        self._crew.limit_s = min(limit_s, self._crew.limit_s)
        self.shutdown(wait=False)


def failed(error: BaseException) -> concurrent.futures.Future[Any]:
    """The future of work that was never begun, because of `error`."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_exception(error)
    return future


def within(
    work: concurrent.futures.Future[T],
    limit_s: float,
    late: Callable[[], Exception],
    *,
    since: concurrent.futures.Future[Any],
) -> concurrent.futures.Future[T]:
    """What `work` gives, or the failure `late()` once `limit_s` have passed after `since` was done.

    Or the RuntimeError of a clock for that which could not be started: nobody would end the wait for `work`.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()  # as `work` does: what runs cannot be cancelled
    first = threading.Lock()  # whoever takes it settles; nobody gives it back

    def settle(give: Callable[[], None]) -> None:
        if first.acquire(blocking=False):
            give()

    def given_up() -> None:
        settle(lambda: outcome.set_exception(late()))

    def done(_: concurrent.futures.Future[T]) -> None:
        timer.cancel()
        error = work.exception()
        settle(lambda: outcome.set_result(work.result()) if error is None else outcome.set_exception(error))

    def start_clock(_: concurrent.futures.Future[Any]) -> None:
        try:
            begin(timer)
        except (RuntimeError, MemoryError) as error:
            refused = error  # a name that outlives the clause
            settle(lambda: outcome.set_exception(refused))

    timer = threading.Timer(limit_s, given_up)
    timer.daemon = True
    work.add_done_callback(done)
    since.add_done_callback(start_clock)
    return outcome


def be_nice(level: int) -> None:
    """Background threads yield the processor to training where the two compete, if the system lets them."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # root may also be nicer to itself than it was told to be
        os.setpriority(os.PRIO_PROCESS, thread, max(level, os.getpriority(os.PRIO_PROCESS, thread)))
