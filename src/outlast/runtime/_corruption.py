"""Single flipped bits, ordered from outside: how guards and audits are put to the test on real processes.

Orders come as JSON in OUTLAST_CORRUPTION (a list): which replica, what (a gradient, a parameter, an optimizer moment,
or a sample's values), at which step, which bit of which element. `prove` and tests supply them; a normal run has none,
and then nothing here is ever called. A transient flip happens once; a persistent one again in every later step.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from torch import Tensor

from outlast.errors import ConfigError

if TYPE_CHECKING:
    from outlast.runtime._engine import Engine

__all__ = ["Corruption", "Flip", "flip_bit", "ordered"]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Flip(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ordered flip. `replica`: a slot (r1) or one incarnation (r1.2). `bit`: 0 is the least of the mantissa.

    `microbatch`: for gradients; None is the first that the replica computes in the step. `parameter`: its name, or ""
    for the first. `element` counts from the front and wraps around. `moment`: the key in the optimizer's state.
    """

    replica: str
    target: Literal["gradient", "parameter", "moment"]
    step: int
    bit: int
    parameter: str = ""
    element: int = 0
    moment: str = "exp_avg"
    microbatch: int | None = None
    persistent: bool = False


def ordered(me: str, engine: Engine) -> Engine:
    """The engine, with what OUTLAST_CORRUPTION orders for this process, if anything."""
    text = os.environ.get("OUTLAST_CORRUPTION")
    engine.corruption = Corruption(me, text, engine) if text else None
    return engine


class Corruption:
    """The flips ordered for one process. `num_struck`: how many happened."""

    def __init__(self, me: str, text: str, engine: Engine) -> None:
        try:
            flips = msgspec.json.decode(text, type=list[Flip])
        except msgspec.DecodeError as error:
            raise ConfigError(f"OUTLAST_CORRUPTION is no list of flips: {error}", remedy="see prove") from error
        self.flips = [f for f in flips if f.replica in (me, me.partition(".")[0])]
        self.num_struck = 0
        self._last: dict[int, int] = {}  # flip -> the step in which it struck last
        self._stuck: dict[int, bool] = {}  # persistent flip -> the value its bit is stuck at
        self._pending: Flip | None = None
        self._index = dict(zip(engine.state.names, engine.state.params, strict=True))
        for flip in self.flips:
            if flip.target == "gradient":
                self._of(flip).register_hook(self._hook(flip))  # type: ignore[no-untyped-call]

    def strike(self, engine: Engine, step: int, leaf: int) -> None:
        """A microbatch is about to be computed: flip what is due."""
        self._pending = None
        for number, flip in enumerate(self.flips):
            again = flip.persistent and step > flip.step
            if not (step == flip.step or again) or self._last.get(number) == step:
                continue
            if flip.target == "gradient" and flip.microbatch not in (None, leaf):
                continue
            self._last[number] = step
            self._now(engine, number, flip)

    def _now(self, engine: Engine, number: int, flip: Flip) -> None:
        if flip.target == "gradient":
            self._pending = flip
            return
        target: Any = self._of(flip)
        if flip.target == "moment":
            target = next(
                (o.state[target].get(flip.moment) for o in engine.state.optimizers if target in o.state), None
            )
        if isinstance(target, Tensor):
            if flip.persistent and self._stuck.get(number) is read_bit(target, flip.element, flip.bit):
                return
            flip_bit(target, flip.element, flip.bit)
            self._stuck[number] = read_bit(target, flip.element, flip.bit)
            self.num_struck += 1

    def _hook(self, flip: Flip) -> Any:
        def flipped(grad: Tensor) -> Tensor:
            if self._pending is not flip:
                return grad
            self._pending = None
            self.num_struck += 1
            grad = grad.clone()
            flip_bit(grad, flip.element, flip.bit)
            return grad

        return flipped

    def _of(self, flip: Flip) -> Tensor:
        name = flip.parameter or next(iter(self._index))
        if name not in self._index:
            raise ConfigError(f"no parameter {name!r} to flip a bit of", remedy=f"one of {', '.join(self._index)}")
        return self._index[name]


def read_bit(tensor: Tensor, element: int, bit: int) -> bool:
    """One bit of one element."""
    flat = tensor.detach().reshape(-1)
    at = element % flat.numel()
    return bool(int(flat[at : at + 1].clone().view(_WORDS[tensor.element_size()]).item()) >> bit & 1)


def flip_bit(tensor: Tensor, element: int, bit: int) -> None:
    """Flip one bit of one element, in place. ValueError for a bit that the dtype does not have."""
    size = tensor.element_size()
    if not 0 <= bit < 8 * size:
        raise ValueError(f"bit {bit} of {tensor.dtype} is not among 0 to {8 * size - 1}")
    with torch.no_grad():
        flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach().reshape(-1)
        at = element % flat.numel()
        word = flat[at : at + 1].clone().view(_WORDS[size])
        mask = (1 << bit) - (1 << (8 * size) if bit == 8 * size - 1 else 0)
        flat[at : at + 1] = (word ^ mask).view(flat.dtype)
