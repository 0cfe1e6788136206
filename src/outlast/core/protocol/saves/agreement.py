"""Which step the members of a view save, and when a member may promise its part.

Role: what a member decides about saves; the runtime's members and the adversary's run it alike. Each says in its header
of a step whether it wants a save and whether it could take one (a vote). All read the same votes, so the step after
which somebody wants one and nobody objects is saved by all of them, at its boundary, in the view of its headers.
Invariant: a part is promised only when it is durable and its step is stable in the view in which it was taken; with
that view it lapses, unless it was promised. Writes nothing: `commit.py` says what promises come to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from outlast.core.protocol.saves.commit import SaveId
from outlast.core.protocol.types import ViewId

__all__ = ["CANNOT", "LostSaves", "SavePromise", "SaveVotes", "learn_stable"]

CANNOT = -1
"""A vote: no save after this step."""

_REMEMBERED = 8  # saves that came to nothing in a row; a member has two under way at most
_LOCALLY = 2  # a vote: this member wants one by itself. Requests have higher numbers, and stops have odd ones


class SaveVotes:
    """One member's wishes, its votes, and what all votes came to. `wanted`: why it wants a save by itself, "" if it
    does not; `asked`: the coordinator's newest request, `acted`: the newest one that a save answered; `taken`: the
    newest (view, step) that a save was tried of."""

    def __init__(self) -> None:
        self.wanted = ""
        self.asked = self.acted = 0
        self.taken: tuple[ViewId, int] | None = None
        self._reasons: dict[int, str] = {}
        self._due: tuple[ViewId, int, int] | None = None
        self._stop_at: tuple[ViewId, int] | None = None  # the save after which the run stops
        self._lost: set[tuple[ViewId, int]] = set()  # of the newest view: saves that came to nothing

    @property
    def wished(self) -> bool:
        """Whether a save is wanted that has not been taken."""
        return bool(self.wanted) or self.asked > self.acted

    def request(self, number: int, reason: str) -> None:
        """The coordinator asks for a save. Odd numbers: the run stops with it."""
        self.asked = max(self.asked, number)
        self._reasons[number] = reason

    def vote(self, can: bool) -> int:
        """For a header: CANNOT, 0 for no wish, or the number of the newest request that is known here."""
        if not can:
            return CANNOT
        return self.asked if self.asked > self.acted else _LOCALLY if self.wanted else 0

    def decided(self, view: ViewId, committed: int, votes: Sequence[int]) -> None:
        """All votes of the step are in: the same conclusion on every member."""
        if votes and min(votes) > CANNOT and max(votes) > 0:
            self._due = (view, committed, max(votes))

    def due(self, view: ViewId, committed: int) -> str | None:
        """At a step's boundary: why its state is saved now, None if it is not. Asked once."""
        due, self._due = self._due, None
        if due is None or due[:2] != (view, committed):
            return None
        number = due[2]
        reason = self._reasons.get(number, "") if number > _LOCALLY else self.wanted
        if number % 2:
            self._stop_at = due[:2]
        self.wanted, self.acted = "", max(self.acted, number)
        self._reasons = {n: text for n, text in self._reasons.items() if n > self.acted}
        return reason

    def tried(self, view: ViewId, step: int) -> bool:
        """Whether a save of this very step was tried in this view: what the loop leaves needs none then."""
        return self.taken == (view, step)

    def stops(self, view: ViewId, step: int) -> bool:
        """Whether the save just tried is the last of a run that is asked to stop. The same on every member, whatever
        has become of its own part already: who goes on alone would be waited for in vain."""
        return self._stop_at == (view, step) == self.taken

    def answers(self, view: ViewId, step: int) -> int:
        """The newest request that a save of this step answers. None that asks for a stop, unless the run stops with it:
        the steps that follow it would be lost."""
        return self.acted if self._stop_at == (view, step) else self.acted // 2 * 2

    def lost(self, view: ViewId, step: int) -> None:
        """The coordinator has given the save up. The run does not stop with it: another is asked for."""
        if all(view >= known for known, _ in self._lost):
            self._lost = {lost for lost in self._lost if lost[0] == view} | {(view, step)}

    def awaits_stop(self, view: ViewId, step: int) -> bool:
        """Whether the run may still stop with the save just tried, so that no step is begun."""
        return self.stops(view, step) and (view, step) not in self._lost


class LostSaves:
    """Saves of one view that came to nothing, as one member knows: its own part failed, or the coordinator gave them
    up. One that takes over has heard neither from the one before it, and would wait for these with whoever still holds
    a part; so they are said again."""

    def __init__(self) -> None:
        self._view: tuple[int, int] = (0, 0)
        self._why: dict[SaveId, str] = {}
        self._published: SaveId | None = None  # the newest

    def add(self, save: SaveId, reason: str) -> None:
        """Know it from now on, with what earlier views have lost forgotten."""
        if save.view > self._view:
            self._view, self._why = save.view, {}
        if save.view == self._view and (self._published is None or save > self._published):
            self._why.setdefault(save, reason)
            for old in list(self._why)[:-_REMEMBERED]:
                del self._why[old]

    def passed(self, published: SaveId) -> None:
        """This one was published: nobody waits for those before it."""
        self._published = max(published, self._published or published)
        self._why = {save: why for save, why in self._why.items() if save > self._published}

    def of(self, view: tuple[int, int]) -> list[tuple[SaveId, str]]:
        """What is said again in this view: (save, why)."""
        return list(self._why.items()) if view == self._view else []


@dataclass(slots=True, kw_only=True)
class SavePromise:
    """A save that this member has begun. `view`: whose headers agreed on it; `given`: the coordinator was told."""

    save: SaveId
    view: ViewId
    durable: bool = False
    stable: bool = False
    given: bool = False

    @property
    def is_due(self) -> bool:
        """Whether it may be given, and has not been."""
        return self.durable and self.stable and not self.given


P = TypeVar("P", bound=SavePromise)


def learn_stable(promises: Iterable[P], view: ViewId, stable: int) -> list[P]:
    """Steps up to `stable` can be taken back by nothing, as learnt in `view`. Returns what lapses: promises of other
    views that were not given."""
    lapsed = []
    for promise in promises:
        if promise.view != view:
            if not promise.given:
                lapsed.append(promise)
        elif promise.save.step <= stable:
            promise.stable = True
    return lapsed
