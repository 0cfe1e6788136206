"""What the loop of `OutlastStrategy` cannot honour, each refused in one sentence with what to write instead.

Does not train; `adapters/lightning.py` asks it before and between steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from outlast.errors import ConfigError

__all__ = [
    "asked_too_early", "in_lightnings_words", "loss_of", "plain", "refuse", "refuse_skipped", "steps_of_an_epoch",
]  # fmt: skip

_GRADIENT_HOOKS = {
    "on_before_optimizer_step": "log trainer.strategy.grad_norm in on_train_batch_end",
    "configure_gradient_clipping": "Trainer(gradient_clip_val=…)",
    "backward": "leave it out: outlast does the backward of each microbatch",
    "optimizer_zero_grad": "leave it out: gradients are cleared by outlast",
}


def refuse(trainer: pl.Trainer) -> None:
    """ConfigError for what this loop does not do, with what to write instead."""
    module, callbacks = trainer.lightning_module, trainer.callbacks
    summed = "wants gradients, which outlast keeps until they are summed up"
    wrong: list[tuple[Any, str, str]] = [
        (not module.automatic_optimization, "automatic_optimization=False keeps the gradients in the module's hands",
         "outlast's own loop (reference/loop): several optimizers and several losses are one step there"),
        (trainer.ckpt_path, "fit(ckpt_path=…) reads Lightning's checkpoints, which do not hold the place in the data",
         "outlast run --checkpoint-dir DIR: the run goes on from there by itself"),
        (trainer.gradient_clip_algorithm == "value", "gradient_clip_algorithm='value' clips by value",
         "gradient_clip_algorithm='norm'"),
        (trainer.strategy.run._env.width > 1, "a replica of several ranks is not known to Lightning",
         "outlast run without --ranks, or outlast's own loop"),
        (trainer.overfit_batches, "overfit_batches replaces the order of the data", "a dataset of so many samples"),
        (trainer.max_steps < 0 and trainer.fit_loop.max_epochs == -1, "the training has no end",
         "max_epochs or max_steps"),
        (len(callbacks) != len({c.state_key for c in callbacks}), "two callbacks have the same state_key",
         "give one of them other arguments, or a state_key of its own"),
        (any(isinstance(c, GradientAccumulationScheduler) for c in callbacks),
         "GradientAccumulationScheduler changes the size of a step", "Trainer(accumulate_grad_batches=N)"),
    ]  # fmt: skip
    averaging = ("StochasticWeightAveraging", "WeightAveraging")
    wrong += [
        (any(base.__name__ in averaging for base in type(c).__mro__),
         f"{type(c).__name__} keeps averaged weights where replicas that join cannot get them",
         "leave it out, or average in a module that is given to protect={'state': {…}}")
        for c in callbacks
    ]  # fmt: skip
    wrong += [
        (is_overridden(hook, module), f"{hook} of the module {summed}", to) for hook, to in _GRADIENT_HOOKS.items()
    ]
    hook = "on_before_optimizer_step"
    wrong += [
        (is_overridden(hook, c, Callback), f"{hook} of {type(c).__name__} {summed}", "leave it out") for c in callbacks
    ]
    for given, what, remedy in wrong:
        if given:
            raise ConfigError(f"OutlastStrategy: {what}", did="nothing was trained", remedy=remedy)


def asked_too_early() -> ConfigError:
    """Return the error for training data that are asked for before there is an optimizer."""
    return ConfigError(
        "trainer.estimated_stepping_batches was read in configure_optimizers, and the training data come under "
        "protection with the optimizer only",
        did="nothing was trained",
        remedy="give Trainer(max_steps=…) and read trainer.max_steps, or give the module the number of steps",
    )


def steps_of_an_epoch(trainer: pl.Trainer, size: int | None) -> int:
    """Return how many steps Lightning's epoch has; `size`: those of a pass over the data, None for a stream."""
    limit = trainer.limit_train_batches
    if size is None:  # one epoch of a stream is all of it that is trained with
        if trainer.max_steps < 0:
            raise ConfigError("the training data are a stream, whose end is not known", remedy="Trainer(max_steps=…)")
        if isinstance(limit, float) and limit != 1.0:
            raise ConfigError("limit_train_batches is a part of a stream", remedy="a number of steps, or max_steps")
        size = trainer.max_steps
    steps = min(size, limit) if isinstance(limit, int) else int(size * limit)
    if steps < 1:
        raise ConfigError(
            f"limit_train_batches={limit} leaves no step of an epoch of {size}",
            did="nothing was trained",
            remedy="a greater part, or a number of steps; a step has accumulate_grad_batches batches",
        )
    return steps


def refuse_skipped(given: int, computed: int) -> None:
    """Raise ConfigError where Lightning was given a step and did not train with it."""
    if given != computed:
        raise ConfigError(
            f"step {given} was skipped: on_train_batch_start returned -1, or optimizer_step did not call its closure",
            did="nothing of this step was applied",
            remedy="shorten an epoch with limit_train_batches, or end training with trainer.should_stop = True",
        )


def plain(name: str, key: str, given: Any) -> Any:
    if given is None or isinstance(given, bool | str | int | float):
        return given
    if getattr(given, "__name__", "") in ("mean", "sum", "min", "max"):
        return str(given.__name__)
    raise ConfigError(
        f"self.log({name!r}, {key}=…) in training_step was given a {type(given).__name__}",
        remedy=f"leave {key} out, or give it as a word or a number",
    )


def loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"training_step returned {'None' if loss is None else type(loss).__name__} in the place of a loss",
            did="nothing of this step was applied",
            remedy="return the loss; for a batch that should not count 0.0 * loss",
        )
    return loss


def in_lightnings_words(error: ConfigError) -> ConfigError:
    if "cannot share" not in error.message:
        return error
    return ConfigError(
        error.message,
        did=error.did,
        remedy="Trainer(accumulate_grad_batches=N), with N at least the number of replicas: a step has so many "
        "batches, shared by the replicas that there are",
    )
