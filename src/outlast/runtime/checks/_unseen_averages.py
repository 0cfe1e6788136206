"""In the first steps: does the loop update an `AveragedModel` that nobody was told of? Whoever joins would not have it,
and no step would show that: the run would end well, and what it saves would be another average (41).

Looked for among all that lives, and known by what it counts; no method of torch is replaced. What is written by hand is
not found: a tensor that nears a parameter may be a copy as well.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from outlast.errors import LoopUnrepeatable
from outlast.runtime.training.state import State
from outlast.tensors import fingerprint

__all__ = ["UnseenAverages"]

_REMEDY = 'protect(..., state={"ema": ema}), and update it on every replica, not only where run.is_writer holds'


class UnseenAverages:
    """Asked after each of the first steps. `last`, `first`: whether this member is that of the view; `asked`: how often
    the loop has asked whether it writes."""

    def __init__(
        self, state: State, last: Callable[[], bool], first: Callable[[], bool], asked: Callable[[], int]
    ) -> None:
        self._state, self._last, self._first, self._asked = state, last, first, asked
        self._before: list[tuple[weakref.ref[Any], int]] = []  # averages, and versions of what they count with
        self._asked_before = 0
        self._said = False

    def applied(self, *, more: bool) -> None:
        """A step was applied; `more`: so will the next one be looked at. Raises LoopUnrepeatable for an average that
        was updated since the last one, unless because this is the one that writes: that is told."""
        before, asked, self._before = self._before, self._asked_before, []
        if self._said or not (self._last() or self._first()):
            return
        moved = [found for where, version in before if (found := where()) is not None and _version(found) != version]
        if any(not self._known(found) for found in moved):
            self._found(alone=self._first() and asked != self._asked())
        elif more:
            unknown = [found for found in _alive() if not self._known(found)]
            self._before = [(weakref.ref(found), _version(found)) for found in unknown]
            self._asked_before = self._asked()

    def _found(self, *, alone: bool) -> None:
        what = "the loop updates an AveragedModel that is not registered"
        if self._last() and not alone:
            raise LoopUnrepeatable(
                f"{what}: a replica that joins would not have it, nor would a run that goes on from a checkpoint",
                did="it was found in the first steps, before any fault",
                remedy=_REMEDY,
            )
        self._said = True
        print(f"outlast: {what}: who writes after this replica would not have it. {_REMEDY}", file=sys.stderr)

    def _known(self, average: AveragedModel) -> bool:
        """Whether the state holds what it counts and what it averages, itself or by a copy."""
        held = self._state.encoded()[1].values()
        memory = {_place(tensor) for tensor in held}
        wanted = [average.n_averaged, *average.module.parameters()]
        loose = [tensor for tensor in wanted if _place(tensor) not in memory]
        if not loose:
            return True
        prints = {fingerprint(tensor) for tensor in held}
        return all(fingerprint(tensor.detach()) in prints for tensor in loose)


def _alive() -> list[AveragedModel]:
    return [held for held in gc.get_objects() if issubclass(type(held), AveragedModel)]  # isinstance would load modules


def _version(average: AveragedModel) -> int:
    return average.n_averaged._version


def _place(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.data_ptr()
