"""Do replicas hold the same state? A part of it is fingerprinted each step, all of it in `num_parts` steps.

The state is cut once, by elements of the parameters: part p of step s is s mod num_parts, and holds its share of the
elements of all parameters (every element of those that are watched always), together with the same elements of the
optimizer's moments. So the cost a step is 1/num_parts of reading the state, whatever the sizes of its tensors. It
compares nothing: fingerprints travel in headers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from outlast.runtime.training.state import State
from outlast.tensors import BLOCK, combine, fingerprint, fingerprint_all, local

__all__ = ["Agreement"]

Piece = tuple[int, int, int]  # parameter, first element, end


class Agreement:
    """Fingerprints the state a part at a time, another part in each step. `num_parts` 0: nothing is ever
    fingerprinted."""

    def __init__(self, state: State, num_parts: int) -> None:
        self.state, self.num_parts = state, num_parts
        self._pieces = self._cut(frozenset())

    def always(self, indices: frozenset[int]) -> None:
        """These parameters belong to every part: they are compared in every step."""
        self._pieces = self._cut(indices)

    def _cut(self, always: frozenset[int]) -> list[list[Piece]]:
        sizes = [local(param).numel() for param in self.state.params]
        turns = _cut([0 if index in always else size for index, size in enumerate(sizes)], self.num_parts)
        return [[*((index, 0, sizes[index]) for index in sorted(always)), *part] for part in turns]

    def fingerprint(self, step: int) -> tuple[int, int]:
        """(part, fingerprint) of the state as it is before `step`."""
        if not self.num_parts:
            return 0, 0
        part = step % self.num_parts
        rows = list(self._values(part))
        return part, fingerprint_all([piece for _, piece, _ in rows], [key for _, _, key in rows])

    def rows(self, step: int) -> tuple[tuple[str, int], ...]:
        """One fingerprint for each tensor of the step's part, to name what differs."""
        found: dict[str, int] = {}
        for name, piece, key in self._values(step % self.num_parts):
            found[name] = combine([found.get(name, 0), fingerprint(piece, key)])
        return tuple(found.items())

    def _values(self, part: int) -> Iterator[tuple[str, Tensor, int]]:
        """(name, values, the key of their fingerprint) of each piece."""
        for index, lo, hi in self._pieces[part]:
            name = self.state.names[index]
            for number, (kind, tensor) in enumerate(self._tensors(index)):
                flat = tensor.detach().reshape(-1)
                piece = flat[lo:hi] if flat.numel() == local(self.state.params[index]).numel() else flat
                yield f"{name}{kind}", piece, (index << 40) + (number << 32) + lo // BLOCK

    def _tensors(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """The parameter and what optimizers keep for it."""
        param = self.state.params[index]
        yield "", local(param)
        for optimizer in self.state.optimizers:
            for key, value in (optimizer.state.get(param) or {}).items():
                if isinstance(value, torch.Tensor):
                    yield f".{key}", local(value)


def _cut(sizes: list[int], num_parts: int) -> list[list[Piece]]:
    """Each part's pieces: equal numbers of blocks, in the parameters' order."""
    blocks = [(index, lo, min(lo + BLOCK, size)) for index, size in enumerate(sizes) for lo in range(0, size, BLOCK)]
    total = sum(sizes)
    parts: list[list[Piece]] = [[] for _ in range(num_parts)]
    at = 0
    for block in blocks if num_parts else ():
        parts[min(num_parts - 1, at * num_parts // max(1, total))].append(block)
        at += block[2] - block[1]
    return parts
