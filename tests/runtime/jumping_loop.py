"""An event loop in a time that jumps: whenever nothing is left to be done, the next timer is due."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

__all__ = ["JumpingLoop", "run"]

PATIENCE_S = 60.0
HORIZON_S = 3600.0 * 24
BEGAN_S = 1000.0


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    def __init__(self) -> None:
        super().__init__()
        self.now_s = BEGAN_S

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:  # for a thread that is to end
            found = super().select(PATIENCE_S)
            assert found, "nobody is left who would do anything"
            return found
        found = super().select(0)
        if not found:
            self.now_s += timeout
            assert self.now_s < BEGAN_S + HORIZON_S, "nothing ends it"
        return found


class JumpingLoop(asyncio.SelectorEventLoop):
    """What threads do takes no time of it: who waits for one does so by `asyncio.sleep(0)`."""

    def __init__(self) -> None:
        self._jumping = _Selector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run(scene: Coroutine[Any, Any, None]) -> None:
    """Play it to its end."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(scene)
