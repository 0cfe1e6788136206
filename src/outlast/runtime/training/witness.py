"""A witness inside a replica: what it computed, committed and ended with, for who proves something from outside.

It only looks: nothing that it does changes a bit, a random number or the order of a message. Without
`OUTLAST_WITNESS` there is none, and a step pays one test for it. See `settings/witness_files` for what it writes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outlast.runtime.settings.witness_files import LANE, VARIABLE, StateSeen, Testimony
from outlast.runtime.training._loop_variables import loop_variables
from outlast.runtime.training.samples import batch_digest
from outlast.runtime.training.state import State, digest_of
from outlast.tensors import local

__all__ = ["Witness"]


class Witness:
    """Used by the engine (`fetched`, `computed`) and by the loop (`committed`, `over`). `place`: of a rank in its
    replica, which tells what lies there of a sharded state."""

    def __init__(self, folder: Path, name: str, state: State, place: int = 0) -> None:
        self._testimony, self._state, self._place = Testimony(folder, name), state, place
        self._digest, self._steps, self._told = 0, 0, False
        self._tell("starts", {})

    @classmethod
    def of(cls, environ: Mapping[str, str], name: str, state: State, place: int = 0) -> Witness | None:
        """None where nobody asked for one."""
        folder = environ.get(VARIABLE)
        return cls(Path(folder), name, state, place) if folder else None

    def fetched(self, batch: Any) -> None:
        """The batch of the microbatch that is computed next."""
        self._digest = batch_digest(batch)

    def computed(self, step: int, microbatch: int, loss: float) -> None:
        """Its gradient is part of the step now."""
        digest, self._digest = self._digest, 0
        self._testimony.computed(step, microbatch, digest, loss)

    def committed(self, step: int, loss: float) -> None:
        """The loop's inner iteration ended with this step committed."""
        self._steps = step + 1
        self._testimony.steps.committed(step, loss)

    def over(self) -> None:
        """No more steps come: the state is what training ends with. Called under the loop's own frame."""
        if not self._told:
            self._told = True
            self._tell("ends", loop_variables(sys._getframe(1), self._state))

    def _tell(self, place: str, loop: dict[str, tuple[str, str]]) -> None:
        parts = {name: f"{value & (1 << 64) - 1:016x}" for name, value in self._state.parts()}
        digest = digest_of(self._state, local)  # no rank waits for another: they end their loops one after the other
        seen = StateSeen(steps=self._steps, fingerprint=digest, parts=parts, loop=loop)
        if not self._place:
            self._testimony.state(place, seen)
        elif place == "ends":
            self._testimony.state(f"{LANE}{self._place}", seen)
