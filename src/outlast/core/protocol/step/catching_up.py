"""What follows from what a joiner has received: when it has a state, which outcome is next, when it is caught up.

The runtime's joiner (`runtime/joining/joiner.py`) and the adversary's (`prove/adversary/_spare.py`) both ask this
object, so what is searched is what runs. It holds no tensor and waits for nothing: who owns it takes in what arrives,
calls, and carries out what `JoinerPort` names. Numbers in comments are those of docs/explanation/rules.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from outlast.core.protocol.step.member import Member
from outlast.core.protocol.types import ServeId, View, ViewId
from outlast.errors import ViewAbandoned

__all__ = ["SILENT_S", "CatchingUp", "DonorStream", "JoinerPort", "counts", "tiled", "unsaid_s"]

SILENT_S = 0.25
"""For the end of a stream whose sender has died; on one machine it comes at once."""

_ENOUGH = 8  # outcomes, half of what may wait in a donor before it gives a joiner up


class DonorStream(Protocol):
    """One donor's stream to a joiner. `flushed`: the newest view before which nothing more will come; `coming`: by the
    donor's newest word something is on its way."""

    ended: bool

    @property
    def member(self) -> str: ...
    @property
    def flushed(self) -> ViewId | None: ...
    @property
    def coming(self) -> bool: ...


class JoinerPort(Protocol):
    """What a joiner has received, in all of its lanes, and what is done with it. `steps`: those of whose outcome
    something has arrived; `serving`: the attempt to serve it that counts."""

    @property
    def serving(self) -> ServeId: ...
    @property
    def loaded(self) -> bool: ...
    @property
    def steps(self) -> Collection[int]: ...
    @property
    def streams(self) -> Sequence[DonorStream]: ...
    def serve(self, serving: ServeId) -> None:
        """From now on this attempt counts: forget what is of another one."""

    def snapshot(self) -> Literal["incomplete", "unfit", "whole"]:
        """Whether the shares that have arrived tile a state; "unfit" where they are of different steps."""

    def load(self) -> int:
        """Become the state that the shares tile; returns the steps committed in it."""

    def outcome(self, step: int) -> Literal["incomplete", "whole", "last"]:
        """Whether all of a step's outcome is here, and whether its senders said that it is their view's last."""

    def replay(self, step: int, *, late: bool) -> None:
        """Apply an outcome. `late`: keep it, and apply it when `live` says so."""

    def keep_live(self) -> None:
        """Forget the streams that have ended."""

    def over(self) -> None:
        """Forget all that arrived: it is applied, or of no use."""

    def ready(self) -> None:
        """What follows is a wait for others, however long they take."""

    def say(self, messages: Sequence[Any]) -> None:
        """Tell the coordinator."""


