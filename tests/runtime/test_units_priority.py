"""A replacement's priority while it starts: lowered only if it can rise again, and then with all its threads."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from outlast.runtime import _priority as priority
from outlast.runtime._supervise import start

SCRIPT = """
import os, sys, threading
from outlast.runtime._priority import rise
before = os.getpriority(os.PRIO_PROCESS, 0)
hold, up = threading.Event(), threading.Event()
def body():
    tasks.append(threading.get_native_id()); up.set(); hold.wait()
tasks = [threading.get_native_id()]
threading.Thread(target=body).start()
up.wait()
rise(int(sys.argv[1]))
print(before, [os.getpriority(os.PRIO_PROCESS, task) for task in tasks])
hold.set()
"""


def test_a_lowered_process_rises_with_all_its_threads(tmp_path: Path) -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    if not priority.can_return():
        pytest.skip("this process may not raise priorities")
    log = tmp_path / "log"
    child = start([sys.executable, "-c", SCRIPT, str(mine)], environ=os.environ, log=log, first=priority.lower)
    child.wait()
    assert log.read_text().strip() == f"{min(mine + 10, 19)} {[mine, mine]}"


def test_who_could_not_rise_again_is_not_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.setpriority

    def refuse(which: int, who: int, value: int) -> None:
        if value <= os.getpriority(which, who):
            raise PermissionError("not without a privilege")
        real(which, who, value)

    priority.can_return.cache_clear()
    monkeypatch.setattr(os, "setpriority", refuse)
    try:
        before = os.getpriority(os.PRIO_PROCESS, 0)
        assert not priority.can_return()
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
    finally:
        priority.can_return.cache_clear()
