"""`training.epochs(n)`: the steps of one epoch after another, for loops that do something between two epochs.

What the loop does after an epoch's last step belongs to that step's body, so a replica that joins does it as well, and
a save that is due is made after it. Knows numbers of steps and nothing of what a step is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from outlast.errors import StepMisuse
from outlast.runtime.training.opening import Opening

__all__ = ["Epoch", "Epochs", "begun_amid"]


class Epochs(Iterator["Epoch"]):
    """Epochs that still have steps to be done. `steps`: all of these steps. `amid`: told of the first step when it is
    amid an epoch; what it returns is called between the loop's code at the epoch's start and that step."""

    def __init__(self, steps: Iterator[Any], steps_per_epoch: int, amid: Callable[[int], Callable[[], None]]) -> None:
        self._steps, self._size, self._amid = steps, steps_per_epoch, amid
        self._put_back: Callable[[], None] | None = None
        self._ahead: Any = None  # the step that the next epoch begins with
        self._last = -1  # number of the newest step that was given
        self._evaluated = 0  # in an epoch's opening lines

    def __next__(self) -> Epoch:
        if self._last >= 0 and (self._last + 1) % self._size:
            epoch, place = divmod(self._last, self._size)
            raise StepMisuse(
                f"the loop left epoch {epoch} after {place + 1} of its {self._size} steps",
                did="nothing more was trained",
                remedy="to end training on all replicas call training.stop() and go on; to end it here and now leave "
                "both loops after the same step everywhere",
            )
        self._evaluated = 0
        self._ahead = next(self._steps)  # the body of the step before is over: only now it is asked for
        if self._ahead.number % self._size:
            self._put_back = self._amid(self._ahead.number)
        return Epoch(self._ahead.number // self._size, self._size, weakref.ref(self))

    @property
    def opening(self) -> int | None:
        """The epoch whose opening lines the loop is in: it has not asked for a step of it."""
        return self._ahead.number // self._size if self._ahead is not None else None

    def evaluates_amid(self) -> tuple[int, int] | None:
        """The epoch, and which evaluation of its opening lines this is, if the loop is in those of an epoch that began
        without it."""
        if self._ahead is None or self._ahead.number % self._size == 0:
            return None
        self._evaluated += 1
        return self._ahead.number // self._size, self._evaluated - 1

    def step(self, epoch: int) -> Any:
        """The epoch's next step, None after its last."""
        if self._ahead is not None:
            step, self._ahead = self._ahead, None
            put_back, self._put_back = self._put_back, None
            if put_back is not None:
                put_back()
        elif self._last // self._size != epoch or not (self._last + 1) % self._size:
            return None
        else:
            step = next(self._steps, None)
        self._last = step.number if step is not None else -1
        return step


def begun_amid(epochs: Callable[[], Epochs | None], opening: Opening) -> dict[str, float] | None:
    """What an evaluation gave when the epoch began, if the loop asks for it again where it came in amid that epoch."""
    loop = epochs()
    asked = loop.evaluates_amid() if loop is not None else None
    return opening.told(*asked) if asked is not None else None


class Epoch:
    """One epoch: iterate it for its steps. Goes on in the middle if the run was resumed there."""

    def __init__(self, number: int, num_steps: int, epochs: Callable[[], Epochs | None]) -> None:
        self.number, self.num_steps, self._epochs = number, num_steps, epochs

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[Any]:
        # The loop over epochs holds the steps, and it alone: a `break` out of it is to be noticed at once.
        while (epochs := self._epochs()) is not None and (step := epochs.step(self.number)) is not None:
            del epochs
            yield step
