"""Does a dataset keep what it has drawn? A cache of augmented samples gives the same whenever one process asks again.

Seen in two looks: who reads again draws fewer random numbers than who read first; and then, in copies of the dataset,
samples that nobody has read yet are other ones where they were read under another seed before. The first costs
nothing, and says which datasets need the second: one that seeds its own numbers by the index, or opens its files late,
passes it.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
import xxhash

from outlast.runtime.training._sample_reader import Key, ReadingRows, SampleReader
from outlast.runtime.training._workers import LostWorker, Workers
from outlast.runtime.training.random_state import random_state_kept

__all__ = ["after_another_seed", "drawn"]


def drawn() -> int:
    """A digest of the random state: how far the last read has moved it."""
    state = xxhash.xxh3_64(torch.default_generator.get_state().numpy().data)
    numpy = sys.modules.get("numpy")
    state.update(repr((random.getstate(), numpy is not None and numpy.random.get_state(legacy=False))).encode())
    return state.intdigest()


def after_another_seed(reader: SampleReader, key: Key, other: Key) -> list[Any]:
    """What a copy of the dataset gives for a key, and what one does that has read the same samples for another key
    before. Empty where no copy can be made or read: whoever reads them in earnest says why."""
    found = []
    for keys in ([key], [other, key]):
        rows = ReadingRows(1)
        worker = Workers(1, SampleReader(reader.dataset, reader.collate, rows, tolerant=False), rows, keys.__iter__)
        with random_state_kept():  # torch draws a seed for its workers
            try:
                worker.begin()
                batches = [worker.take() for _ in keys]
            except Exception:  # noqa: BLE001 - the script's own code runs in it
                return []
            finally:
                worker.drop()
        if any(isinstance(batch, LostWorker) for batch in batches):
            return []
        found.append(batches[-1])
    return found
