"""What a strike does to one process from outside: a signal, or less room than it needs. Nothing here asks the run."""

from __future__ import annotations

import resource
import signal
from typing import Protocol

from outlast.prove._process_tree import Running, send, state_of

__all__ = ["LIMITS", "Surrounding", "carry_out"]


class Surrounding(Protocol):
    """Something of a run's that is no process, and can be struck as well: its disk, its clock."""

    def strike(self, kind: str, pick: float) -> str:
        """The name of what is struck now; "" if nothing could be, and then it is tried again."""
        ...

    def mend(self, kind: str, name: str) -> bool:
        """Undo a strike of this kind at what `strike` named; if it cannot be undone yet, it is tried again."""
        ...


LIMITS = {
    "MEMORY": resource.RLIMIT_AS,
    "DESCRIPTORS": resource.RLIMIT_NOFILE,
    "FILESIZE": resource.RLIMIT_FSIZE,
    "CPUTIME": resource.RLIMIT_CPU,
}
"""Limits that are taken away from a process while it runs, by the name that a schedule has for them."""
_ROOM = {"MEMORY": 16 << 20, "DESCRIPTORS": 4, "FILESIZE": 4096, "CPUTIME": 1}  # too little to go on for long


def carry_out(seen: Running, name: str) -> bool:
    """Whether the process was there to be struck. `name`: of a signal, or of a limit."""
    if name not in LIMITS:
        return send(seen, signal.Signals[name])
    if not state_of(seen):
        return False
    try:
        resource.prlimit(seen.pid, LIMITS[name], (_ROOM[name], _ROOM[name]))
    except (ProcessLookupError, PermissionError):
        return False
    return True
