"""What `protect` is given, looked at before anything is made of it: a mistake is told as one, with what would work.

It judges the arguments one by one; what they are together is their owners' matter (`Samples`, `State`, `row_settings`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch

from outlast.errors import ConfigError

__all__ = ["check_arguments", "check_once", "listed", "positive"]


def check_arguments(
    model: Any, optimizers: Sequence[Any], schedulers: Sequence[Any], state: Any, *, seed: Any, clip_norm: Any,
    num_workers: Any, bucket_mb: Any, collate_fn: Any,
) -> None:  # fmt: skip
    """ConfigError for the first argument that cannot work."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"the model is a {type(model).__name__}", remedy="give a torch.nn.Module")
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups"):
            raise ConfigError(
                f"the optimizer is a {type(optimizer).__name__}",
                remedy="give a torch.optim.Optimizer, or a list of them",
            )
    if not isinstance(state, Mapping):
        raise ConfigError(f"state={state!r} is no mapping", remedy='state={"ema": ema}, by names of your choice')
    for name, part in [("scheduler", part) for part in schedulers] + [(f"state[{k!r}]", v) for k, v in state.items()]:
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise ConfigError(
                f"{name} is a {type(part).__name__}, which cannot be saved",
                remedy="give an object with state_dict() and load_state_dict()",
            )
    if not _whole(seed):
        raise ConfigError(f"seed={seed!r} is no whole number", remedy="seed=0, or any other")
    if not (_whole(num_workers) and num_workers >= 0):
        raise ConfigError(f"num_workers={num_workers!r} is no number of processes", remedy="num_workers=0 or more")
    if clip_norm is not None and not (_number(clip_norm) and clip_norm > 0):
        raise ConfigError(f"clip_norm={clip_norm!r} is no norm", remedy="a number above 0, or None for no clipping")
    if not (_number(bucket_mb) and 0 < bucket_mb < float("inf")):
        raise ConfigError(f"bucket_mb={bucket_mb!r} is no size", remedy="a number above 0; 4 is the default")
    if collate_fn is not None and not callable(collate_fn):
        raise ConfigError(f"collate_fn={collate_fn!r} cannot be called", remedy="a function of a list of samples")


def check_once(earlier: Any) -> None:
    """ConfigError if the run has a training already: both would speak to the coordinator in one name."""
    if earlier is not None:
        raise ConfigError(
            "protect() was called twice",
            remedy="one run, one training: put several models into one Module, and give their optimizers as a list",
        )


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def listed(value: Any) -> list[Any]:
    """One, several or none."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def positive(name: str, value: int) -> int:
    """The value; ConfigError if it is no count."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r} is not a positive whole number", remedy=f"{name}=1 or more")
    return value
