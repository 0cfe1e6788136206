"""What a place for checkpoints must be able to do, whatever it is made of.

Role: the one interface between the engine and local disks, object stores and shared memory. Names are plain file
names (`manifest.check_name`); a store never interprets what it holds. Invariants every store keeps: a name is
written once and never changed while a head reaches it; `publish` is atomic, exclusive and durable when it returns,
and so is `withdraw`.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Protocol

__all__ = ["DataReader", "DataWriter", "Source", "Store", "generation_name", "generation_number"]


_MAX_DIGITS = 18  # of a generation's number: it must fit where integers have 64 bits


class DataWriter(Protocol):
    """One data file being written. `concurrent`: `write` may be called by several threads at once."""

    concurrent: bool
    name: str

    def write(self, offset: int, data: memoryview) -> None: ...
    def finish(self, size_bytes: int) -> None:
        """Cut to `size_bytes`, which is what was written. Durable when it returns (its name after `barrier`)."""

    def abandon(self) -> None:
        """Close and remove what was written; never raises."""


class DataReader(Protocol):
    """One data file being read. `bytes`: its size."""

    bytes: int

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`. Raises `Damage` if the file ends first, `OSError` if it cannot be read."""

    def close(self) -> None: ...


class Source(Protocol):
    """What loading asks of a place. `url` names it to people; `tier`: `memory`, `disk` or `object`, nearest first."""

    url: str
    tier: str

    def generations(self) -> list[int]: ...
    def read_head(self, generation: int) -> bytes: ...
    def read_part(self, name: str, max_bytes: int) -> bytes: ...
    def open_data(self, name: str) -> DataReader: ...
    def size(self, name: str) -> int | None: ...
    def in_use(self, generation: int) -> AbstractContextManager[bytes]:
        """Hold a generation against `withdraw`; yields its head. Raises `Damage` if it is not there."""


class Store(Source, Protocol):
    """A place that can also be written and tidied."""

    def create(self, name: str, size_bytes: int) -> DataWriter: ...
    def put_part(self, name: str, data: bytes) -> None: ...
    def barrier(self) -> None: ...
    def publish(self, generation: int, head: bytes) -> bool:
        """False if that number is taken. When it returns, the head is there whole, or will never be."""

    def replace_head(self, generation: int, head: bytes) -> None: ...
    def withdraw(self, generations: Collection[int]) -> list[int]:
        """Remove heads, but those in use by a reader; returns the removed, durably gone."""

    def names(self) -> list[str]:
        """Parts and data files."""

    def discard(self, names: Collection[str], *, recycle: Collection[str] = ()) -> None:
        """Drop files that no head reaches. Those in `recycle` have no writer any more and may be written over."""

    def make_room(self) -> int:
        """Give back space that is only kept for reuse; returns how many files that were."""


def generation_name(generation: int) -> str:
    return f"g{generation:010d}.json"


def generation_number(name: str) -> int | None:
    digits = name.removeprefix("g").removesuffix(".json")
    if name.startswith("g") and name.endswith(".json") and digits.isascii() and digits.isdigit():
        number = int(digits) if len(digits) <= _MAX_DIGITS else -1
        return number if generation_name(number) == name else None
    return None
