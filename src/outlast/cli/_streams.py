"""Standard output and error that nobody reads any more, or whose disk is full; and errors as JSON.

Invariant: a reader that goes away (`outlast run | head`, a terminal that hangs up) never ends a training run, and is
never answered with a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator, Sequence

from outlast.errors import EnvironmentFault, OutlastError

__all__ = ["is_gone", "let_go_of_the_broken", "lost_output", "print_error", "unheard", "wants_json"]

_GONE = (errno.EPIPE, errno.EIO)  # the pipe's other end, the terminal
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FLAGS = frozenset({"--json", "--help", "--serve"})


def let_go_of_the_broken() -> OSError | None:
    """Flush both streams. What cannot be written goes nowhere from now on; returns the first reason why."""
    first: OSError | None = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            first = first or error
            with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor has nothing to redirect
                nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
                stream.flush()
    return first


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Say what can be said: a reader that went away, or a full disk under the output, stops nothing."""
    try:
        yield
    except OSError:
        let_go_of_the_broken()


def is_gone(error: OSError) -> bool:
    """Whether the reader went away, which is nobody's fault."""
    return error.errno in _GONE


def lost_output(error: OSError) -> EnvironmentFault:
    """What is said of an error of the operating system that a command ended with, a full disk under its output say."""
    what = error.strerror or str(error)
    if isinstance(error, FileExistsError) and error.filename:
        return EnvironmentFault(f"{error.filename} is no directory", remedy="give a directory, or a place in one")
    if error.filename:
        return EnvironmentFault(
            f"{what}: {error.filename}", remedy="give a place that can be read and written, with room"
        )
    if error.errno in _NO_ROOM:
        return EnvironmentFault(
            f"standard output cannot be written: {what}",
            did="not all that was to be printed is there",
            remedy="free space where it is redirected to, or let it go elsewhere",
        )
    return EnvironmentFault(what, remedy="give a place that can be read and written, with room")


def wants_json(args: Sequence[str]) -> bool:
    """Whether `--json` is among our own options: what follows a script's name is the script's."""
    own = list(args)
    if args[:1] == ["run"] or args[:2] == ["ckpt", "resume-check"]:
        at = 1 if args[0] == "run" else 2
        while at < len(args) and args[at].startswith("-") and args[at] != "-m":
            at += 1 if args[at] in _FLAGS or "=" in args[at] else 2
        own = list(args[:at])
    return "--json" in own


def print_error(message: str, exit_code: int, error: OutlastError | None = None) -> None:
    """One JSON object on standard output that says what standard error says to people; nothing where that is what
    cannot be written."""
    import json

    said = {"code": error.code if error else "USAGE", "message": error.message if error else message}
    if error is not None:
        said |= {"where": error.where, "done": error.did, "remedy": error.remedy}
    with unheard():
        print(json.dumps({"error": said, "exit_code": exit_code}), flush=True)
