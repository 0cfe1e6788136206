"""Saves that have begun and are not settled, and the generation that the next one may refer to."""

from __future__ import annotations

import threading

from outlast.checkpoint._handle import Handle
from outlast.checkpoint._writer import Base
from outlast.core.protocol.saves.commit import SaveId

__all__ = ["SavesUnderWay"]


class SavesUnderWay:
    """Knows the saves that are under way. `incremental`: whether they refer to what is published; `handles` by save.
    The lock is over the base and who refers to it: retention must see either."""

    def __init__(self, incremental: bool) -> None:
        self._incremental, self._lock = incremental, threading.Lock()
        self._base: tuple[Base, int | None] = ({}, None)  # what may be referred to, and the generation it lies in
        self.handles: dict[SaveId, Handle] = {}
        self._stuck: list[Handle] = []  # given up before their writes had returned

    def begin(self, handle: Handle) -> None:
        """It is under way, and refers to the newest base."""
        with self._lock:
            handle.base = self._base if self._incremental else ({}, None)
            self.handles[handle.save] = handle

    def refer_to(self, base: Base, generation: int) -> None:
        """Later saves may refer to this generation."""
        with self._lock:
            self._base = base, generation

    @property
    def bases(self) -> set[int]:
        """Generations that saves refer to, or may."""
        with self._lock:
            found = [self._base[1], *(handle.base[1] for handle in list(self.handles.values()))]
        return {base for base in found if base is not None}

    def any_after(self, save: SaveId) -> bool:
        """Whether one of a later step is under way."""
        return any(other.step > save.step for other in list(self.handles))

    def given_up(self, handle: Handle) -> None:
        """Its write has not returned, and its slot stays taken."""
        self._stuck = [h for h in self._stuck if not h.returned] + [handle]

    @property
    def stuck_steps(self) -> list[int]:
        """Steps whose writes never came back from their disk."""
        return sorted(handle.save.step for handle in self._stuck if not handle.returned)
