"""The saves of a replica's ranks: what the lead tells the others of them, and how one of these takes its part.

Each rank saves the rows that it holds, and promises them by itself; its words to the coordinator and back go through
the lead. Which step is saved, and that its loop is over, the lead says in the order of all its words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from outlast.core.protocol import View, ViewId
from outlast.runtime.member._siblings import Siblings
from outlast.runtime.saving.other_ranks import OtherRanks
from outlast.runtime.transport import rank_words as say
from outlast.runtime.transport.save_messages import SaveBase, SaveSettled, ToMember

if TYPE_CHECKING:
    from outlast.runtime.member.follower import FollowingRank

__all__ = ["FollowingMember", "SiblingSaves"]


class SiblingSaves(OtherRanks):
    """The lead's. `send`: to the coordinator."""

    def __init__(self, siblings: Siblings, send: Callable[[Sequence[Any]], None]) -> None:
        self._siblings = siblings
        for pipe in siblings.pipes:
            pipe.on_saves = lambda said: send(said.messages)

    @property
    def ready(self) -> bool:
        return self._siblings.can_save

    def take(self, view: ViewId, step: int, reason: str, attempt: int, wait: bool) -> None:
        self._siblings.tell(say.TakeSave(view, step, reason, attempt, wait))

    def stable(self, view: ViewId, step: int) -> None:
        self._siblings.tell(say.SaveStable(view, step))

    def said(self, message: ToMember | None) -> None:
        if message is None or isinstance(message, SaveBase | SaveSettled):  # when to save is not theirs to know
            self._siblings.tell(say.SavesHear(message))


class FollowingMember:
    """What a rank's saves ask of a member, answered by one that only follows. `committed`, `stable`: set by a resume,
    too."""

    def __init__(self, follower: FollowingRank) -> None:
        self._follower, self.stable = follower, 0

    @property
    def formed(self) -> bool:
        return True

    @property
    def until(self) -> int | None:
        return None

    @property
    def view(self) -> View | None:
        return self._follower.view

    @property
    def committed(self) -> int:
        return self._follower.committed

    @committed.setter
    def committed(self, step: int) -> None:
        self._follower.committed = step

    def over(self, view: ViewId) -> bool:
        return self._follower.dropped
