"""A state that can be gone back to. One interface, whether it lies in memory or in a generation on disk.

`InMemory` keeps one copy beside the live state and costs its size once more. It is part of the training state itself,
so joiners receive it and every member goes back to the same bits. It does not decide when to keep or to go back.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from outlast.errors import StateDiverged
from outlast.runtime.training.state import State
from outlast.tensors import combine, fingerprint_named, like, local, part_of

__all__ = ["CertifiedState", "InMemory"]


class CertifiedState(Protocol):
    """`step`: the step before which the kept state stood; -1 if there is none."""

    @property
    def step(self) -> int: ...
    def keep(self, state: State, step: int) -> None: ...
    def restore(self, state: State) -> int: ...


class InMemory:
    """Keeps certified states in memory, to go back to. `without`: the key of registered state that is not kept (the
    keeper's own)."""

    def __init__(self, without: str) -> None:
        self._without = without
        self._step, self._fingerprint, self._plain = -1, 0, b""
        self._tensors: dict[str, Tensor] = {}

    @property
    def step(self) -> int:
        return self._step

    def fingerprint(self, state: State) -> int:
        """A 64-bit fingerprint of the live state, without the keeper's own part."""
        import xxhash

        plain, tensors = state.encoded(without=self._without)
        return combine([fingerprint_named(tensors.items()), xxhash.xxh3_64_intdigest(plain)])

    def keep(self, state: State, step: int) -> None:
        """Copy the live state; buffers are used again, so the copy costs memory traffic and no allocation. Of
        shards the copies are shards, so that a checkpoint holds the whole."""
        self._plain, tensors = state.encoded(without=self._without)
        spread = state.spread(without=self._without)
        with torch.no_grad():
            for name, tensor in tensors.items():
                mine = self._tensors.get(name)
                if mine is not None and local(mine).shape == tensor.shape and mine.dtype == tensor.dtype:
                    local(mine).copy_(tensor)
                else:
                    self._tensors[name] = like(tensor.detach().clone(), spread.get(name, tensor))
        self._tensors = {name: self._tensors[name] for name in tensors}
        self._step, self._fingerprint = step, self._of_copy()

    def restore(self, state: State) -> int:
        """The live state becomes the kept one. StateDiverged if the copy is not what was kept."""
        if self._of_copy() != self._fingerprint:
            raise StateDiverged(
                f"the certified state of step {self._step} is not what was kept",
                did="nothing was restored",
                remedy="test the memory of this machine",
            )
        state.load(self._plain, {name: local(tensor).clone() for name, tensor in self._tensors.items()})
        return self._step

    def _of_copy(self) -> int:
        return fingerprint_named((name, local(tensor)) for name, tensor in self._tensors.items())

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "plain": self._plain, "tensors": dict(self._tensors)}

    def load_state_dict(self, values: dict[str, Any], state: State) -> None:
        """Take values back; of the whole of something that is a shard in `state`, what lies here is taken."""
        self._step, self._plain = values["step"], values["plain"]
        spread, self._tensors = state.spread(without=self._without), {}
        for name, tensor in values["tensors"].items():
            held, param = local(tensor), spread.get(name, tensor)
            self._tensors[name] = like(part_of(held, param).clone(), param)
        self._fingerprint = self._of_copy()
