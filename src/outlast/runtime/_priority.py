"""The processor time of a process that starts beside members: what they leave, until it is served.

Role: an agent starts a replacement at a lower priority, since its imports take seconds of processor time and on a full
host every step of the members would wait for them; as soon as it is to receive the state it rises to where it was.
Invariant: nobody is lowered who could not rise again (that takes a privilege or RLIMIT_NICE). No torch. It does not
decide who is a replacement.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from pathlib import Path

__all__ = ["can_return", "lower", "rise"]

_LOWER = 10
"""A tenth of a member's weight: on a host that is full for good a start takes ten times its processor time, no more."""


def _nice(who: int = 0) -> int:
    return os.getpriority(os.PRIO_PROCESS, who)


def lower() -> None:
    """This process, before it executes anything."""
    os.setpriority(os.PRIO_PROCESS, 0, _nice() + _LOWER)


@functools.cache
def can_return() -> bool:
    """Whether a process of this user that was lowered may rise again: tried on a thread, whose priority is its own."""
    found: list[bool] = []

    def attempt() -> None:
        with contextlib.suppress(OSError):
            mine = _nice()
            os.setpriority(os.PRIO_PROCESS, 0, mine + 1)
            os.setpriority(os.PRIO_PROCESS, 0, mine)
            found.append(True)

    thread = threading.Thread(target=attempt, name="outlast-priority")
    thread.start()
    thread.join()
    return bool(found)


def rise(to: int) -> None:
    """All threads of this process to nice value `to`; what they start inherits it."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            os.setpriority(os.PRIO_PROCESS, int(task.name), to)
