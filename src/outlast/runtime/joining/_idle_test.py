"""A spare tests its device while it waits: one known answer a turn, so that it is sound when it is needed.

It runs between two outcomes, on the thread that replays them, for about a millisecond. A wrong answer that is right
when asked again is told; one that stays wrong ends the spare (DeviceFault), which is in no view: nobody waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from outlast.core.protocol import messages as m
from outlast.errors import DeviceFault
from outlast.health import QuestionsInTurn, WrongAnswer
from outlast.runtime.view.port import CoordinatorLink

__all__ = ["IdleTest"]

_EVERY_S = 1.0


class IdleTest:
    """Asks a spare's device for one known answer at a time. `turn()` is called whenever the spare has nothing to
    replay."""

    def __init__(
        self,
        device: torch.device,
        link: CoordinatorLink,
        me: str,
        *,
        shown: str = "",
        clock: Callable[[], float] = time.monotonic,
        questions: Callable[[torch.device], QuestionsInTurn] = QuestionsInTurn,
    ) -> None:
        self._device, self._link, self._me, self._shown = device, link, me, shown or str(device)
        self._clock, self._make = clock, questions
        self._questions: QuestionsInTurn | None = None
        self._next_s = clock() + _EVERY_S

    def turn(self) -> None:
        """Ask one question if it is time."""
        if self._clock() < self._next_s:
            return
        if self._questions is None:
            self._questions = self._make(self._device)
        wrong = self._questions.ask()
        self._next_s = self._clock() + _EVERY_S
        if wrong is not None:
            self._tell(wrong)

    def _tell(self, wrong: WrongAnswer) -> None:
        broken = wrong.kind != "transient"
        evidence = f"while it waited as a spare: {wrong.case} {wrong.kind} ({wrong.evidence})"
        note = m.DeviceNoted(
            member=self._me,
            device=self._shown,
            source="test",
            evidence=evidence,
            action="failed" if broken else "suspected",
            remedy="outlast health test asks it for longer",
        )
        self._link.send([note])
        if broken:
            raise DeviceFault(
                f"the device {self._shown} of a spare answers wrongly: {evidence}",
                where=f"replica {self._me}",
                did="the spare ends before it was needed; the run goes on",
                remedy="take the device out of service; outlast health test asks it for longer",
            )
