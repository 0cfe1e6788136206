"""Which parameters deserve to be watched in every step, if nobody says: a choice by kind and size, without a tensor.

A wrong value in a router, an embedding, the first or the last layer reaches every sample or stays for ever; after these
come the parameters with the largest share of the model's norm. Invariant: together at most `budget` of all elements,
because what is watched costs its share of the exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

__all__ = ["Candidate", "choose_critical"]

Kind = Literal["router", "last", "first", "embedding", "other"]
_ORDER: tuple[Kind, ...] = ("router", "last", "first", "embedding", "other")


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter: elements, Euclidean norm of its values, and what it is."""

    name: str
    numel: int
    norm: float
    kind: Kind = "other"


def choose_critical(parameters: Sequence[Candidate], budget: float = 0.25) -> tuple[str, ...]:
    """Names, in the order given: kinds in their order, the smaller first; then others by norm, the largest first; each
    if it still fits."""
    room = budget * sum(each.numel for each in parameters)
    taken: set[str] = set()

    def rank(each: Candidate) -> tuple[int, float, str]:
        return _ORDER.index(each.kind), each.numel if each.kind != "other" else -each.norm, each.name

    for each in sorted(parameters, key=rank):
        if each.numel <= room:
            room -= each.numel
            taken.add(each.name)
    return tuple(each.name for each in parameters if each.name in taken)
