"""Silent corruption on order: single flipped bits, by which guards and audits are put to the test on real processes.

Orders come as JSON in OUTLAST_CORRUPTION (a list): which replica, what (a gradient, a parameter, an optimizer moment, a
partial sum after it was fingerprinted, what this replica reduces, or a checked product), at which step, which bit of
which element.
`prove` and tests supply them; a normal run has none, and then nothing here is ever called. Nobody is told of a flip.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from outlast.errors import ConfigError
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.step_checks import NoFlips
from outlast.tensors import is_shard, local

__all__ = ["Corruption", "Flip", "flip_bit", "ordered"]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ANY = -1


class Flip(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ordered flip. `replica`: a slot (r1) or one incarnation (r1.2); of several ranks the lead, or another one
    (r1/1, r1/1.2), which strikes what that rank holds. `bit`: 0 is the least of the mantissa.

    `parameter`: its name or number; of a sum or of what is reduced: the bucket's number, -1 for whichever comes first.
    Of a checked product: its number in the microbatch's computation. `element` counts from the front and wraps around.
    `moment`: the key in the optimizer's state. `microbatch`: None is
    whichever comes first. `times`: how many computations of a step are spoilt; 0: every one. `persistent`: again in
    every later step (a parameter or moment: the bit is stuck). So a broken device is `times=0, persistent=True`.
    `drift`: another bit each time, as a device does that is wrong at random.
    """

    replica: str
    target: Literal["gradient", "parameter", "moment", "sum", "reducer", "product"] = "gradient"
    step: int
    bit: int = 0
    parameter: str | int = 0
    element: int = 0
    moment: str = "exp_avg"
    microbatch: int | None = None
    times: int = 1
    persistent: bool = False
    drift: bool = False


def ordered(me: str, engine: Engine) -> Engine:
    """The engine, with what OUTLAST_CORRUPTION orders for this process, if anything."""
    text, state = os.environ.get("OUTLAST_CORRUPTION"), engine.state
    flips = Corruption.read(me, text, state.names, state.params, state.optimizers)
    if flips is not None:
        engine.step_checks.flips = flips
        if engine.checked is not None:
            engine.checked.strike = flips.after_product
    return engine


