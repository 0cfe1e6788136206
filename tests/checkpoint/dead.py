"""A disk that stops answering, a state to save on it, and patience that is lost only once it has stopped.

A limit that healthy work has to keep to would fail on a busy machine, where the background threads come last.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from outlast.checkpoint import CheckpointEngine
from outlast.checkpoint.fs import Disk

LIMIT_S, PATIENT_S = 0.3, 60.0


class Dead(Disk):
    """A real disk on which one kind of call does not return until `back` is set. `met`: somebody waits in it."""

    def __init__(self) -> None:
        self.call, self.back, self.met = "", threading.Event(), threading.Event()

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("_") or name in {"call", "back", "met"} or name != self.call:
            return found

        def hangs(*args: Any, **kwargs: Any) -> Any:
            self.met.set()
            assert self.back.wait(60)
            return found(*args, **kwargs)

        return hangs


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((5000,), value)}


def set_patience(engine: CheckpointEngine, limit_s: float) -> None:
    """As `timeout_s`, for all that begins from now on, and for the threads that are there."""
    engine._timeout_s = limit_s
    drains = [engine._drainer.threads] if engine._drainer is not None else []
    for pool in (engine._writers, engine._publisher, *drains):
        pool._crew.limit_s = limit_s
