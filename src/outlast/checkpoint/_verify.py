"""Reading every byte that a generation reaches, and naming what is wrong and which tensors it touches. No torch.

Role: `outlast ckpt verify`. Unlike a load it does not stop at the first finding. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from outlast.checkpoint.manifest import Damage, parse_head
from outlast.checkpoint.reader import Reader
from outlast.checkpoint.store import Store, generation_name

__all__ = ["Problem", "Verified", "verify"]


class Problem(NamedTuple):
    """`bytes` 0: the whole file. `tensors`: names of those with bytes there (all of the generation's if unknown)."""

    file: str
    offset: int
    bytes: int
    what: str
    tensors: list[str]


class Verified(NamedTuple):
    generation: int
    step: int
    num_chunks: int
    bytes_read: int
    problems: list[Problem]


def verify(store: Store, generation: int, *, progress: Callable[[int, int], None] | None = None) -> Verified:
    """Check all of a generation. `progress` is told (bytes done, bytes in all). Raises `OSError` for the store."""
    name = generation_name(generation)
    try:
        head = parse_head(store.read_head(generation), file=name, generation=generation)
    except Damage as error:
        return Verified(generation, -1, 0, 0, [Problem(error.file, error.offset, error.bytes, error.what, [])])
    try:
        reader = Reader(head, [store])
    except Damage as error:
        return Verified(generation, head.step, 0, 0, [Problem(error.file, error.offset, error.bytes, error.what, [])])
    problems, done, count = [], 0, 0
    with reader:
        for part, start, chunk in reader.chunks():
            try:
                reader.fetch(part, chunk, memoryview(bytearray(chunk.bytes)))
            except Damage as error:
                touched = reader.tensors_in(part, start, chunk.bytes)
                problems.append(Problem(error.file, error.offset, error.bytes, error.what, touched))
            done, count = done + chunk.bytes, count + 1
            if progress is not None:
                progress(done, head.bytes)
    return Verified(generation, head.step, count, done, problems)
