"""The loss scale of float16: one for all microbatches of a step, taken out again once, at the tree's root.

Gradients are made under the scale that the step begins with. Whether they overflowed is read from the whole gradient's
norm, which every member knows; so growth and back-off are the same everywhere, and part of each step's outcome. A step
that overflowed changes neither parameters nor optimizers, schedules or buffers. The scaler's own settings are the
user's; its `step` and `update` are not called. Does not know who computes what.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from outlast.errors import ConfigError
from outlast.tensors import local

__all__ = ["KEY", "Scaling"]

KEY = "outlast.scaler"
"""Its name in the training state."""
_LEAST = 1.0  # a gradient that is not finite under this scale is not so for the scale: guards are told


class Scaling:
    """Scales losses for a gradient scaler, and takes the scale over in each outcome. `scaler`: a
    `torch.amp.GradScaler`; None, or one that is not enabled: no scale."""

    def __init__(self, scaler: Any = None) -> None:
        names = "get_scale", "is_enabled", "state_dict", "load_state_dict"
        if scaler is not None and not all(callable(getattr(scaler, name, None)) for name in names):
            raise ConfigError(
                f"the scaler is a {type(scaler).__name__}",
                remedy='scaler=torch.amp.GradScaler("cuda"), or leave it out',
            )
        self._scaler: Any = scaler if scaler is not None and scaler.is_enabled() else None

    def check(self, robust: bool) -> None:
        """ConfigError where the run has what cannot be had with a scale."""
        if robust and self.active:
            raise ConfigError(
                "a robust rule cannot be had with a gradient scaler: it would count what overflows against f",
                remedy="torch.autocast with bfloat16 needs no scaler; or aggregation='mean'",
            )

    @property
    def active(self) -> bool:
        """Whether losses are scaled."""
        return self._scaler is not None

    @property
    def factor(self) -> float:
        """The scale of the step under way; 1.0 without a scaler."""
        return float(self._scaler.get_scale()) if self._scaler is not None else 1.0

    def scaled(self, loss: Tensor) -> Tensor:
        """A microbatch's loss under the scale, for its backward."""
        return loss * self.factor if self.active else loss

    def overflowed(self, norm: float | None) -> bool:
        """Whether a gradient of this norm was too large for its numbers under the scale."""
        return self.active and norm is not None and not math.isfinite(norm) and self.factor > _LEAST

    def unscale(self, params: Iterable[Tensor]) -> bool:
        """Take the scale out of their gradients; whether they overflowed. For who adds them up himself."""
        factor, finite = self.factor, True
        for grad in [param.grad for param in params if self.active and param.grad is not None]:
            grad.mul_(1.0 / factor)
            finite = finite and bool(local(grad).isfinite().all())
        return not finite and factor > _LEAST

    def applied(self, overflowed: bool) -> None:
        """A step is over: the scale for the next one, as `GradScaler.update` would have it."""
        if self._scaler is None:
            return
        now = self._scaler.state_dict()
        scale, tracker = now["scale"], 0
        if overflowed:
            scale *= now["backoff_factor"]
        elif now["_growth_tracker"] + 1 < now["growth_interval"]:
            tracker = now["_growth_tracker"] + 1
        else:
            scale *= now["growth_factor"]
        rounded = float(torch.tensor(scale, dtype=torch.float32))
        self._scaler.load_state_dict(
            now | {"scale": rounded if math.isfinite(rounded) else now["scale"], "_growth_tracker": tracker}
        )

    # --- part of the training state ------------------------------------------------------------------------------
    def parts(self) -> dict[str, Any]:
        """What of it is part of the training state, by name."""
        return {KEY: self} if self.active else {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._scaler.state_dict())

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        self._scaler.load_state_dict(dict(values))
