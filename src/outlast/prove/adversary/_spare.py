"""A joiner's or spare's side: a snapshot from all donors, then the outcomes since, in order, without a gap."""

from __future__ import annotations

from typing import Any

from outlast.core.protocol import View, ViewId
from outlast.prove.adversary._surroundings import Owner

__all__ = ["SimulatedJoiner"]


class SimulatedJoiner:
    """What has arrived for a replica that is in no view."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.incoming: dict[int, ViewId | None] = {}  # stream -> the newest view it was flushed for
        self.shares: dict[Any, dict[int, tuple[int, int, int]]] = {}  # serve -> index -> (step, parts, state)
        self.pieces: dict[int, dict[tuple[int, int], Any]] = {}  # step -> (index, parts) -> outcome
        self.following: Any = (0, 0)
        self.loaded = False
        self.last: Any = None  # the newest outcome, while the roll is called before it is applied
        self._orphaned_at: float | None = None
        self._ended = False

    def receive(self, serial: int, donor: str, kind: str, payload: Any) -> None:
        if kind == "begin":
            self.incoming[serial] = None
        elif kind == "end":
            self.incoming.pop(serial, None)
            self._ended = True
        elif kind == "flushed":
            if serial in self.incoming:
                self.incoming[serial] = payload
        elif kind == "share":
            serve, step, index, parts, state = payload
            self.shares.setdefault(serve, {})[index] = (step, parts, state)
        else:
            step, index, parts, outcome = payload
            if not self.loaded or step >= self.owner.member.committed:
                self.pieces.setdefault(step, {})[index, parts] = outcome

    def follow(self) -> None:
        """Take in what is complete; say when caught up."""
        member = self.owner.member
        if member.serve_id != self.following:
            self.following, self.loaded, self._orphaned_at = member.serve_id, False, None
            self._ended = False
            self.shares = {serve: parts for serve, parts in self.shares.items() if serve >= member.serve_id}
        if not self.loaded:
            self._load()
        if self.loaded:
            self._replay()
            if member.state == "joining" and len(self.pieces) <= 1:
                self.owner.say(*member.caught_up(member.committed))
                self.owner.world.point("ready", self.owner)

    def _load(self) -> None:
        shares = self.shares.get(self.following, {})
        if not shares or len(shares) < next(iter(shares.values()))[1]:
            return
        if len({step for step, _, _ in shares.values()}) > 1:
            self.owner.world.oracle.violated("Bits", f"{self.owner.name} was served shares of different steps")
            return
        step, _, state = shares[0]
        self.owner.state = state
        self.owner.member.replayed(step)
        self.owner.sums.clear()
        self.loaded = True
        self.pieces = {at: parts for at, parts in self.pieces.items() if at >= step}
        self.owner.world.oracle.applied(self.owner, "snapshot")

    def _replay(self, but_last: bool = False) -> None:
        member = self.owner.member
        while (outcome := self._complete(member.committed)) is not None:
            del self.pieces[member.committed]
            if but_last and self._complete(member.committed + 1) is None:
                self.last = outcome
                member.replayed(member.committed + 1)
                return
            self.owner.apply(outcome)
            member.replayed(member.committed + 1, keeps_output=True)
            self.owner.world.oracle.applied(self.owner, "replay")

    def _complete(self, step: int) -> Any:
        parts = self.pieces.get(step)
        if parts is not None:
            for (_, n), outcome in parts.items():
                if sum(1 for _, other in parts if other == n) == n:
                    return outcome
        return None

    def drained(self, view: ViewId) -> bool:
        """Whether every stream has said that nothing of earlier views follows, or ended."""
        return all(flushed is not None and flushed >= view for flushed in self.incoming.values())

    def settle(self) -> None:
        """Apply what the roll call did not wait for."""
        outcome, self.last = self.last, None
        if outcome is not None:
            self.owner.apply(outcome)
            self.owner.member.caught_up_late()
            self.owner.world.oracle.applied(self.owner, "late replay")

    def settling(self, view: View) -> bool:
        """Whether there is something to apply after the roll; then that has begun."""
        if self.last is not None:
            self.owner.occupy(self.owner.world.scenario.optimizer_s, self._settled, view)
        return self.last is not None

    def _settled(self, view: View) -> None:
        self.settle()
        if self.owner.member.formed and not self.owner.member.over(view.id):
            self.owner.formed(view)

    def finish(self, late: bool) -> None:
        """Before the roll entry: what is complete counts, the rest is forgotten. `late`: the last is not applied."""
        if self.loaded:
            self._replay(late)
        self.loaded = False
        self.pieces.clear()
        self.shares.clear()
        self.incoming.clear()
        self._ended = False

    def give_up_if_orphaned(self) -> None:
        """A gap, or streams that ended, and no new view sends what is missing: ask to be served anew."""
        owner = self.owner
        if owner.member.state not in ("joining", "ready") or owner.busy:
            self._orphaned_at = None
            return
        gap = any(step > owner.member.committed for step in self.pieces)
        if not gap and not self._ended:
            self._orphaned_at = None
        elif self._orphaned_at is None:
            self._orphaned_at = owner.kernel.now
        elif owner.kernel.now - self._orphaned_at > owner.world.scenario.grace_s:
            if gap or not self.incoming:
                self.loaded = False
                self.pieces.clear()
                owner.say(*owner.member.rejoin())
            self._orphaned_at, self._ended = None, False
