"""What was evaluated at the start of the epoch under way, before its first step: part of the training state.

A replica that joins amid the epoch, or a run that resumes there, goes through the epoch's opening lines again, alone
and with a newer state. It is told what the same lines gave when the epoch began. Does not know who evaluates, nor how.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outlast.errors import LoopUnrepeatable

__all__ = ["KEY", "Opening"]

KEY = "outlast.opening"
"""Its name in the training state."""


class Opening:
    """Knows whether the loop's code before an epoch's first step has run. `steps_per_epoch`: 0 where there are no
    epochs."""

    def __init__(self, steps_per_epoch: int) -> None:
        self._size, self._epoch = steps_per_epoch, -1
        self._found: list[dict[str, float]] = []

    def applied(self, step: int, evaluated: tuple[tuple[tuple[str, float], ...], ...]) -> None:
        """A step is applied, before whose inner loop this was evaluated, in order."""
        if self._size and step % self._size == 0:
            self._epoch, self._found = step // self._size, [dict(rows) for rows in evaluated]

    def add(self, epoch: int, found: Mapping[str, float]) -> None:
        """It was evaluated in the opening lines of an epoch whose first step is not applied yet."""
        if epoch != self._epoch:
            self._epoch, self._found = epoch, []
        self._found.append(dict(found))

    def told(self, epoch: int, number: int) -> dict[str, float]:
        """What evaluation `number` of that epoch's opening lines gave. LoopUnrepeatable if it is not known."""
        if epoch != self._epoch or number >= len(self._found):
            raise LoopUnrepeatable(
                f"this process came in amid epoch {epoch}, whose start it did not see, and evaluation {number + 1} of "
                "the lines before its first step is not known: they evaluated less when the epoch began",
                did="nothing was evaluated",
                remedy="evaluate there by the epoch's number alone, as often on every replica; or after the loop over "
                "the steps of the epoch before",
            )
        return dict(self._found[number])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "found": [dict(rows) for rows in self._found]}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        self._epoch, self._found = int(values["epoch"]), [dict(rows) for rows in values["found"]]
