"""For all tests: how the processes that they start begin.

Most of a fleet's cost is the start of its processes, so a third of that is saved here: `start/sitecustomize.py`, and
outlast compiled once where the environment forbids Python to keep what it compiled (every process would do it anew).
No example of a property has a time limit: speed is asserted in benchmarks. And what a command that runs in this process
does with signals ends with its test. A test may have threads refused, as by a host that has no more, or has no memory
for them.
"""

from __future__ import annotations

import compileall
import gc
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from outlast.checkpoint import threads

_SIGNALS = signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
_START = str(Path(__file__).with_name("start"))
_SOURCE = Path(__file__).resolve().parents[1] / "src" / "outlast"

hypothesis.settings.register_profile("outlast", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("outlast")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # of xdist: its parent has done it
        return
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_START, inherited]))
    if sys.dont_write_bytecode and os.access(_SOURCE, os.W_OK):
        compileall.compile_dir(_SOURCE, quiet=1)


@pytest.fixture(autouse=True, scope="module")
def of_earlier_tests() -> None:
    """What they have left is no longer among what lives: a loop's first steps look through all of that for averages of
    its weights, and here it would be far more than any script has."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Threads whose names begin with what is put here are not to be had."""
    names, start = set[str](), threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name.startswith(tuple(names)):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    yield names
    names.clear()


@pytest.fixture
def stillborn(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Threads whose names begin with what is put here get their stack, and no memory to begin with: whoever waits for
    them to say that they live waits for ever, and fails here."""
    names, start = set[str](), threading.Thread.start

    def in_vain() -> None:
        raise RuntimeError("can't start new thread: it did not begin")

    def starting(thread: threading.Thread) -> None:
        if thread.name.startswith(tuple(names)):
            vars(thread)["_bootstrap"] = lambda: None
            assert isinstance(vars(thread)["_started"], threads._Begun), f"{thread.name} would be waited for for ever"
            vars(vars(thread)["_started"])["wait"] = in_vain
        try:
            start(thread)
        except RuntimeError:  # the interpreter still takes it for one that is about to begin
            vars(threading)["_limbo"].pop(thread, None)
            raise

    monkeypatch.setattr(threading.Thread, "start", starting)
    yield names
    names.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    before = [(number, signal.getsignal(number)) for number in _SIGNALS]
    try:
        yield
    finally:
        for number, handler in before:
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Next to nothing that collecting makes is garbage: to look for it takes a third of that time, in each worker."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
