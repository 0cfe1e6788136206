"""Copying a state into a slot beside the training loop, while nothing writes it. torch.

Role: between two optimizer steps parameters and optimizer state are read-only; a background thread copies them then,
and the step waits only for what is not copied yet. Who waits helps. Invariants: the slot's bytes are those that the
tensors had at `begin`, provided the caller changes a tensor only after `wait_for` it; a failure here never reaches the
training loop: it reaches the save.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch

from outlast.checkpoint._again import has_memory
from outlast.checkpoint.state_tensors import bytes_of, raw
from outlast.errors import CheckpointError

__all__ = ["Copy", "Snapshot"]

_BLOCK_BYTES = 8 << 20
_SLOW = "see whether the host is out of memory (swapping) or stopped; copying needs seconds"


class Copy(NamedTuple):
    """Fill `memory[at : at + bytes]`, which lies at `address`, with `source`, a box of `shape`, row-major.

    The `gap` bytes before it belong to no tensor and become zero.
    """

    name: str
    source: torch.Tensor
    shape: tuple[int, ...]
    memory: memoryview
    address: int
    at: int
    bytes: int
    gap: int = 0


class _Block(NamedTuple):
    copy: int
    low: int
    high: int  # exclusive; bytes within the copy


class Snapshot:
    """One save's copying. `run` is the background's part; `wait_for` the training loop's; `ready` the writer's."""

    def __init__(self, copies: Sequence[Copy], stream_bytes: int, *, clock: Callable[[], float] | None = None) -> None:
        self._copies = sorted(copies, key=lambda c: c.at)
        self._stream_bytes = stream_bytes
        self._clock = clock
        self.copied_at_s = float("nan")
        self._blocks = [block for index, copy in enumerate(self._copies) for block in _blocks(index, copy)]
        self._state = bytearray(len(self._blocks))  # 0 waiting, 1 taken, 2 copied
        self._next = self._mark = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._events = _device_events(self._copies)
        self.copied = threading.Event()
        if not self._blocks:
            self._finish()

    def copy_now(self, names: Collection[str]) -> None:
        """Copy these tensors before returning: buffers and loop state, which change inside the step."""
        for index, block in enumerate(self._blocks):
            if self._copies[block.copy].name in names and self._take(index):
                self._do(index)

    def run(self) -> None:
        """Copy what nobody else has copied yet; for the background thread."""
        for event in self._events:
            event.synchronize()
        while (index := self._take_next()) is not None:
            self._do(index)

    def wait_for(self, names: Collection[str] | None = None, *, timeout_s: float) -> None:
        """Return when the tensors of these names (all by default) may be overwritten. Copies what is left itself.

        Raises `CheckpointError` only if the background thread holds a block longer than `timeout_s`.
        """
        wanted = self._indices(names)
        for index in wanted:
            if self._take(index):
                self._do(index)
        with self._changed:
            done = self._changed.wait_for(lambda: self._error or all(self._state[i] == 2 for i in wanted), timeout_s)
        if not done:
            raise CheckpointError(
                f"the snapshot did not end within {timeout_s} s", did="the step has not begun", remedy=_SLOW
            )

    def _indices(self, names: Collection[str] | None) -> Sequence[int]:
        if names is None:
            return range(len(self._blocks))
        return [i for i, block in enumerate(self._blocks) if self._copies[block.copy].name in names]

    def ready(self, end: int, *, timeout_s: float) -> None:
        """Return when the stream's first `end` bytes are there. Raises what the copying raised."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._error is not None or self._prefix() >= end, timeout_s)
        if self._error is not None:
            raise CheckpointError(f"the snapshot failed: {self._error}") from self._error
        if not done:
            raise CheckpointError(
                f"the snapshot did not reach byte {end} within {timeout_s} s", did="the save is dropped", remedy=_SLOW
            )

    def _prefix(self) -> int:
        """The stream's bytes up to the first block that is not copied."""
        if self._mark == len(self._blocks):
            return self._stream_bytes
        block = self._blocks[self._mark]
        copy = self._copies[block.copy]
        return copy.at + block.low if block.low else copy.at - copy.gap

    def _take(self, index: int) -> bool:
        with self._changed:
            if self._state[index]:
                return False
            self._state[index] = 1
            return True

    def _take_next(self) -> int | None:
        with self._changed:
            while self._next < len(self._blocks) and self._state[self._next]:
                self._next += 1
            if self._next == len(self._blocks) or self._error is not None:
                return None
            self._state[self._next] = 1
            return self._next

    def _do(self, index: int) -> None:
        block = self._blocks[index]
        error: Exception | None = None
        try:
            _copy(self._copies[block.copy], block)
        except (RuntimeError, ValueError, TypeError) as caught:
            error = caught
        with self._changed:
            self._state[index] = 2
            self._error = self._error or error
            while self._mark < len(self._blocks) and self._state[self._mark] == 2:
                self._mark += 1
            self._changed.notify_all()
            ended = self._mark == len(self._blocks) or self._error is not None
        if ended:
            self._finish()

    def _finish(self) -> None:
        if not self.copied.is_set():
            self.copied_at_s = self._clock() if self._clock is not None else self.copied_at_s
            self.copied.set()


def _blocks(index: int, copy: Copy) -> list[_Block]:
    """Contiguous memory is copied in blocks, so that a waiter can help and a prefix can be written early."""
    if copy.bytes <= _BLOCK_BYTES or not _plain(copy.source):
        return [_Block(index, 0, copy.bytes)]
    return [_Block(index, low, min(low + _BLOCK_BYTES, copy.bytes)) for low in range(0, copy.bytes, _BLOCK_BYTES)]


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _copy(copy: Copy, block: _Block) -> None:
    if copy.gap and block.low == 0:
        ctypes.memset(copy.address - copy.gap, 0, copy.gap)
    if _plain(copy.source):
        if copy.bytes and not has_memory(copy.source):
            raise ValueError(f"{copy.name!r} was freed before it was copied")
        # memmove through ctypes gives the interpreter lock up, and starts no thread pool of its own.
        ctypes.memmove(copy.address + block.low, copy.source.data_ptr() + block.low, block.high - block.low)
    else:
        dest = bytes_of(copy.memory[copy.at : copy.at + copy.bytes], copy.source.dtype, copy.shape)
        with torch.no_grad():
            dest.copy_(raw(copy.source))


def _device_events(copies: Sequence[Copy]) -> list[torch.cuda.Event]:
    """What the devices were told to compute before `begin` must be done before it is copied from another thread."""
    events = []
    for device in sorted({c.source.device for c in copies if c.source.is_cuda}, key=str):
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events
