"""`OutlastTrainer`: Hugging Face's `Trainer` whose training outlasts its replicas. Extra: `outlast[trainers]`.

Only the loop is replaced. Optimizer, scheduler, collator, `compute_loss`, callbacks, logs and evaluation are the
Trainer's own; only the replica that writes saves, and says so to callbacks. A microbatch is one batch of
`per_device_train_batch_size` samples, a step has `gradient_accumulation_steps` of them, whoever computes them. What
would need a loop of its own (fp16, DeepSpeed, FSDP, a resume from the Trainer's checkpoints) is refused by name.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import torch

from outlast.errors import ConfigError

try:
    from transformers import Trainer
    from transformers.trainer_callback import ExportableState, TrainerState
except ImportError as error:
    raise ConfigError(
        f"Hugging Face's trainer is not there: {error}", remedy="pip install 'outlast[trainers]'"
    ) from error

__all__ = ["OutlastTrainer"]


class OutlastTrainer(Trainer):
    """A `Trainer` in a run: as `transformers.Trainer`, and `run`, what `outlast.join()` gave.

    `protect`: further arguments of `run.protect`, such as `guards`, `audit`, `checkpoint` or `state`. Raises
    ConfigError for arguments of the Trainer that this loop cannot honour, when `train` is called.
    """

    control: Any

    def __init__(self, *args: Any, run: Any, protect: Mapping[str, Any] | None = None, **given: Any) -> None:
        self.run, self._protect = run, dict(protect or {})
        self.training: Any = None
        run.device  # noqa: B018  it becomes the current one, before the Trainer moves the model there
        super().__init__(*args, **given)
        self.args._n_gpu = min(1, self.args.n_gpu)  # the other devices are other replicas'

    # --- the loop ------------------------------------------------------------------------------------------------
    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
    ) -> Any:
        _refuse(args, resume_from_checkpoint, trial)
        loader = self.get_train_dataloader()
        num_epochs, _, _, num_samples, _, _, max_steps = self.set_initial_training_values(args, loader)
        self.create_optimizer()
        self.create_scheduler(max_steps, self.optimizer)
        model = self.accelerator.prepare_model(self.model, evaluation_mode=True)  # autocast, where it is asked for
        self.model_wrapped = model
        callbacks = [*self.callback_handler.callbacks, self.control]
        self.state = TrainerState(stateful_callbacks=[c for c in callbacks if isinstance(c, ExportableState)])
        self.state.train_batch_size = self._train_batch_size
        self.state.compute_steps(args, max_steps)
        self.state.init_training_references(self, max_steps, num_epochs, trial)
        self.training = training = self._protected(model, loader)
        start, begun = time.time(), False
        self._tr_loss, self._total_loss_scalar = torch.tensor(0.0), 0.0
        for step in training.steps(until=max_steps):
            if not begun:
                begun = True
                self._begin(step.number)
            self._step(
                model,
                step,
                functools.partial(
                    self._maybe_log_save_evaluate,
                    model=model,
                    trial=trial,
                    ignore_keys_for_eval=ignore_keys_for_eval,
                    start_time=start,
                ),
            )
        self._place()
        return self._finalize_training(trial, num_samples, start)

    def _protected(self, model: torch.nn.Module, loader: Any) -> Any:
        args, given = self.args, self._protect
        wanted = {
            "global_batch_size": args.per_device_train_batch_size * args.gradient_accumulation_steps,
            "microbatches": args.gradient_accumulation_steps, "scheduler": self.lr_scheduler,
            "seed": args.seed if args.data_seed is None else args.data_seed,
            "clip_norm": args.max_grad_norm or None, "num_workers": args.dataloader_num_workers,
            "drop_last": args.dataloader_drop_last, "collate_fn": loader.collate_fn,
        }  # fmt: skip
        state = {"trainer": _Progress(self), **given.get("state", {})}
        try:
            return self.run.protect(model, self.optimizer, loader.dataset, **{**wanted, **given, "state": state})
        except ConfigError as error:
            if "cannot share" not in error.message:
                raise
            raise ConfigError(
                error.message,
                did=error.did,
                remedy="gradient_accumulation_steps=N in TrainingArguments, with N at least the number of replicas: a "
                "step has so many batches, shared by the replicas that there are",
            ) from None

    def _begin(self, number: int) -> None:
        self.state.global_step = self._initial_global_step = self._globalstep_last_logged = number
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._place()
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)

    def _place(self) -> None:
        self.state.is_world_process_zero = self.state.is_local_process_zero = self.run.is_writer

    def _step(self, model: torch.nn.Module, step: Any, then: Any) -> None:
        args, handler, size = self.args, self.callback_handler, self.training.steps_per_epoch
        self.state.global_step = step.number
        self._place()
        if step.number % size == 0:
            self.control = handler.on_epoch_begin(args, self.state, self.control)
        self.control = handler.on_step_begin(args, self.state, self.control)
        model.train()
        rate = self._get_learning_rate()
        for inputs in step:
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs)
            step.backward(loss)
            self.current_flos += float(self.floating_point_ops(inputs))
        self._tr_loss += step.loss
        self.state.global_step, self.state.epoch = step.number + 1, (step.number + 1) / size
        self.control = handler.on_step_end(args, self.state, self.control)
        then = functools.partial(then, self._tr_loss, step.grad_norm, epoch=step.epoch, learning_rate=rate)
        then()
        if (step.number + 1) % size == 0:
            self.control = handler.on_epoch_end(args, self.state, self.control)
            then()
        if self.control.should_training_stop and step.number + 1 < self.state.max_steps:
            self.training.stop("a callback of the Trainer asked for it")

    # --- what one replica does, and what all share ---------------------------------------------------------------
    def is_world_process_zero(self) -> bool:
        """Whether this replica writes; before the first step nobody does."""
        return bool(self.training is not None and self.run.is_writer)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.run.is_writer:
            super()._save_checkpoint(model, trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's; by the replica that writes. After training the others wait until it has."""
        if self.run.is_writer:
            super().save_model(output_dir, _internal_call)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """As the Trainer's. A loss alone is shared by the replicas; with `compute_metrics`, which wants all predictions
        at once, each computes all of them."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if (
            self.training is None
            or self.compute_metrics is not None
            or not hasattr(dataset, "__getitem__")
            or (isinstance(dataset, dict))
        ):
            found: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            return found
        collate = self.get_eval_dataloader(eval_dataset).collate_fn
        shared = self.training.evaluate(
            dataset, self._loss_of, batch_size=self.args.per_device_eval_batch_size, collate_fn=collate
        )
        metrics = {f"{metric_key_prefix}_loss": shared["loss"]}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _loss_of(self, inputs: Any) -> dict[str, Any]:
        with self.compute_loss_context_manager():
            return {"loss": self.compute_loss(self.model_wrapped, self._prepare_inputs(inputs)).mean()}


class _Progress:
    """What of the Trainer decides its course, and is the same on all replicas: no times, no logs."""

    _KEYS = "best_metric", "best_global_step", "best_model_checkpoint"

    def __init__(self, trainer: OutlastTrainer) -> None:
        self._trainer = trainer

    def _callbacks(self) -> dict[str, Any]:
        found = [c for c in self._trainer.callback_handler.callbacks if isinstance(c, ExportableState)]
        return {f"{number} {type(callback).__name__}": callback for number, callback in enumerate(found)}

    def state_dict(self) -> dict[str, Any]:
        kept = {key: getattr(self._trainer.state, key) for key in self._KEYS}
        attributes = {name: dict(callback.state()["attributes"]) for name, callback in self._callbacks().items()}
        return {"state": kept, "callbacks": attributes}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        for key in self._KEYS:
            setattr(self._trainer.state, key, values["state"][key])
        for name, callback in self._callbacks().items():
            for key, value in values["callbacks"].get(name, {}).items():
                setattr(callback, key, value)


def _refuse(args: Any, resume_from_checkpoint: Any, trial: Any) -> None:
    """ConfigError for what this loop does not do, with what to write instead."""
    wrong: list[tuple[Any, str, str]] = [
        (args.fp16, "fp16=True needs a gradient scaler", "bf16=True, which needs none"),
        (getattr(args, "deepspeed", None), "deepspeed shards what outlast keeps whole on each replica", "leave it out"),
        (getattr(args, "fsdp", None), "fsdp shards what outlast keeps whole on each replica", "leave it out"),
        (args.auto_find_batch_size, "auto_find_batch_size would make another run of this one", "a fixed batch size"),
        (resume_from_checkpoint, "resume_from_checkpoint reads the Trainer's checkpoints, which do not hold the place "
         "in the data", "outlast run --checkpoint-dir DIR: the run goes on from there by itself"),
        (trial, "a hyperparameter search starts many trainings in one process", "one run for each trial"),
        (getattr(args, "neftune_noise_alpha", None), "neftune_noise_alpha hooks the loop", "leave it out"),
    ]  # fmt: skip
    for given, what, remedy in wrong:
        if given:
            raise ConfigError(f"OutlastTrainer: {what}", did="nothing was trained", remedy=remedy)
