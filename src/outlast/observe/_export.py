"""A run's figures for other tools: JSON lines, TensorBoard's event files, Weights & Biases.

Role: from events to rows, and writers of rows. A row is one step's loss, or what a `Progress` or a fault says at a
moment. Invariants: each entry of the journal is written once and in order; a run that goes on can be followed; nothing
here reads a clock. TensorBoard's format is written by hand (records with masked CRC-32C around small protocol
buffers), so that no package is needed for it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

import msgspec

from outlast.core import events as ev
from outlast.errors import EnvironmentFault

__all__ = ["JsonLines", "MetricRow", "MetricWriter", "TensorBoardFile", "WeightsAndBiases", "rows_of"]


class MetricRow(msgspec.Struct, frozen=True, kw_only=True):
    """Figures at one step and moment (Unix seconds), by name; `text`: a fault in words."""

    at_s: float
    step: int
    values: dict[str, float]
    text: str = ""


def rows_of(event: ev.AnyEvent) -> Iterator[MetricRow]:
    """What an event says in figures; nothing for most kinds."""
    match event:
        case ev.ProgressMade():
            for step, loss in event.losses:
                yield MetricRow(at_s=event.at_s, step=step, values={"loss": loss})
            if event.committed >= 0:
                uses = {f"seconds/{use}": value for use, value in event.seconds.items()}
                yield MetricRow(at_s=event.at_s, step=event.committed, values={"step_seconds": event.step_s, **uses})
        case ev.Recovery():
            values = {"recovery/downtime_seconds": event.downtime_s, "recovery/detection_seconds": event.detect_s}
            told = f"{event.replica}: {event.cause} {event.detail}".strip()
            yield MetricRow(at_s=event.at_s, step=event.step, values=values, text=told)
        case ev.CheckpointSaved():
            values = {"checkpoint/durable_seconds": event.durable_s, "checkpoint/blocked_seconds": event.blocked_s,
                      "checkpoint/written_bytes": float(event.written_bytes)}  # fmt: skip
            yield MetricRow(at_s=event.at_s, step=event.step, values=values)
        case ev.ViewFormed():
            yield MetricRow(at_s=event.at_s, step=event.step, values={"view": float(event.n)})


class MetricWriter(Protocol):
    """Takes rows, in order."""

    def write(self, row: MetricRow) -> None: ...

    def close(self) -> None: ...


class _File:
    """`path`: `-` is standard output."""

    def __init__(self, path: Path) -> None:
        self._path = None if str(path) == "-" else path
        if self._path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = sys.stdout.buffer if self._path is None else path.open("wb")

    def _put(self, data: bytes) -> None:
        with self._named():
            self._file.write(data)
            self._file.flush()

    def close(self) -> None:
        """Write what is left."""
        with self._named():
            self._file.flush() if self._path is None else self._file.close()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """An error in writing does not say by itself which file it is about: a full disk is taken for another's."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, *([str(self._path)] if self._path else [])) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class JsonLines(_File):
    """One object a row and line: `at_s`, `step`, the values by name; what is not finite as a word."""

    def write(self, row: MetricRow) -> None:
        """Write one line."""
        values = {name: value if math.isfinite(value) else str(value) for name, value in row.values.items()}
        told: Mapping[str, object] = {"at_s": row.at_s, "step": row.step, **values}
        self._put(json.dumps({**told, **({"text": row.text} if row.text else {})}).encode() + b"\n")


class TensorBoardFile(_File):
    """An event file that `tensorboard --logdir` reads. `folder`: the run's own; `at_s`: names the file."""

    def __init__(self, folder: Path, at_s: float = 0.0) -> None:
        super().__init__(folder / f"events.out.tfevents.{int(at_s):010d}.outlast")
        self._record(_double(1, at_s) + _bytes(3, b"brain.Event:2"))

    def write(self, row: MetricRow) -> None:
        """Write one event with a scalar for each value."""
        values = b"".join(_bytes(1, _bytes(1, name.encode()) + _float(2, v)) for name, v in row.values.items())
        self._record(_double(1, row.at_s) + _varint_field(2, row.step) + _bytes(5, values))

    def _record(self, data: bytes) -> None:
        head = struct.pack("<Q", len(data))
        self._put(head + _masked(head) + data + _masked(data))


class WeightsAndBiases:
    """A run of the package `wandb`, in offline mode unless `online`: `wandb sync` sends it later."""

    def __init__(self, folder: Path, run_id: str, *, online: bool = False) -> None:
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise EnvironmentFault("wandb cannot be imported", remedy="pip install wandb") from error
        folder.mkdir(parents=True, exist_ok=True)
        mode = "online" if online else "offline"
        self._run: Any = wandb.init(project="outlast", id=run_id, dir=str(folder), mode=mode, resume="allow")

    def write(self, row: MetricRow) -> None:
        """Log one row under its own step, so that rows of one step need not come together."""
        self._run.log({**row.values, "step": row.step, "at_s": row.at_s})

    def close(self) -> None:
        """End the run."""
        self._run.finish()


def _masked(data: bytes) -> bytes:
    crc = _crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@functools.cache
def _table() -> tuple[int, ...]:
    """The table of CRC-32C (Castagnoli), reflected: one word for each byte."""
    found = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        found.append(byte)
    return tuple(found)


def _crc32c(data: bytes) -> int:
    crc, table = 0xFFFFFFFF, _table()
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _varint(value: int) -> bytes:
    out = bytearray()
    value &= (1 << 64) - 1
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _double(number: int, value: float) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _float(number: int, value: float) -> bytes:
    largest = 3.4028234663852886e38  # what a float holds; beyond it is infinite there
    narrow = value if not math.isfinite(value) or abs(value) <= largest else math.copysign(math.inf, value)
    return _varint(number << 3 | 5) + struct.pack("<f", narrow)


def _bytes(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data
