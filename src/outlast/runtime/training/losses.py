"""What `step.backward` is given: one loss that can be differentiated, and not scaled by somebody else as well.

Knows losses; not steps, replicas or sums. A scaled or divided loss is recognised by the operation that made it, as
autograd keeps it, so it is looked at in the first backwards of a process only, where a habit shows.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from outlast.errors import StepMisuse

__all__ = ["LossCheck", "missing_backward", "second_backward", "several_parts"]

_CALL = "step.backward(loss) once for each batch"
_TO_SKIP = "to leave a batch out of the step, step.backward(0 * loss)"
_LOOKS = 3


class LossCheck:
    """Looks at each loss before its backward. `microbatches`: of a step."""

    def __init__(self, microbatches: int) -> None:
        self._microbatches, self._looks = microbatches, _LOOKS

    def __call__(self, loss: Any) -> None:
        """Raises StepMisuse for what is no loss, or one times a gradient scale; warns of one that is divided twice."""
        _check(loss)
        if self._looks:
            self._looks -= 1
            if _scaled(loss):
                raise StepMisuse(
                    "the loss was multiplied by a GradScaler, whose step() nobody calls: gradients would be as many "
                    "times too large",
                    did="nothing was applied",
                    remedy="step.backward(loss), with protect(scaler=scaler): scale, unscale_, step and update are "
                    "outlast's then; torch.autocast with bfloat16 needs no scaler",
                )
            if self._microbatches > 1 and self._microbatches in _divisors(loss):
                self._looks = 0
                print(
                    f"outlast: the loss was divided by {self._microbatches}, the number of microbatches, before "
                    "step.backward, which takes their mean itself: leave the division out, unless it means something "
                    "else",
                    file=sys.stderr,
                    flush=True,
                )


def _check(loss: Any) -> None:
    if loss is None:
        raise StepMisuse("step.backward was given None, no loss", remedy=f"{_CALL}; {_TO_SKIP}")
    if not isinstance(loss, Tensor):
        found = type(loss).__name__
        if isinstance(loss, Mapping) or hasattr(loss, "loss"):
            how = "step.backward(output.loss)" if hasattr(loss, "loss") else 'step.backward(output["loss"])'
        elif isinstance(loss, tuple | list):
            how = "one loss: losses that count together are added up first, step.backward(a + b)"
        else:
            how = "the loss as a tensor, not its value: without .item() or float()"
        raise StepMisuse(f"step.backward was given a {found}, no tensor", remedy=how)
    if loss.numel() != 1:
        raise StepMisuse(
            f"the loss has shape {tuple(loss.shape)}, so it is not one number",
            remedy="step.backward(loss.mean()): a microbatch's loss is the mean over its samples",
        )
    if loss.is_complex():
        raise StepMisuse(
            f"the loss is complex ({loss.dtype})", remedy="step.backward(loss.real), or its absolute value"
        )
    if not loss.requires_grad:
        raise StepMisuse(
            "the loss depends on no parameter that is trained",
            remedy="compute it outside of torch.no_grad(), without .detach() and .item(), from the protected model; "
            + _TO_SKIP,
        )


def missing_backward(step: int, microbatch: int) -> StepMisuse:
    """The body of the loop asked for the next batch without a backward of this one."""
    return StepMisuse(
        f"microbatch {microbatch} of step {step} got no backward",
        remedy=f"call {_CALL}, not loss.backward(); {_TO_SKIP}",
    )


def second_backward() -> StepMisuse:
    """The body of the loop called backward again before it took another batch."""
    return StepMisuse(
        "step.backward was called twice for one batch",
        remedy="add the losses, then call it once: step.backward(a + b). Where b must not train a part of the model "
        "that it goes through (a GAN's discriminator), compute b between part.requires_grad_(False) and "
        "part.requires_grad_(True)",
    )


def several_parts() -> StepMisuse:
    """A backward came to a parameter more than once."""
    return StepMisuse(
        "a parameter received its gradient in several parts in one backward",
        did="the step was not committed",
        remedy="activation checkpointing: use_reentrant=False",
    )


def _factors(loss: Tensor) -> Iterator[tuple[str, Tensor, str]]:
    """The last multiplications and divisions by a number that made the loss, the outermost first: the operation, the
    number, and the operation that made the other operand."""
    function = loss.grad_fn
    while function is not None and function.name().startswith(("MulBackward", "DivBackward")):
        number, operand = getattr(function, "_saved_other", None), function.next_functions[0][0]
        if not isinstance(number, Tensor) or number.dim() or number.requires_grad:
            return
        yield function.name(), number, operand.name() if operand is not None else ""
        function = operand


def _scaled(loss: Tensor) -> bool:
    """Whether a GradScaler's own scale was a factor. Scales are tensors of one 32 bit number."""
    found = [number for name, number, _ in _factors(loss) if name[0] == "M" and number.dtype == torch.float32]
    if not found:
        return False
    scalers = [held for held in gc.get_objects() if issubclass(type(held), GradScaler) and held.is_enabled()]
    scales = [float(scaler._scale) for scaler in scalers if scaler._scale is not None]
    return any(float(number) in scales for number in found)


def _divisors(loss: Tensor) -> list[float]:
    """What numbers it was divided by; a sum that is divided is a mean and does not count."""
    return [float(number) for name, number, of in _factors(loss) if name[0] == "D" and not of.startswith("SumBackward")]
