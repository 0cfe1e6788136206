"""Accelerate and Fabric: what they have prepared, trained in outlast's loop. Extra: `outlast[trainers]`.

Their models, with autocast and placement, stay as they are; their wrappers of optimizers and schedulers, which would
decide when a step is taken, are taken off. Imports neither library: what was prepared is told by what it holds.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from outlast.adapters.loaders import of_loader
from outlast.errors import ConfigError

_LIBRARIES = ("accelerate", "lightning", "lightning_fabric")
__all__ = ["backward", "protect_prepared"]


def protect_prepared(
    run: Any, model: Any, optimizer: Any, loader: Any, *, microbatches: int, scheduler: Any = None, **given: Any
) -> Any:
    """Return `run.protect(…)` of what `accelerator.prepare` or `fabric.setup` gave; `given`: its further arguments.

    `loader`: the DataLoader as it was before it was prepared; its batch is one microbatch. Raises ConfigError for one
    that was prepared, and whatever `protect` raises.
    """
    if hasattr(loader, "base_dataloader") or hasattr(loader, "_dataloader"):
        raise ConfigError(
            f"the training data is a {type(loader).__name__}, which shares batches out by itself",
            remedy="leave it out of accelerator.prepare(…) or fabric.setup_dataloaders(…), and give the DataLoader; in "
            "the loop move a batch with .to(run.device)",
        )
    _refuse_scalers(model, _listed(optimizer))
    optimizers = [_bare(o, "optimizer", torch.optim.Optimizer) for o in _listed(optimizer)]
    schedulers = [_bare(s, "scheduler", torch.optim.lr_scheduler.LRScheduler) for s in _listed(scheduler)]
    return run.protect(
        _module(model), optimizers, scheduler=schedulers, **of_loader(loader, microbatches), **given
    )  # fmt: skip


def backward(step: Any, loss: Tensor) -> None:
    """As `accelerator.backward(loss)` or `fabric.backward(loss)`: `step.backward(loss)`, which Fabric is told of."""
    with _known_to_fabric():
        step.backward(loss)


@contextlib.contextmanager
def _known_to_fabric() -> Iterator[None]:
    """A model that Fabric set up refuses a backward that is not Fabric's, since a strategy might have to do more."""
    wrappers: Any = sys.modules.get("lightning.fabric.wrappers") or sys.modules.get("lightning_fabric.wrappers")
    before = getattr(wrappers, "_in_fabric_backward", None)
    if before is None:
        yield
        return
    wrappers._in_fabric_backward = True
    try:
        yield
    finally:
        wrappers._in_fabric_backward = before


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _bare(wrapped: Any, name: str, kind: type) -> Any:
    """What stands in a wrapper's attribute of that name."""
    inner = getattr(wrapped, name, None)
    theirs = type(wrapped).__module__.partition(".")[0] in _LIBRARIES  # one of the script's own does something, too
    return inner if theirs and isinstance(inner, kind) else wrapped


def _refuse_scalers(model: Any, optimizers: list[Any]) -> None:
    """Float16 without its loss scale would train something else."""
    precision = getattr(getattr(model, "_strategy", None), "precision", None)
    if any(getattr(part, "scaler", None) is not None for part in (*optimizers, precision)):
        raise ConfigError(
            "what was prepared has a gradient scaler (float16), which belongs to the library's own backward and step",
            did="nothing was trained",
            remedy="mixed_precision='bf16', or no mixed precision there, torch.autocast in the loop and "
            "protect_prepared(…, scaler=torch.amp.GradScaler())",
        )


def _module(model: Any) -> Any:
    """The module itself where Fabric put one around it, so that parameters have their own names."""
    return model.module if hasattr(model, "_original_module") else model
