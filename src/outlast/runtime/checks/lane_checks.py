"""What checks of a lead need of the other ranks of its replica; nothing, where the replica is one rank.

A verdict is of a replica: what its ranks have seen is folded here into what one member says. How they are told is
`member/_sibling_checks.py`'s matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from outlast.core.policy import Culprit, GuardNote
from outlast.core.protocol.step.verdict import PartRows
from outlast.tensors import combine

__all__ = ["LaneChecks", "RankLook", "note_of_ranks", "rows_of_ranks", "seen_by_ranks"]


@dataclass(frozen=True, slots=True)
class RankLook:
    """What one rank saw of its microbatch. `hit`: this computation made a number that is not finite, and did not get it
    from what ranks have added up."""

    culprit: Culprit
    hit: bool


class LaneChecks:
    """There are no other ranks."""

    some = False
    """Whether there are."""

    def suspects(self, step: int) -> set[int]:
        """Leaves under sums of theirs that are not finite."""
        return set()

    def look(self, step: int, leaf: int, *, watched: bool) -> None:
        """Have each compute a microbatch of the leaf once more, while this rank does."""

    def looked(self) -> list[RankLook]:
        """What they saw of it, watched."""
        return []

    def unlike(self, step: int) -> list[Culprit]:
        """Their sums that came out otherwise when they were computed again."""
        return []

    def audit(self, step: int, leaf: int) -> None:
        """Have each compute its microbatch of a leaf of another replica, while this rank does."""

    def printed(self) -> list[int]:
        """Fingerprints, in their rows, of the leaf that all ranks have just computed."""
        return []

    def repeat(self, rounds: int) -> None:
        """Have each compute its microbatch of the first leaf so often, while this rank does."""

    def repeated(self) -> list[Sequence[PartRows]]:
        """What each says of every one of these times."""
        return []

    def rows(self, step: int) -> list[PartRows]:
        """Fingerprints of the tensors in their parts of the state, as a step compares them; -1: of all."""
        return []


def note_of_ranks(notes: Sequence[GuardNote]) -> GuardNote:
    """What a replica says to guards, from what its ranks would say."""
    full = [note.full for note in notes]
    collapsed = dict.fromkeys(row for note in notes for row in note.collapsed)
    return GuardNote(full=combine(full) if any(full) else 0, collapsed=tuple(collapsed))


def rows_of_ranks(tables: Sequence[PartRows]) -> PartRows:
    """One fingerprint for each tensor, of all its parts."""
    found: dict[str, list[int]] = {}
    for name, value in (row for table in tables for row in table):
        found.setdefault(name, []).append(value)
    return tuple((name, combine(values) if len(values) > 1 else values[0]) for name, values in found.items())


def seen_by_ranks(looks: Iterable[RankLook]) -> list[Culprit]:
    """Whose microbatch it was, of those that the ranks of a replica computed at once: a gradient that is not finite
    comes to all of them, in whose rows it lies."""
    found = list(looks)
    if len(found) == 1:
        return [found[0].culprit]
    reproduced = any(look.culprit.reproduced for look in found)
    parameter = next((look.culprit.parameter for look in found if look.culprit.parameter), "")
    own = [look.culprit for look in found if look.hit]
    nobody = msgspec.structs.replace(found[0].culprit, microbatch=-1, samples=(), sure=False)
    return [
        msgspec.structs.replace(each, reproduced=reproduced, parameter=each.parameter or parameter)
        for each in own or [nobody]
    ]
