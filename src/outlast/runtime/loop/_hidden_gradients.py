"""Where the loop would look for a gradient, something that tells it what to write instead.

A protected step has its gradient when all microbatches are summed up, and applies it itself. So between a backward and
the optimizer's step there is nothing in `.grad` that the loop could clip, scale, log or step with: what it did there
would have no effect, and nobody would notice. Each parameter's `.grad` therefore holds a tensor without memory that
raises StepMisuse when it is used. Nothing of torch is replaced: whatever reads a gradient, whoever wrote it, is told.

May be done to it: setting it to None (`zero_grad()`), moving it with its module, looking at its kind to compile
(`torch.compile`), adding a gradient to it (a backward of the loop's own, for a loss that is not protected, whose
gradient goes nowhere). Does not know steps or replicas.
"""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outlast.errors import StepMisuse
from outlast.tensors import is_shard

__all__ = ["hide", "show_none"]

_REMEDIES = {
    "clip_grad_norm_": "leave it out, and give protect(clip_norm=…); step.grad_norm is the norm before clipping",
    "clip_grad_value_": "leave it out, and give protect(clip_norm=…), which bounds the norm of the whole gradient",
    "zero_grad": "leave zero_grad() out, or without set_to_none=False",
    "unscale_": "leave it out, scaler.step() and update() too, and give protect(scaler=scaler); torch.autocast with "
    "bfloat16 needs none",
    "step": "leave optimizer.step() out: outlast takes the step when the inner loop ends",
}
_OTHERWISE = (
    "for its norm read step.grad_norm after the inner loop (with clip_norm or guards); to see or change a microbatch's "
    "gradients use parameter.register_hook"
)
_LOOK_AT = 12  # frames above the use of a gradient in which the habit has its name


def hide(parameters: Iterable[Tensor], hidden: dict[int, Tensor], *, shards: bool) -> None:
    """Put a tell-tale in the place of each gradient. `hidden`: those that were made before, kept by the caller.
    `shards`: also of what FSDP shards. FSDP takes what stands there for a gradient to add to, so the caller has to take
    them away before FSDP looks."""
    for parameter in parameters:
        if not shards and is_shard(parameter):
            continue
        try:
            parameter.grad = hidden[id(parameter)]
        except (KeyError, RuntimeError):  # the first time, or the parameter has become another one since
            parameter.grad = hidden[id(parameter)] = _Telltale(parameter)


def show_none(parameters: Iterable[Tensor]) -> None:
    """Leave no tell-tale behind: the loop is over."""
    for parameter in parameters:
        if isinstance(parameter.grad, _Telltale):
            parameter.grad = None


class _Telltale(Tensor):
    """A tensor of the parameter's kind, without memory."""

    @staticmethod
    def __new__(cls, like: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None) -> _Telltale:
        made: _Telltale = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=dtype or like.dtype, device=device or like.device
        )
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "<gradient kept by outlast until all microbatches are summed up>"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        users = _users()
        if "_apply" in users or _is_compiling():  # of torch.nn.Module: `model.to(device)`
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise _used(users)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.add_.Tensor:
            return args[0]
        if func is torch.ops.aten.add.Tensor:  # of a backward with create_graph=True
            return args[1] if isinstance(args[0], _Telltale) else args[0]
        if func is torch.ops.aten._to_copy.default:
            with torch._C.DisableTorchFunctionSubclass():
                return _Telltale(args[0], (kwargs or {}).get("dtype"), (kwargs or {}).get("device"))
        raise _used(_users())


def _is_compiling() -> bool:
    """Whether torch.compile looks at it: it notes the kind of each parameter's gradient whenever it compiles anew. What
    a compiled function calls uncompiled is no part of that."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(2)))
    return any(frame.f_globals.get("__name__") == "torch._dynamo.convert_frame" for frame in frames)


def _users() -> list[str]:
    """Names of the functions that are using a gradient, the innermost first."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(2)))
    return [frame.f_code.co_name for frame in itertools.islice(frames, _LOOK_AT)]


def _used(users: Sequence[str]) -> StepMisuse:
    habit = next((name for name in users if name in _REMEDIES), "")
    return StepMisuse(
        f"{habit or 'the loop'} used .grad of a protected parameter, where no gradient is: outlast sums them up over "
        "all microbatches and applies the sum itself",
        did="nothing of this step was applied",
        remedy=_REMEDIES.get(habit, _OTHERWISE),
    )
