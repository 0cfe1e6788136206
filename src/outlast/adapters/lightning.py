"""`OutlastStrategy`: Lightning's `Trainer` as it is, whose training outlasts its replicas. Extra: `outlast[lightning]`.

One batch of Lightning's loop is one step of the run: what its loader gives is a `Step`, and the strategy's
`training_step` goes through the microbatches of it, this replica's and those of the dead. So hooks, callbacks,
validation, schedulers and saves are Lightning's own, done once a step, on every replica; only one writes. A microbatch
is one batch of the user's DataLoader, a step has `accumulate_grad_batches` of them, whoever computes them.

Who joins or resumes comes in at a step's number: Lightning's counters are set to it, and what callbacks keep for a
checkpoint, metrics of the epoch and the newest values that callbacks watch come with the state. What would need
gradients in the loop's hands (manual optimization, clipping of one's own) is refused by name.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import outlast
from outlast.adapters.loaders import is_read_whole, protect_arguments
from outlast.errors import ConfigError, StepMisuse

try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint, Timer
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.loggers.utilities import _log_hyperparams
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer import call
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    from outlast.adapters import _lightning_refusals as refusals
except ImportError as error:
    raise ConfigError(f"Lightning is not there: {error}", remedy="pip install 'outlast[lightning]'") from error

__all__ = ["OutlastStrategy"]


class OutlastStrategy(SingleDeviceStrategy):
    """A strategy for `Trainer(strategy=OutlastStrategy())`. `run`: what `outlast.join()` gave, if the script has it.

    `protect`: further arguments of `run.protect`, such as `guards`, `audit`, `checkpoint`, `seed` or `state`. After a
    step `grad_norm` is its gradient's norm before clipping. Raises ConfigError, when `fit` is called, for what this
    loop cannot honour.
    """

    strategy_name = "outlast"

    def __init__(self, run: Any = None, *, protect: Mapping[str, Any] | None = None, **given: Any) -> None:
        self.run = outlast.join() if run is None else run
        super().__init__(device=self.run.device, **given)
        self._protect = dict(protect or {})
        self.training: Any = None
        self.grad_norm: float | None = None
        self._steps: _Steps | None = None
        self._over = False  # training has ended, the script has not
        self._leads: bool | None = None

    # --- who writes ----------------------------------------------------------------------------------------------
    @property
    def is_global_zero(self) -> bool:
        """Whether this replica writes; before the first step nobody does."""
        if self._over:
            return bool(self.run.is_writer)
        with contextlib.suppress(StepMisuse):
            return bool(self.run.leads)
        return False

    def _place(self, number: int) -> None:
        """Take up the writing, or leave it, with the view."""
        leads = bool(self.run.leads)
        rank_zero_only.rank = 0 if leads else 1
        if leads and not self._leads:
            for logger in self._trainer.loggers if number else []:
                if type(logger) is CSVLogger:  # it begins by deleting what is there
                    logger._version = f"{logger.version}-from-{number}"
            if self._trainer.enable_autolog_hparams:
                _log_hyperparams(self._trainer)
        self._leads = leads

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """In the loop, what one replica says, on all of them; it is for yes or no."""
        if not isinstance(obj, bool) or self._steps is None or not self._steps.open:
            return obj
        said = self.training.evaluate([0], lambda _: {"said": torch.tensor(float(obj))}, batch_size=1)
        return bool(said["said"])

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """As one replica decides; what decides is the same on all of them."""
        return bool(self.broadcast(bool(decision)))

    # --- setting up ----------------------------------------------------------------------------------------------
    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def setup_environment(self) -> None:
        """Agree on names of files before anybody looks what is there."""
        super().setup_environment()
        run_id = os.environ.get("OUTLAST_RUN", "")
        with contextlib.suppress(StepMisuse):
            rank_zero_only.rank = 0 if self.run.leads else 1
        for logger in self._trainer.loggers:
            if run_id and getattr(logger, "_version", "") is None:
                logger._version = run_id
        for callback in self._trainer.callbacks:
            if isinstance(callback, ModelCheckpoint):
                callback.file_exists = lambda *_: False  # one name is one step: the same

    def setup(self, trainer: pl.Trainer) -> None:
        """Sets up as on a single device. Raises ConfigError for what this loop cannot honour."""
        if trainer.state.fn == "fit":
            refusals.refuse(trainer)
        super().setup(trainer)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Put the training under protection, where the loader is that of the training."""
        trainer = self._trainer
        if not trainer.training or trainer.state.fn != "fit":
            return dataloader
        if self.training is not None:
            raise ConfigError(
                "Lightning asked for the training data a second time",
                remedy="one fit() in a run, one training loader, and no reload_dataloaders_every_n_epochs",
            )
        if not self.optimizers:
            raise refusals.asked_too_early()
        microbatches, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, 1
        dataset, given = protect_arguments(dataloader, microbatches)
        given["seed"] = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        given["clip_norm"] = trainer.gradient_clip_val or None
        given["scaler"] = getattr(self.precision_plugin, "scaler", None)
        given = {**given, **self._protect}
        own = _Course(trainer)
        state = {"lightning": own, **given.pop("state", {})}
        try:
            self.training = self.run.protect(self.model, self.optimizers, dataset, state=state, **given)
        except ConfigError as error:
            raise refusals.in_lightnings_words(error) from None
        size = None if is_read_whole(dataset) else self.training.steps_per_epoch
        order: Any = given.get("sampler", dataset)
        total = 0 if size is None else len(order) if hasattr(order, "__len__") else len(dataset)
        _pass_steps_through(self.lightning_module)
        self._steps = _Steps(self, size, total, given["global_batch_size"], own)
        return self._steps

    # --- the loop ------------------------------------------------------------------------------------------------
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """As ever; a step is no data."""
        return batch if isinstance(batch, outlast.Step) else super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """All microbatches of the step that fall to this replica, until the step is committed."""
        step, *rest = args
        steps, module = self._steps, self.lightning_module
        assert steps is not None
        assert module is not None
        steps.own.logged = {}
        with steps.own.logging_into(step, module):
            for batch in step:
                batch = self.precision_plugin.convert_input(batch)
                batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
                batch = super().batch_to_device(batch, dataloader_idx=0)
                loss = refusals.loss_of(super().training_step(batch, *rest, **kwargs))
                call._call_callback_hooks(self._trainer, "on_before_backward", loss)
                call._call_lightning_module_hook(self._trainer, "on_before_backward", loss)
                step.backward(loss)
                call._call_callback_hooks(self._trainer, "on_after_backward")
                call._call_lightning_module_hook(self._trainer, "on_after_backward")
        self.grad_norm, steps.computed = step.grad_norm, step.number
        steps.own.log(step, module, steps.samples(step.number))
        return torch.tensor(step.loss, device=self.root_device)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Done, microbatch by microbatch."""
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """The step was taken when its microbatches were through."""
        return closure()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """As ever, and a sign of life."""
        outlast.pause(0)
        return super().validation_step(*args, **kwargs)

    def on_train_end(self) -> None:
        """The loop is over on all replicas: after the last step, or after the same one before it."""
        if self._steps is not None:
            self._steps.leave()
            rank_zero_only.rank = 0 if self._leads else 1
        self._over = True
        self.lightning_module.__dict__.pop("_on_before_batch_transfer", None)
        super().on_train_end()


class _Steps:
    """The loader that Lightning loops over: steps still to be done. `size`: of an epoch, None for a stream."""

    def __init__(self, strategy: OutlastStrategy, size: int | None, total: int, batch: int, own: _Course) -> None:
        self._strategy, self._pass, self._total, self._batch, self.own = strategy, size, total, batch, own
        trainer = strategy._trainer
        self.size = refusals.steps_of_an_epoch(trainer, size)
        trainer.limit_train_batches = 1.0  # it is in the size
        epochs = trainer.fit_loop.max_epochs
        self.until = min(n for n in (trainer.max_steps, epochs and epochs * self.size) if n is not None and n >= 0)
        self._loop: Any = _driven(strategy.training, self.until)
        self._last = -1
        self.computed = -1  # the newest step that Lightning trained with
        self.open = False  # a step is under way, or what follows it

    def __len__(self) -> int:
        return int(self.size)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.size):  # of one epoch
            refusals.refuse_skipped(self._last, self.computed)
            step = next(self._loop, None)
            if step is None:
                self._end()
                return
            self.open = True
            self._strategy._place(step.number)
            if self._last < 0 and step.number:
                self._move(step.number)
            self._last = step.number
            yield step
            if (step.number + 1) % self.size == 0:
                return

    def samples(self, number: int) -> int:
        """How many are in a step; of a stream, as many as in each other."""
        if self._pass is None:
            return self._batch
        return min(self._batch, self._total - number % self._pass * self._batch)

    def _move(self, number: int) -> None:
        """Set Lightning's counters to this step: the run has come so far without this process."""
        trainer = self._strategy._trainer
        fit, (epoch, place) = trainer.fit_loop, divmod(number, self.size)
        epochs, batches = fit.epoch_progress, fit.epoch_loop.batch_progress
        for counter, done, more in ((epochs.total, epoch, 1), (epochs.current, epoch, 1), (batches.total, number, 0)):
            counter.ready = counter.started = done + more
            counter.processed = counter.completed = done
        batches.current.ready = batches.current.started = batches.current.processed = batches.current.completed = place
        taken = fit.epoch_loop.automatic_optimization.optim_progress.optimizer
        taken.step.total.ready = taken.step.total.completed = number
        taken.step.current.ready = taken.step.current.completed = place
        fit.epoch_loop._batches_that_stepped = number
        assert fit._data_fetcher is not None
        fit._data_fetcher.fetched = place
        if place == 0:  # nobody has begun this epoch
            call._call_callback_hooks(trainer, "on_train_epoch_start")
            call._call_lightning_module_hook(trainer, "on_train_epoch_start")

    def _end(self) -> None:
        """There is no further step: the run was complete, or somebody asked it to stop."""
        trainer = self._strategy._trainer
        if self._last < 0:
            self._move(self.until)
        trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = 0, None
        trainer.should_stop = True

    def leave(self) -> None:
        """Lightning asks for no further step."""
        refusals.refuse_skipped(self._last, self.computed)
        with contextlib.suppress(StopIteration):
            if self._last + 1 >= self.until or self._last < 0:
                next(self._loop)
            else:
                self._loop.send("leave")
        self.open = False


