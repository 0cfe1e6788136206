"""A disk that stops answering, and a state to save on it."""

from __future__ import annotations

import threading
from typing import Any

import torch

from outlast.checkpoint._fs import Disk

LIMIT_S = 0.3


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
