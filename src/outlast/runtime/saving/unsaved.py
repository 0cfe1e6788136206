"""The exit code of a process that trained without a launcher, finished, and has its newest steps in no checkpoint.

The script goes on after its loop: what it writes there may be the only copy. So nothing is raised; it is said at once,
and the process ends with the code of `Unsaved` when everything else that was registered for its end is done. An
exception of the script's own keeps its own code.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys

from outlast.errors import Unsaved

__all__ = ["end_with", "forget", "watch"]

_found: list[tuple[int, Unsaved]] = []


def watch() -> None:
    """Early in the process: what is registered later runs before."""
    forget()
    atexit.unregister(_end)
    atexit.register(_end)


def end_with(error: Unsaved) -> None:
    """Say it, and remember it for the end."""
    print(error, file=sys.stderr, flush=True)
    _found[:] = [(os.getpid(), error)]


def forget() -> None:
    """Another training in this process: it counts from now on."""
    _found.clear()


def _end() -> None:
    if not _found or _found[0][0] != os.getpid() or getattr(sys, "last_value", None) is not None:
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_found[0][1].exit_code)