def _driven(training: Any, until: int) -> Iterator[Any]:
    """Steps; sent anything, it leaves the loop as a `break` does."""
    for step in training.steps(until=until):
        if (yield step) is not None:
            break


class _Course:
    """What of Lightning's loop decides its course or its metrics, and is the same on all replicas: registered state."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.logged: dict[str, dict[str, Any]] = {}
        self._known: dict[str, dict[str, Any]] = {}  # how each metric is logged
        self._sums: dict[str, dict[str, Any]] = {}  # of the epoch so far, which this process has not seen

    def _callbacks(self) -> dict[str, Any]:
        found = self._trainer.callbacks
        return {c.state_key: c for c in found if not isinstance(c, Timer) and c.state_dict()}

    def _results(self) -> Any:
        return self._trainer.fit_loop.epoch_loop._results

    def state_dict(self) -> dict[str, Any]:
        sums = {
            name: {key: getattr(found, key).clone() for key in ("value", "cumulated_batch_size") if hasattr(found, key)}
            for name, found in self._results().items()
            if found.meta.on_epoch and found.is_tensor and not found.has_reset
        }
        newest = self._trainer._logger_connector._callback_metrics
        return {
            "callbacks": {key: callback.state_dict() for key, callback in self._callbacks().items()},
            "logged": self._known, "sums": sums, "newest": {key: value.clone() for key, value in newest.items()},
        }  # fmt: skip

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        callbacks = {c.state_key: c for c in self._trainer.callbacks}
        for key, kept in values["callbacks"].items():
            if key in callbacks:
                _load(callbacks[key], kept)
        self._known = {name: dict(how) for name, how in values["logged"].items()}
        self._sums = {name: dict(kept) for name, kept in values["sums"].items()}
        self._trainer._logger_connector._callback_metrics.update(values["newest"])

    # --- self.log ------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def logging_into(self, step: Any, module: Any) -> Iterator[None]:
        """What `training_step` logs of its microbatch becomes a metric of the step."""

        def log(name: str, value: Any, *args: Any, **how: Any) -> None:
            if args:
                how = {**dict(zip(("prog_bar", "logger", "on_step", "on_epoch"), args, strict=False)), **how}
            if hasattr(value, "compute"):
                raise ConfigError(
                    f"self.log({name!r}, …) in training_step was given a {type(value).__name__}, which has seen the "
                    "microbatches of this replica only",
                    did="nothing of this step was applied",
                    remedy=f"log the number of this batch, self.log({name!r}, self.metric(…)): it becomes the mean "
                    "over the whole batch",
                )
            step.metric(name, value.detach() if isinstance(value, Tensor) else value, how.pop("batch_size", None))
            self._known[name] = {key: refusals.plain(name, key, given) for key, given in how.items()}

        module.__dict__["log"] = log
        try:
            yield
        finally:
            del module.__dict__["log"]

    def log(self, step: Any, module: Any, num_samples: int) -> None:
        """The step is committed: log its metrics, the same on every replica."""
        for name, value in step.metrics.items():
            if name in self._known:
                module.log(name, torch.tensor(value), batch_size=num_samples, **self._known[name])
        if self._sums:
            self._add_up()

    def _add_up(self) -> None:
        """Put to the epoch's metrics what was seen of it before this process came in."""
        results = self._results()
        for name, kept in self._sums.items():
            found = results.get(name)
            if found is None:
                continue
            if found.meta.is_max_reduction or found.meta.is_min_reduction:
                found.value = found.meta.reduce_fx(kept["value"], found.value)
            else:
                found.value = kept["value"] + found.value
                if "cumulated_batch_size" in kept:
                    found.cumulated_batch_size = kept["cumulated_batch_size"] + found.cumulated_batch_size
        self._sums = {}


def _load(callback: Any, kept: Mapping[str, Any]) -> None:
    """Give a callback its state, also what it says in it and does not take back (`current_score`)."""
    callback.load_state_dict(dict(kept))
    for key, value in callback.state_dict().items():
        wanted = kept.get(key, value)
        if not _alike(value, wanted) and hasattr(callback, key):
            setattr(callback, key, wanted)


def _alike(one: Any, other: Any) -> bool:
    """Compare states, also those that hold tensors in lists and dictionaries."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


def _pass_steps_through(module: Any) -> None:
    """Hand the hook before the transfer batches, and no steps: those hold the batches that it gets one by one."""
    hook = type(module)._on_before_batch_transfer

    def before(batch: Any, dataloader_idx: int = 0) -> Any:
        return batch if isinstance(batch, outlast.Step) else hook(module, batch, dataloader_idx)

    module.__dict__["_on_before_batch_transfer"] = before
