"""Silent corruption on order: one bit of one gradient element flips, once or every time, and nobody is told.

Orders come as JSON in OUTLAST_FLIPS (a list), from tests and `prove`; in a normal run there are none and nothing of
this is called. The flip strikes after the backward and before the fingerprint: where a faulty multiplier would.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from outlast.errors import ConfigError

__all__ = ["Flip", "Flips"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Flip(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`replica`: a slot (r1) or one incarnation (r1.2). `microbatch`: None for all. `param`: index of the parameter;
    `element`, `bit`: modulo their number. `times`: how many computations are spoilt; 0: every one (a broken device).
    `drift`: another bit each time, as a device does that is wrong at random. `place`: sum: strike the partial sum after
    it was fingerprinted, where failing memory would; `param` is then the bucket."""

    replica: str
    step: int
    microbatch: int | None = None
    param: int = 0
    element: int = 0
    bit: int = 0
    times: int = 1
    drift: bool = False
    place: Literal["gradient", "sum"] = "gradient"


class Flips:
    """The flips ordered for one process."""

    def __init__(self, flips: list[Flip]) -> None:
        self._flips = flips
        self._done = [0] * len(flips)
        self._here: list[int] = []

    @classmethod
    def read(cls, me: str, text: str | None) -> Flips | None:
        """None if nothing is ordered for this process. ConfigError for what is no list of flips."""
        try:
            flips = msgspec.json.decode(text, type=list[Flip]) if text else []
        except msgspec.DecodeError as error:
            raise ConfigError(f"OUTLAST_FLIPS is no list of flips: {error}", remedy="see prove") from error
        mine = [flip for flip in flips if flip.replica in (me, me.partition(".")[0])]
        return cls(mine) if mine else None

    def at(self, step: int, leaf: int) -> None:
        """A microbatch's computation begins."""
        self._here = []
        for number, flip in enumerate(self._flips):
            if flip.step == step and flip.microbatch in (None, leaf) and not 0 < flip.times <= self._done[number]:
                self._done[number] += 1
                self._here.append(number)

    def __call__(self, index: int, grad: Tensor) -> None:
        """The gradient of parameter `index` is there: strike, in place."""
        for number in self._here:
            flip = self._flips[number]
            if flip.place == "gradient" and flip.param == index and grad.numel():
                _strike(grad.detach(), flip.element, flip.bit + (self._done[number] if flip.drift else 0))

    def after_sum(self, bucket: int, flat: Tensor) -> None:
        """A bucket of a partial sum with the last microbatch in it was fingerprinted: strike."""
        for number in self._here:
            flip = self._flips[number]
            if flip.place == "sum" and flip.param == bucket:
                _strike(flat, flip.element, flip.bit)


def _strike(grad: Tensor, element: int, bit: int) -> None:
    width = 8 * grad.element_size()
    words = grad.view(_INTEGERS[grad.element_size()])
    place = tuple(int(i) for i in np.unravel_index(element % grad.numel(), grad.shape)) if grad.dim() else ()
    mask = 1 << bit % width
    words[place] ^= mask - (1 << width) if mask >> width - 1 else mask
