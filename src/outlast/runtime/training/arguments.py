"""What `protect` is given, looked at before anything is made of it: a mistake is told as one, with what would work.

It judges the arguments one by one; what they are together is their owners' matter (`Samples`, `State`, `row_settings`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Sampler

from outlast.errors import ConfigError

__all__ = ["check_arguments", "check_dataset", "check_once", "check_shares", "listed", "positive", "whole"]


def check_arguments(
    model: Any,
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    state: Any,
    *,
    seed: Any,
    clip_norm: Any,
    num_workers: Any,
    bucket_mb: Any,
    collate_fn: Any,
) -> None:
    """ConfigError for the first argument that cannot work."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"the model is a {type(model).__name__}", remedy="give a torch.nn.Module")
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups"):
            raise ConfigError(
                f"the optimizer is a {type(optimizer).__name__}",
                remedy="give a torch.optim.Optimizer, or a list of them",
            )
        _check_optimizer(optimizer)
    _check_parameters(model, optimizers)
    if not isinstance(state, Mapping):
        raise ConfigError(f"state={state!r} is no mapping", remedy='state={"ema": ema}, by names of your choice')
    for name, part in [("scheduler", part) for part in schedulers] + [(f"state[{k!r}]", v) for k, v in state.items()]:
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise ConfigError(
                f"{name} is a {type(part).__name__}, which cannot be saved",
                remedy="give an object with state_dict() and load_state_dict()",
            )
    for scheduler in schedulers:
        _check_scheduler(scheduler)
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


def _check_optimizer(optimizer: Any) -> None:
    """ConfigError for an optimizer whose step cannot be taken from gradients that are already there."""
    wanted = _unfilled(optimizer)
    if wanted:
        raise ConfigError(
            f"{type(optimizer).__name__}.step needs {wanted}: it computes the loss several times in one step, and "
            "outlast gives it the gradient of one",
            remedy="an optimizer whose step() takes nothing, such as AdamW or SGD",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            "SparseAdam takes sparse gradients only, and outlast adds gradients up as dense ones",
            remedy="Adam or AdamW; nn.Embedding(sparse=True) may stay",
        )


def _check_parameters(model: torch.nn.Module, optimizers: Sequence[Any]) -> None:
    """ConfigError for parameters that have no shape yet, or that cannot be summed up."""
    names = {id(p): name for name, p in model.named_parameters()}
    held = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
    for tensor in (*model.parameters(), *held.values()):
        name = names.get(id(tensor), "a parameter of the optimizer")
        if is_lazy(tensor):
            raise ConfigError(
                f"{name} of the model has no shape yet: it is of a lazy module",
                remedy="run one batch through the model first, model(example), and make the optimizer after that",
            )
        if id(tensor) in held and tensor.requires_grad and tensor.is_complex():
            raise ConfigError(
                f"{name} is complex ({tensor.dtype}), and gradients are summed up as real numbers",
                remedy="keep it as nn.Parameter(torch.view_as_real(value)), and use torch.view_as_complex in forward",
            )


def _check_scheduler(scheduler: Any) -> None:
    wanted = _unfilled(scheduler)
    if wanted:
        raise ConfigError(
            f"{type(scheduler).__name__}.step needs {wanted}, and outlast steps what is given as scheduler= by itself, "
            "without arguments",
            remedy='register it as state={"plateau": scheduler} instead, and call scheduler.step(step.loss) yourself '
            "after the inner loop",
        )


def _unfilled(part: Any) -> str:
    """The arguments without which its step cannot be called, as a reader would name them; "" if there are none."""
    try:  # of the class: a scheduler puts a function of its own in the place of its optimizer's
        _, *parameters = inspect.signature(type(part).step).parameters.values()
    except (AttributeError, TypeError, ValueError):  # it has none, or one written in C: found out when it is called
        return ""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return " and ".join(repr(p.name) for p in parameters if p.kind in kinds and p.default is p.empty)


def check_dataset(dataset: Any) -> None:
    """ConfigError for what does not give samples by number."""
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        size = f"batch_size={dataset.batch_size} becomes global_batch_size, or a microbatch's part of it; "
        raise ConfigError(
            f"the dataset is a {kind}, which decides on order and batches itself",
            remedy=f"pass loader.dataset; {size}pass collate_fn=, num_workers=, shuffle= and drop_last= to protect too",
        )
    if isinstance(dataset, Sampler):
        raise ConfigError(
            f"the dataset is a {kind}: a sampler gives numbers, not samples",
            remedy="pass the dataset, and this as protect(sampler=…)",
        )
    if isinstance(dataset, Mapping):
        raise ConfigError(
            f"the dataset is a {kind} with the keys {', '.join(map(repr, list(dataset)[:5]))}",
            remedy="pass one of its parts, such as dataset['train']",
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigError(
            f"{kind} is no dataset: it has neither samples by number nor an order to read them in",
            remedy="one with __len__ and __getitem__, or an object that can be iterated again and again",
        )


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


def whole(name: str, value: Any) -> int:
    """The value; ConfigError if it is no count that may be 0."""
    if not _whole(value) or value < 0:
        raise ConfigError(f"{name}={value!r} is no number of them", remedy=f"{name}=0 or more")
    return int(value)


def check_shares(replicas: int, microbatches: int) -> None:
    """ConfigError where a replica would have nothing to do."""
    if replicas > microbatches:
        raise ConfigError(
            f"{replicas} replicas cannot share {microbatches} microbatch{'es' * (microbatches > 1)}: each needs one in "
            "every step",
            remedy=f"protect(microbatches={replicas}) or more, or at most --replicas {microbatches}",
        )
