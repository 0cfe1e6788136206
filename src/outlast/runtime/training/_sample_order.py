"""The order of samples in an epoch, as a function: (seed, epoch, place) -> index. It needs no list of them.

Up to `LISTED` samples it is torch's random permutation, every one equally likely, in 8 bytes a sample. Beyond, where
that would take gigabytes and seconds, it is a keyed permutation computed where it is asked for: a Feistel network over
the next power of two, walked until the result is a sample (Black and Rogaway 2002, "Ciphers with arbitrary finite
domains"). Integers only, so it is the same everywhere. Does not know steps or microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["LISTED", "SampleOrder", "permuted"]

LISTED = 1 << 22
"""More samples are permuted by the function. Part of what a checkpoint means: changing it changes the data's order."""

_ROUNDS = 16  # with 8 places, or with 5000, no preference of a place for an index is seen; with 8 rounds it is
_AT_ONCE = 4096

Words = npt.NDArray[np.uint64]


class SampleOrder:
    """Puts `num` samples in the order of their numbers, or shuffles them anew each epoch."""

    def __init__(self, num: int, shuffle: bool) -> None:
        self._num, self._shuffle = num, shuffle
        self._found: tuple[tuple[int, int], list[int]] = ((-1, -1), [])  # what was asked for last, and around it
        self._listed: tuple[int, torch.Tensor] = (-1, torch.empty(0, dtype=torch.int64))

    @property
    def name(self) -> str:
        """How samples are put in order, for a run's facts."""
        return "keyed" if self._shuffle and self._num > LISTED else "listed"

    def indices(self, seed: int, start: int, count: int) -> list[int]:
        """The samples at `count` places from `start` on, in the epoch of this seed."""
        if not self._shuffle:
            return list(range(start, start + count))
        if self._num > LISTED:
            return [self._at(seed, place) for place in range(start, start + count)]
        if self._listed[0] != seed:
            generator = torch.Generator().manual_seed(seed)
            self._listed = (seed, torch.randperm(self._num, generator=generator))
        found: list[int] = self._listed[1][start : start + count].tolist()
        return found

    def _at(self, seed: int, place: int) -> int:
        number, offset = divmod(place, _AT_ONCE)
        if self._found[0] != (seed, number):
            first = number * _AT_ONCE
            places = range(first, min(first + _AT_ONCE, self._num))
            self._found = ((seed, number), permuted(places, self._num, seed))
        return self._found[1][offset]


def permuted(places: Sequence[int], num: int, key: int) -> list[int]:
    """Where a permutation of 0 … num-1, chosen by the key (of 64 bits), puts these places."""
    bits = max(2, (num - 1).bit_length())
    found = np.asarray(places, dtype=np.uint64)
    outside = np.ones(len(found), dtype=bool)
    while outside.any():  # the network permutes a power of two: less than twice as many, so two walks on average
        found[outside] = _network(found[outside], bits, key)
        outside = found >= np.uint64(num)
    indices: list[int] = found.tolist()
    return indices


def _network(words: Words, bits: int, key: int) -> Words:
    """An unbalanced Feistel network: each round mixes one half with a function of the other, in turn."""
    low = bits // 2
    high = bits - low
    left, right = words >> np.uint64(low), words & np.uint64((1 << low) - 1)
    sizes = np.uint64((1 << high) - 1), np.uint64((1 << low) - 1)
    for number in range(0, _ROUNDS, 2):
        left = left ^ (_mixed(right, key, number) & sizes[0])
        right = right ^ (_mixed(left, key, number + 1) & sizes[1])
    return (left << np.uint64(low)) | right


def _mixed(words: Words, key: int, number: int) -> Words:
    """SplitMix64's finaliser (Steele et al. 2014), of a word that the key and the round's number have been added to."""
    with np.errstate(over="ignore"):
        mixed = (words + np.uint64(number + 1)) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(key)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
