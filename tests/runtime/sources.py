"""Sources of libraries that give the numbers below `size`, in an order of the library's own: what `protect` is handed.

A library that is not installed skips the test that asks for it.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

__all__ = ["LIBRARIES", "LOOSE", "SOURCES"]

Source = Callable[[int, Path], Any]


def _library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not there: make trainers-env installs it")


def _table(size: int) -> Any:
    return _library("datasets").Dataset.from_dict({"n": list(range(size))}).with_format("torch")


def _rows(size: int, _: Path) -> Any:
    return _table(size).map(lambda row: {"n": row["n"] + 0}, load_from_cache_file=False)


def _streamed(size: int, _: Path) -> Any:
    return _table(size).to_iterable_dataset(num_shards=3).shuffle(seed=3, buffer_size=8)


class _Numbers:
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> dict[str, int]:
        return {"n": int(index)}


def _mapped(size: int, _: Path) -> Any:
    return _library("grain").MapDataset.source(_Numbers(size)).shuffle(seed=5)


def _window(size: int, _: Path) -> Any:
    grain = _library("grain")
    kept = grain.MapDataset.source(_Numbers(size)).to_iter_dataset()
    return grain.experimental.WindowShuffleIterDataset(kept, window_size=8, seed=4)


def _grain_loader(size: int, _: Path) -> Any:
    grain = _library("grain")
    order = grain.samplers.IndexSampler(size, grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=3)
    return grain.DataLoader(data_source=_Numbers(size), sampler=order, worker_count=0)


def _shards(size: int, folder: Path) -> str:
    """Three archives of WebDataset's; written once, whoever asks."""
    for shard in range(3):
        part = folder / f"{shard}.{os.getpid()}.part"
        with tarfile.open(part, "w") as archive:
            for number in range(shard, size, 3):
                told = str(number).encode()
                info = tarfile.TarInfo(f"{number:06d}.txt")
                info.size = len(told)
                archive.addfile(info, io.BytesIO(told))
        part.rename(folder / f"{shard}.tar")
    return str(folder / "{0..2}.tar")


def _number(sample: dict[str, Any]) -> dict[str, int]:
    return {"n": int(sample["txt"])}


def _archives(size: int, folder: Path) -> Any:
    read = _library("webdataset").WebDataset(_shards(size, folder), shardshuffle=3, seed=1)
    return read.shuffle(8, seed=2).decode().map(_number)


def _loose(size: int, folder: Path) -> Any:
    return _library("webdataset").WebDataset(_shards(size, folder), shardshuffle=3).shuffle(8).decode().map(_number)


def _archives_loaded(size: int, folder: Path) -> Any:
    return torch.utils.data.DataLoader(_archives(size, folder), batch_size=2)


SOURCES: dict[str, Source] = {
    "datasets, with numbers": _rows,
    "datasets, streamed": _streamed,
    "grain, with numbers": _mapped,
    "grain, streamed": _window,
    "grain's loader": _grain_loader,
    "webdataset": _archives,
    "webdataset in a loader": _archives_loaded,
}
LIBRARIES = {"datasets": "datasets, streamed", "grain": "grain, streamed", "webdataset": "webdataset"}
"""Whose stream stands for a library in fleets."""
LOOSE = _loose
"""Shuffled by the clock and the process's number, which is WebDataset's default."""