class Corruption(NoFlips):
    """The flips ordered for one process. `num_struck`: how many happened."""

    active = True

    def __init__(
        self, flips: Sequence[Flip], names: Sequence[str], params: Sequence[Tensor], optimizers: Sequence[Any] = ()
    ) -> None:
        self.flips, self._optimizers = list(flips), optimizers
        self._params: dict[str | int, Tensor] = dict(enumerate(params))
        self._params.update(zip(names, params, strict=True))
        self.num_struck = 0
        self._at, self._product = (-1, -1), -1
        self._armed: list[int] = []
        self._in_step = [0] * len(self.flips)  # computations that a flip has spoilt in this step
        self._in_all = [0] * len(self.flips)
        self._stuck: dict[int, bool] = {}  # persistent flip -> the value its bit is stuck at
        for number, flip in enumerate(self.flips):
            if flip.target == "gradient" and not is_shard(self._of(flip)):
                self._of(flip).register_hook(self._hook(number))  # type: ignore[no-untyped-call]

    @classmethod
    def read(
        cls, me: str, text: str | None, names: Sequence[str], params: Sequence[Tensor], optimizers: Sequence[Any] = ()
    ) -> Corruption | None:
        """None if nothing is ordered for this process. ConfigError for what is no list of flips."""
        try:
            flips = msgspec.json.decode(text, type=list[Flip]) if text else []
        except msgspec.DecodeError as error:
            raise ConfigError(f"OUTLAST_CORRUPTION is no list of flips: {error}", remedy="see prove") from error
        mine = [flip for flip in flips if flip.replica in (me, me.partition(".")[0])]
        return cls(mine, names, params, optimizers) if mine else None

    def begin(self, step: int, leaf: int) -> None:
        """A microbatch is about to be computed, whatever for: strike the state now, arm what strikes in its course."""
        if step != self._at[0]:
            self._in_step = [0] * len(self.flips)
        self._at, self._armed, self._product = (step, leaf), [], -1
        for number, flip in enumerate(self.flips):
            if flip.target == "gradient" and flip.microbatch in (None, leaf) and self._due(number):
                self._in_step[number] += 1
                self._armed.append(number)
            elif flip.target in ("parameter", "moment") and self._due(number, once=True):
                self._in_step[number] += 1
                self._strike_state(number, flip)

    def after_backward(self, index: int, grad: Tensor) -> None:
        """My rows of a sharded parameter's gradient are there: strike them, which the hooks of torch would not see."""
        for number in [n for n in self._armed if self._of(self.flips[n]) is self._params[index]]:
            if grad.numel():
                self._armed.remove(number)
                self._strike(number, grad)

    def after_sum(self, bucket: int, flat: Tensor) -> None:
        """A bucket of a partial sum was fingerprinted: strike where failing memory would."""
        for number, flip in enumerate(self.flips):
            if flip.target == "sum" and flip.microbatch in (None, self._at[1]):
                self._strike_flat(number, flip, bucket, flat)

    def after_product(self, name: str, out: Tensor) -> None:
        """A product was computed, for the first time or again."""
        self._product += 1
        for number, flip in enumerate(self.flips):
            if flip.target == "product" and flip.microbatch in (None, self._at[1]):
                self._strike_flat(number, flip, self._product, out)

    def after_reduction(self, bucket: int, flat: Tensor) -> None:
        """This replica has reduced a slice of a bucket, its own or to check another's."""
        for number, flip in enumerate(self.flips):
            if flip.target == "reducer":
                self._strike_flat(number, flip, bucket, flat)

    def _due(self, number: int, once: bool = False) -> bool:
        flip, step = self.flips[number], self._at[0]
        times = 1 if once else flip.times
        return (step == flip.step or (flip.persistent and step > flip.step)) and not 0 < times <= self._in_step[number]

    def _strike_flat(self, number: int, flip: Flip, bucket: int, flat: Tensor) -> None:
        if flat.numel() and flip.parameter in (_ANY, bucket) and self._due(number):
            self._in_step[number] += 1
            self._strike(number, flat)

    def _strike(self, number: int, tensor: Tensor) -> None:
        flip, tensor = self.flips[number], local(tensor)
        width = 8 * tensor.element_size()
        flip_bit(tensor, flip.element, (flip.bit + (self._in_all[number] if flip.drift else 0)) % width)
        self._in_all[number] += 1
        self.num_struck += 1

    def _strike_state(self, number: int, flip: Flip) -> None:
        target: Any = self._of(flip)
        if flip.target == "moment":
            target = next((o.state[target].get(flip.moment) for o in self._optimizers if target in o.state), None)
        if isinstance(target, Tensor):
            target = local(target)
            if flip.persistent and self._stuck.get(number) is read_bit(target, flip.element, flip.bit):
                return
            self._strike(number, target)
            self._stuck[number] = read_bit(target, flip.element, flip.bit)

    def _hook(self, number: int) -> Any:
        def flipped(grad: Tensor) -> Tensor:
            if number not in self._armed or not grad.numel():
                return grad
            self._armed.remove(number)
            grad = grad.clone()
            self._strike(number, grad)
            return grad

        return flipped

    def _of(self, flip: Flip) -> Tensor:
        if flip.parameter not in self._params:
            names = ", ".join(str(name) for name in self._params if isinstance(name, str))
            raise ConfigError(f"no parameter {flip.parameter!r} to flip a bit of", remedy=f"one of {names}")
        return self._params[flip.parameter]


def _word(tensor: Tensor, element: int) -> tuple[Tensor, tuple[int, ...]]:
    """(the same memory as integers, where the element lies in it), however the tensor is strided."""
    at = np.unravel_index(element % tensor.numel(), tensor.shape) if tensor.dim() else ()
    return tensor.detach().view(_WORDS[tensor.element_size()]), tuple(int(i) for i in at)


def read_bit(tensor: Tensor, element: int, bit: int) -> bool:
    """One bit of one element."""
    words, at = _word(tensor, element)
    return bool(int(words[at].item()) >> bit & 1)


def flip_bit(tensor: Tensor, element: int, bit: int) -> None:
    """Flip one bit of one element, in place. ValueError for a bit that the dtype does not have."""
    width = 8 * tensor.element_size()
    if not 0 <= bit < width:
        raise ValueError(f"bit {bit} of {tensor.dtype} is not among 0 to {width - 1}")
    words, at = _word(tensor, element)
    with torch.no_grad():
        words[at] ^= (1 << bit) - (1 << width if bit == width - 1 else 0)
