"""How a training script ends when it does not end well: what to tell the coordinator, and which exit code to leave.

Knows errors and frames; does not decide whose fault it was (that is `core/protocol`).
"""

from __future__ import annotations

import dis
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

from outlast.core.protocol import messages as m
from outlast.errors import OutlastError, StepMisuse
from outlast.runtime._replica import Replica

__all__ = ["Left", "exit_by_code", "how_left", "left_open", "report_failure"]

Left = Literal["break", "error", "unknown"]


def how_left(frame: FrameType) -> Left:
    """Why `frame` closed the generator it was looping over: `break` or `return`, or an exception on its way.

    The generator is told the same in both cases, and the exception is not visible to it; the instruction is: leaving a
    loop on purpose pops the iterator. Another iterator in between (a progress bar) hides it.
    """
    name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    if name == "POP_TOP":
        return "break"
    return "unknown" if name in ("YIELD_VALUE", "RESUME") else "error"


def report_failure(replica: Replica, error: BaseException) -> m.Failed:
    """What to tell the coordinator when user code raised."""
    text = "".join(traceback.format_exception(error))[-4000:]
    microbatch = -1 if isinstance(error, OutlastError) else replica.progress.read()[2]  # ours are no microbatch's fault
    return m.Failed(
        member=replica.env.me, step=replica.member.committed, microbatch=microbatch, error=text, alike=_alike(error),
        code=error.exit_code if isinstance(error, OutlastError) else 5,
    )  # fmt: skip


def _alike(error: BaseException) -> str:
    """The error's kind, words and line. Ours name their replica and microbatch, so their words do not count."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    words = error.code if isinstance(error, OutlastError) else str(error)[:500]
    return f"{type(error).__name__} at {where}: {words}"


def left_open(step: int, replica: Replica) -> StepMisuse:
    """The loop was left inside this step."""
    return StepMisuse(
        f"step {step} was left before its microbatches were done", where=f"replica {replica.env.me}",
        did="nothing was committed", remedy="let the inner loop end; `break` belongs into the outer one",
    )  # fmt: skip


def exit_by_code(previous: Callable[..., Any]) -> Callable[..., Any]:
    """An excepthook that also gives the process the exit code of an error of ours (reference/errors)."""

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        previous(kind, error, trace)
        if isinstance(error, OutlastError):
            raise SystemExit(error.exit_code)

    return hook