class CatchingUp:
    """See `JoinerPort` for what it asks of its owner. `late`: the roll call is told of an outcome as if it were applied
    here; `lock` is held while `member` is asked or told."""

    def __init__(self, member: Member, lock: AbstractContextManager[Any], port: JoinerPort, grace_s: float) -> None:
        self.member, self.port, self.late = member, port, False
        self._lock, self._grace_s = lock, grace_s
        self._orphaned_at: float | None = None
        self._replayed = 0  # outcomes, since the state was loaded
        self._until_s = math.inf  # streams of who is in no view are waited for until then

    # --- in no view ----------------------------------------------------------------------------------------------
    def begin_turn(self) -> None:
        """Before a turn's arrivals are taken in: another serving may have been ordered, or the old one called off."""
        if self.member.serve_id != self.port.serving:
            self.restart()

    def restart(self) -> None:
        """Begin with nothing, in the serving that the coordinator has ordered last."""
        self.late, self._orphaned_at = False, None
        self.port.serve(self.member.serve_id)

    def advance(self) -> None:
        """After arrivals were taken in: load and replay what is complete, and say when caught up (18)."""
        if self.replay() and self.near() and self.member.state == "joining":
            self.port.ready()
            with self._lock:  # served anew meanwhile: what is here is of the serving that was called off
                mine = self.member.serve_id == self.port.serving
                answers = self.member.caught_up(self.member.committed) if mine else []
            self.port.say(answers)

    def replay(self, late: bool = False) -> bool:
        """Replay outcomes in order, without a gap; False: there is no state yet. `late`: the newest is kept, where it
        is a view's last; one of an older view, which was the last too, is applied."""
        if not self.port.loaded and not self._load():
            return False
        committed = self.member.committed
        while (found := self.port.outcome(step := self.member.committed)) != "incomplete":
            self.late = late and found == "last"  # an older view's last step was not the last after all
            self.port.replay(step, late=self.late)
            with self._lock:
                self.member.replayed(step + 1, keeps_output=not self.late)
            self._replayed += 1
        if self.member.committed > committed:
            self.port.ready()
        return True

    def _load(self) -> bool:
        found = self.port.snapshot()
        if found == "unfit":
            self.ask_again()
        if found != "whole":
            return False
        committed = self.port.load()
        with self._lock:
            self.member.replayed(committed)
        self._replayed = 0
        return True

    def near(self) -> bool:
        """Whether I am at most a step behind: by what is here, and by what my donors still have for me. Where steps
        are so short that something is always on its way, that lasts a few steps only."""
        coming = any(stream.coming for stream in self.port.streams if not stream.ended)
        return len(self.port.steps) <= 1 and (not coming or self._replayed >= _ENOUGH)

    def give_up_if_orphaned(self, now_s: float) -> None:
        """A stream that ended leaves a gap, unless a new view sends the outcome whole: then ask to be served anew."""
        if self.member.committed >= (self.member.until or math.inf):
            return  # the last step is here: nothing more comes, but an end, or a view should all its members die
        behind = any(step > self.member.committed for step in self.port.steps)
        if not any(stream.ended for stream in self.port.streams) and not behind:
            self._orphaned_at = None
        elif self._orphaned_at is None:
            self._orphaned_at = now_s
        elif now_s - self._orphaned_at > self._grace_s:
            if behind or all(stream.ended for stream in self.port.streams):
                self.ask_again()
            else:
                self.port.keep_live()
                self._orphaned_at = None

    def ask_again(self) -> None:
        """What is here cannot be completed."""
        with self._lock:
            answers = self.member.rejoin()
        self.port.say(answers)
        if answers:  # else it was told a view, or to start again, meanwhile
            self.restart()

    # --- into a view ---------------------------------------------------------------------------------------------
    def begin_drain(self, now_s: float) -> None:
        """Before joining a view: all that was sent up to it is taken in. Who is not in the view is waited for during a
        while only, since his host may have fallen silent."""
        self._until_s = now_s + (self._grace_s if self.member.switched else SILENT_S)

    def drain_s(self, view: View, now_s: float) -> float:
        """How long to wait now for what streams may still bring of before the view; 0: it is all here, or the view is
        over."""
        return 0.0 if self.member.over(view.id) else unsaid_s(self.port.streams, view, self._until_s, now_s)

    def drained(self, view: View, *, late: bool) -> None:
        """All is here: replay it and forget the rest. Raises ViewAbandoned if the view is over.

        `late`: its last outcome is kept for `live`, as the loop goes through its step. Who is switched into the view by
        an order says so in the roll: then its members do not wait, in the first step, for gradients of this replica.
        """
        if self.port.loaded:
            self.replay(late)
        self.port.over()
        if self.member.over(view.id):
            raise ViewAbandoned("the view ended while the joiner caught up")

    def read_elsewhere(self) -> None:
        """Another state was read, which is newer than what was kept: `replayed` has been told."""
        self.late = False

    def live(self) -> None:
        """The outcome that was kept is applied."""
        late, self.late = self.late, False
        if late:
            with self._lock:
                self.member.caught_up_late()


def unsaid_s(streams: Sequence[DonorStream], view: View, until_s: float, now_s: float) -> float:
    """How long to wait now for streams that may still bring something of before the view; 0: for none."""
    unsaid = [s for s in streams if not s.ended and (s.flushed is None or s.flushed < view.id)]
    if any(stream.member in view.members for stream in unsaid):
        return 1.0
    return max(0.0, until_s - now_s) if unsaid else 0.0


def tiled(spans: Iterable[tuple[int, int]], length: int) -> bool:
    """Whether spans cover 0..length without a gap. They may overlap: an outcome that two views have computed, with
    another number of members in each, comes in slices of both, and has the same bits."""
    at = 0
    for lo, hi in sorted(spans):
        if lo > at:
            return False
        at = max(at, hi)
    return at >= length


def counts(serve: ServeId, serving: ServeId, newest: ServeId) -> bool:
    """Whether what was sent in one attempt to serve is of use in the one that counts from now on; `newest`: of those
    that counted before. A donor's stream may come before the coordinator's word of it, and is not sent again."""
    return serve == serving or serve > newest
