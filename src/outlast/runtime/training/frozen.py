"""What a replica hands to others of its state: bytes frozen at one step, and the record of a step's outcome.

Nothing writes parameters between two optimizer steps, so a thread copies them meanwhile; who is about to write waits
for what is not copied yet (protocol, 18). Sending is `joining/_feeds.py`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from outlast.checkpoint.snapshot import Copy, Snapshot
from outlast.checkpoint.threads import begin
from outlast.runtime.training.warm_memory import Warm

__all__ = ["Frozen", "OutcomeShare", "raw"]

_FREEZE_S = 600.0  # as long as a frozen share may take to be copied


class OutcomeShare(msgspec.Struct, frozen=True, tag="Outcome"):
    """Slices (bucket, lo, hi) of a step's outcome, payload in this order; `whole`: all of it; `last`: after this step
    the members go on to the next view, as planned; `lived`: from one sender, what the loop has made of its state (its
    tensors behind the slices)."""

    step: int
    meta: bytes
    slices: tuple[tuple[int, int, int], ...]
    whole: bool = False
    last: bool = False
    lived: bytes = b""


def raw(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor's bytes, as a view."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Frozen:
    """Bytes lo..hi of a state, copied by a thread. `wait` before anything writes the state's tensors."""

    def __init__(self, tensors: Sequence[Tensor], lo: int, hi: int, at_once: set[int], warm: Warm) -> None:
        self.buffer = warm.lend(hi - lo, self)
        copies, at = [], 0
        for index, tensor in enumerate(tensors):
            size = tensor.numel() * tensor.element_size()
            start, stop = max(lo, at), min(hi, at + size)
            if start < stop:
                copies.append(self._copy(f"{index}", raw(tensor)[start - at : stop - at], start - lo))
            at += size
        self._snapshot = Snapshot(copies, hi - lo)
        self._snapshot.copy_now({str(index) for index in at_once})
        self._copying = True
        try:
            begin(threading.Thread(target=self._snapshot.run, name="outlast-freeze", daemon=True))
        except (RuntimeError, MemoryError):  # no thread to be had: then who waits copies all of it
            self._copying = False

    def _copy(self, name: str, source: Tensor, at: int) -> Copy:
        view, size = memoryview(self.buffer.numpy().data), source.numel()
        return Copy(name, source, (size,), view, self.buffer.data_ptr() + at, at, size)

    def wait(self) -> None:
        """Copies what is not copied yet: who waits helps."""
        self._snapshot.wait_for(timeout_s=_FREEZE_S)

    def ready(self) -> Tensor:
        """The bytes, once all are there. Raises CheckpointError if they could not be copied."""
        if not self._copying:  # what `wait` has left, before the state was written
            self._snapshot.run()
        self._snapshot.ready(len(self.buffer), timeout_s=_FREEZE_S)
        return self.buffer
