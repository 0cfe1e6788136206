"""How a training script ends when it does not end well: what to tell the coordinator, and which exit code to leave.

Knows errors and frames; does not decide whose fault it was (that is `core/protocol`).
"""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

import outlast
from outlast.core.protocol import messages as m
from outlast.errors import (
    DeviceFault,
    FleetLost,
    LoopUnrepeatable,
    OutlastError,
    ProtocolViolation,
    StateDiverged,
    StepMisuse,
)
from outlast.runtime.host.launcher_words import add_hint
from outlast.runtime.loop._iterators import at_the_script_s_end
from outlast.runtime.member.driver import Replica

__all__ = [
    "ScriptEnd",
    "changed_since",
    "end_with_error",
    "exit_by_code",
    "left_open",
    "report_failure",
    "told",
    "unwritten",
    "what_is_alike",
]

_OURS = "of_outlast"  # an attribute of hooks: there is one of each kind, however many trainings a process makes
# Errors of our threads come through the futures of the standard library.
_NOT_THE_USER_S = tuple(
    os.path.dirname(str(package.__file__)) + os.sep for package in (outlast, torch, concurrent.futures)
)


def told(error: BaseException) -> str:
    """What a person is to read: an error of ours in its own words, with the line of the script that it is about; any
    other, and a bug in outlast, with its traceback."""
    add_hint(error)
    if not isinstance(error, OutlastError) or isinstance(error, ProtocolViolation):
        return "".join(traceback.format_exception(error)).rstrip()
    frames = traceback.extract_tb(error.__traceback__)
    line = next((f for f in reversed(frames) if not f.filename.startswith((*_NOT_THE_USER_S, "<"))), None)
    return str(error) + (f"\n  at: {line.filename}, line {line.lineno}: {line.line}" if line is not None else "")


def report_failure(replica: Replica, error: BaseException) -> m.Failed:
    """What to tell the coordinator when user code raised."""
    text = told(error)[-4000:]
    microbatch = -1 if isinstance(error, OutlastError) else replica.progress.read()[2]  # ours are no microbatch's fault
    return m.Failed(
        member=replica.env.me,
        step=replica.member.committed,
        microbatch=microbatch,
        error=text,
        alike=what_is_alike(error),
        code=error.exit_code if isinstance(error, OutlastError) else 5,
        final=_final(error, replica),
        at_s=time.monotonic(),
    )


def _final(error: BaseException, replica: Replica) -> bool:
    """Whether no replacement would fare better: the loop, the model or the data are to blame, and not one process."""
    early = isinstance(error, StateDiverged) and not replica.member.committed
    return early or isinstance(error, LoopUnrepeatable)


def what_is_alike(error: BaseException) -> str:
    """The error's kind, words and line. Ours name their replica and microbatch, so their words do not count. "": it is
    this device's own, whoever else has the same."""
    if isinstance(error, DeviceFault):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    words = error.code if isinstance(error, OutlastError) else str(error)[:500]
    return f"{type(error).__name__} at {where}: {words}"


def left_open(step: int, name: str) -> StepMisuse:
    """The loop was left inside this step."""
    return StepMisuse(
        f"step {step} was left before its microbatches were done",
        where=f"replica {name}" if name else "",
        did="nothing was committed",
        remedy="let the inner loop end; `break` belongs into the outer one",
    )


def changed_since(step: int) -> str:
    """The loop was left after this step, and what is there is not what the step left."""
    return (
        f"outlast: the parameters were changed after step {step}, the last one, which is not saved. Loop over "
        "training.steps(…) itself and not over a variable or a progress bar that is kept: then a break is noticed at "
        "once"
    )


def unwritten(replica: Replica) -> FleetLost:
    """The writer died after the last step, and this script, next in line, has left out what a writer does."""
    return FleetLost(
        "the writer died before its script had ended, and this one had asked run.is_writer before the last step only",
        where=f"replica {replica.env.me}, after the last step",
        did="nothing was written in its place",
        remedy="ask run.is_writer after the loop, where what only one replica does is done",
    )


def exit_by_code(previous: Callable[..., Any]) -> Callable[..., Any]:
    """An excepthook that shows an error of ours without a traceback, and gives the process its exit code
    (reference/errors)."""

    if hasattr(previous, _OURS):
        return previous

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, OutlastError) and previous is sys.__excepthook__:
            print(told(error), file=sys.stderr, flush=True)
        else:
            add_hint(error)
            previous(kind, error, trace)
        if isinstance(error, OutlastError):
            raise SystemExit(error.exit_code)

    setattr(hook, _OURS, "exits")
    return hook


_at_an_error: list[Callable[[BaseException], None]] = []  # of trainings that are not over


def at_an_error(tell: Callable[[BaseException], None]) -> Callable[[], None]:
    """Call it when the script of this process, no fork of it, ends by an exception; what was to follow follows. What is
    returned takes that back."""
    previous, home = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while _at_an_error and os.getpid() == home:
            _at_an_error.pop()(error)
        previous(kind, error, trace)

    if getattr(previous, _OURS, "") != "tells":
        setattr(hook, _OURS, "tells")
        sys.excepthook = hook
    _at_an_error.append(tell)
    return lambda: _at_an_error.remove(tell) if tell in _at_an_error else None


class ScriptEnd:
    """What one training does when the script of this process ends, until `forget`: nothing of it is kept after that."""

    def __init__(
        self, at_error: Callable[[BaseException], None], at_end: Callable[[], None], at_exit: Callable[[], object]
    ) -> None:
        atexit.register(at_exit)
        self._back: list[Callable[[], object]] = [
            at_an_error(at_error),
            at_the_script_s_end(at_end),
            functools.partial(atexit.unregister, at_exit),
        ]

    def forget(self) -> None:
        """The training is over, and nobody is to be told anything about it."""
        for back in self._back:
            back()
        self._back.clear()

    @property
    def is_over(self) -> bool:
        """Whether `forget` was called."""
        return not self._back


_unsaid: list[OutlastError] = []  # at most one, of trainings that are gone


def end_with_error(error: OutlastError) -> None:
    """The script, if it ends well, ends with this error after all: what it is about is gone, and a loop that was left
    cannot raise it. The newest one counts."""
    known, _unsaid[:] = bool(_unsaid), [error]
    if not known:
        ScriptEnd(lambda _: _unsaid.clear(), functools.partial(_say_the_unsaid, os.getpid()), _unsaid.clear)


def _say_the_unsaid(home: int) -> None:
    if _unsaid and os.getpid() == home:
        print(_unsaid[0], file=sys.stderr, flush=True)
        os._exit(_unsaid[0].exit_code)
