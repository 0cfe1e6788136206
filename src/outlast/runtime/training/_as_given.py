"""What the loop's lines before a step's batches find, as it is given the step: settings and registered state.

A replica that came in by replaying goes through the newest step's lines, too (protocol, 41). What they draw from a
registered generator, or read of a rate, has to be what it was for all others, though its own is as old as its snapshot.
Who may be asked for it is not known as a step is given, so a copy is made of every step, and small: parts of more than
`SMALL_BYTES` are looked at once. These are left out, as are parameters that the loop wrote; for them stands what they
are as the inner loop begins, which is the same unless the lines in between write to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from outlast.runtime.training.state import decoded_tree, encoded_tree

__all__ = ["SMALL_BYTES", "AsGiven", "Given"]

SMALL_BYTES = 64 << 10
"""The largest registered part of which a copy is made in each step: a generator's is 16 to 12,000 bytes."""


class Given(msgspec.Struct, frozen=True):
    """As it is told to who joins. `settings`: as of `LoopState`, empty where they are the step's; `written`: names of
    parameters that the loop had written since the step before was applied; `parts`: of the registered ones by name,
    plain data and tensors' bytes."""

    settings: bytes
    written: tuple[str, ...]
    parts: dict[str, tuple[bytes, bytes]]

    def values(self) -> dict[str, Any]:
        """What each part's `state_dict` gave."""
        flat = {key: torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
                for key, (_, data) in self.parts.items()}  # fmt: skip
        return {key: decoded_tree(plain, flat[key]) for key, (plain, _) in self.parts.items()}


class AsGiven:
    """The copy of the newest step that the loop was given. `step`: which; -1: of none."""

    def __init__(self) -> None:
        self.step = -1
        self._settings, self._written = b"", tuple[str, ...]()
        self._parts: dict[str, tuple[bytes, list[Tensor]]] = {}
        self._large = set[str]()

    def note(self, step: int, settings: bytes, written: tuple[str, ...], registered: Mapping[str, Any]) -> None:
        """The loop is about to be given this step."""
        self.step, self._settings, self._written = step, settings, written
        self._parts = {}
        for key in [key for key in registered if key not in self._large]:
            plain, tensors = encoded_tree(registered[key].state_dict())
            if len(plain) + sum(t.numel() * t.element_size() for t in tensors.values()) > SMALL_BYTES:
                self._large.add(key)
                continue
            self._parts[key] = plain, [_copied(tensor) for tensor in tensors.values()]

    def told(self, step: int, settings: bytes) -> bytes:
        """An encoded `Given`, for `settings` as the inner loop of `step` began; empty if the copy is of another one."""
        if step != self.step:
            return b""
        parts = {key: (plain, b"".join(map(_bytes, copies))) for key, (plain, copies) in self._parts.items()}
        other = self._settings if self._settings != settings else b""
        return msgspec.msgpack.encode(Given(other, self._written, parts))


def _copied(tensor: Tensor) -> Tensor:
    """Its bytes, where it lies: no device is waited for, and no copy of an average is taken for one that the loop has
    not registered (`checks/unseen_averages.py`)."""
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _bytes(copy: Tensor) -> bytes:
    return copy.cpu().numpy().tobytes()
