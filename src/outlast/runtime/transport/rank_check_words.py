"""Words between the ranks of one replica about what is computed beside a step: closer looks, and parts of the state.

Records, and nothing else, as of `rank_words.py`. What they mean is `member/_sibling_checks.py`'s matter.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from outlast.core.policy import Culprit

__all__ = [
    "AskRows",
    "AuditLeaf",
    "LaneGrams",
    "LaneLooked",
    "LaneRepeated",
    "LeafPrinted",
    "LookAgain",
    "LookCloser",
    "RepeatLeaf",
    "RowsChosen",
    "RowsSaid",
    "SlicesSaid",
]


class LookCloser(msgspec.Struct, frozen=True, tag=True):
    """Lead: this step cannot be right. `suspects`: say in which leaves your sums are not finite; `watch`: everybody
    computes a microbatch of this leaf once more, watched, and says what was seen; `again`: the same unwatched, into
    sums beside the step's; `compare`: say which of these differ from the step's."""

    number: int
    what: Literal["suspects", "watch", "again", "compare"]
    step: int
    leaf: int = -1


class LaneLooked(msgspec.Struct, frozen=True, tag=True):
    """What this rank saw. `hit`: in its own microbatch, not in what ranks have added up."""

    number: int
    leaves: tuple[int, ...] = ()
    culprits: tuple[Culprit, ...] = ()
    hit: bool = False


class AskRows(msgspec.Struct, frozen=True, tag=True):
    """Lead: fingerprint each tensor in your part of the state that `step` compares; all of it where it is -1."""

    number: int
    step: int


class RowsSaid(msgspec.Struct, frozen=True, tag=True):
    number: int
    rows: tuple[tuple[str, int], ...]


class AuditLeaf(msgspec.Struct, frozen=True, tag=True):
    """Lead: compute your microbatch of this leaf, which another replica owns, for its fingerprint."""

    step: int
    leaf: int


class RepeatLeaf(msgspec.Struct, frozen=True, tag=True):
    """Lead: before the first step, compute your microbatch of its first leaf so often, for its gradient's fingerprint
    alone."""

    number: int
    rounds: int


class LaneRepeated(msgspec.Struct, frozen=True, tag=True):
    """Each time's fingerprints: of my microbatch's samples, and of the gradient in my rows, by parameter."""

    number: int
    rounds: tuple[tuple[tuple[str, int], ...], ...]


class LeafPrinted(msgspec.Struct, frozen=True, tag=True):
    """The fingerprint, in my rows, of the leaf that all ranks have just computed."""

    print: int


class LookAgain(msgspec.Struct, frozen=True, tag=True):
    """Lead: reduce these slices (bucket, reducer) of your lane once more."""

    number: int
    slices: tuple[tuple[int, str], ...]


class SlicesSaid(msgspec.Struct, frozen=True, tag=True):
    """Each slice's fingerprints: as I gathered it, and as I compute it now."""

    number: int
    rows: tuple[tuple[int, str, int, int], ...]


class LaneGrams(msgspec.Struct, frozen=True, tag=True):
    """My lane's part of the Gram matrices of a robust rule's rows, one for each group of parameters that needs it."""

    number: int
    parts: tuple[bytes, ...]


class RowsChosen(msgspec.Struct, frozen=True, tag=True):
    """Lead: these are the whole matrices, over all lanes of all replicas; choose by them, as I did."""

    number: int
    totals: tuple[bytes, ...]
