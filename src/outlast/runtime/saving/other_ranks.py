"""What a lead's saves need of the other ranks of its replica; nothing, where the replica is one rank.

Each rank saves its own part of the state, with an engine of its own, and is a writer of its own: member `i` of a view
with ranks `p` of `k` is writer `i * k + p`. What is saved, and when, the lead alone decides (`member/sibling_saves.py`
is how it says so).
"""

from __future__ import annotations

from typing import Protocol

from outlast.core.protocol import View, ViewId
from outlast.runtime.transport.save_messages import ToMember

__all__ = ["OtherRanks", "SavingMember"]


class SavingMember(Protocol):
    """What saves ask of the member whose state they save."""

    committed: int
    stable: int

    @property
    def view(self) -> View | None: ...

    @property
    def formed(self) -> bool: ...

    @property
    def until(self) -> int | None: ...

    def over(self, view: ViewId) -> bool: ...


class OtherRanks:
    """There are none."""

    @property
    def ready(self) -> bool:
        """Whether all of them could take a save after the step whose exchange is over."""
        return True

    def take(self, view: ViewId, step: int, reason: str, attempt: int, wait: bool) -> None:
        """Have them take it."""

    def stable(self, view: ViewId, step: int) -> None:
        """Everybody has committed the last step."""

    def said(self, message: ToMember | None) -> None:
        """What the coordinator said; None: it is there again."""
