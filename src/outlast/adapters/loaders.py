"""What a `DataLoader` says of a training: which samples, in what order, how many make a batch.

Invariant: what decides the samples, their order or their values and cannot be honoured is refused by name. What only
says how they are fetched (`pin_memory`, `timeout`, `prefetch_factor`) is not taken over. Does not read a sample.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from outlast.errors import ConfigError

__all__ = ["is_read_whole", "of_loader", "protect_arguments"]


def of_loader(loader: Any, microbatches: int) -> dict[str, Any]:
    """Return arguments of `run.protect` that train on what a DataLoader loads: `run.protect(model, optimizer,
    **of_loader(loader, microbatches=8))`. Its batch is one microbatch. Raises ConfigError as `protect_arguments`."""
    dataset, given = protect_arguments(loader, microbatches)
    return {"dataset": dataset, **given}


def protect_arguments(loader: Any, microbatches: int) -> tuple[Any, dict[str, Any]]:
    """Return (dataset, arguments of `run.protect`) for a loader whose batch is one microbatch of a step of so many.

    Raises ConfigError for a loader whose batches outlast could not make again in another process.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"the training data is a {type(loader).__name__}, and outlast takes one torch DataLoader",
            remedy="a DataLoader of one dataset; put several together in the dataset",
        )
    if loader.batch_size is None:
        raise ConfigError(
            "the training DataLoader has no batch_size, or a batch_sampler of its own",
            remedy="DataLoader(dataset, batch_size=…), with sampler= for an order of your own",
        )
    given: dict[str, Any] = {"global_batch_size": loader.batch_size * microbatches, "microbatches": microbatches}
    given |= {"drop_last": loader.drop_last}
    dataset = loader.dataset
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")) or hasattr(loader, "state_dict"):
        return loader, given  # a stream: the loader itself is read, by each replica
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        raise ConfigError(
            f"the training DataLoader's batches are made by a {type(loader.batch_sampler).__name__}",
            remedy="give the order of samples with sampler=; batches of it are made by outlast",
        )
    _refuse_randomness(loader)
    given |= {"collate_fn": loader.collate_fn, "num_workers": loader.num_workers}
    return dataset, given | _order(loader.sampler, len(dataset))


def _refuse_randomness(loader: DataLoader[Any]) -> None:
    init: Any = getattr(loader.worker_init_fn, "func", loader.worker_init_fn)
    if init is not None and not str(getattr(init, "__module__", "")).startswith(("lightning.", "transformers.")):
        raise ConfigError(
            "the training DataLoader has a worker_init_fn, which would not be called",
            remedy="leave it out: random numbers in a dataset are seeded by the step and the microbatch; open files at "
            "the first __getitem__",
        )
    if loader.generator is not None:
        raise ConfigError(
            "the training DataLoader has a generator, whose numbers another process could not draw again",
            remedy="leave it out, and give protect(seed=…), which decides the order",
        )


def _order(sampler: Any, size: int) -> dict[str, Any]:
    if type(sampler) is SequentialSampler:
        return {"shuffle": False}
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == size:
        return {"shuffle": True}
    return {"sampler": sampler}


def is_read_whole(dataset: Any) -> bool:
    """Whether `protect_arguments` gave a stream, which every replica reads whole."""
    return isinstance(dataset, DataLoader)
