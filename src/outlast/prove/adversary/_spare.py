"""A joiner's or spare's side in the simulated world: what has arrived for it, and what becomes of its state.

When it loads, replays, is caught up or gives up is decided by `core/protocol/step/catching_up.py`, for the runtime too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from outlast.core.protocol import ServeId, View, ViewId
from outlast.core.protocol.step.catching_up import counts, tiled
from outlast.prove.adversary import _algebra as algebra
from outlast.prove.adversary._surroundings import Owner

__all__ = ["SentOutcome", "Portion", "SimulatedJoiner"]


class Portion(NamedTuple):
    """A donor's share of a state. `parts`: how many shares there are."""

    step: int
    place: int
    parts: int
    state: int


class SentOutcome(NamedTuple):
    """What a donor sends of a step's outcome: blocks by place, of all of it where it is `whole`."""

    step: int
    blocks: dict[tuple[int, int], tuple[int, ...]]  # (lo, hi) of the blocks of all buckets
    norm: int
    whole: bool = False
    last: bool = False


@dataclass(slots=True)
class _Stream:
    """The runtime's have a word for what is on its way; here that takes no time."""

    member: str
    serve: ServeId
    flushed: ViewId | None = None
    ended: bool = False
    coming: bool = False


@dataclass(slots=True)
class _Outcome:
    """What has arrived of one."""

    blocks: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    norm: int = 0
    last: bool = False

    def value(self) -> algebra.Outcome:
        out = [0] * (algebra.BUCKETS * algebra.BLOCKS)
        for (lo, hi), blocks in self.blocks.items():
            out[lo:hi] = blocks
        return tuple(out), self.norm


class SimulatedJoiner:
    """What has arrived for a replica that is in no view: the simulated world's `JoinerPort`."""

    def __init__(self, owner: Owner) -> None:
        self.owner, self.loaded = owner, False
        self.serving: ServeId = (0, 0)
        self.course = owner.world.variant.joiner(owner.member, nullcontext(), self, owner.world.scenario.grace_s)
        self.came_in = False  # by replaying, with a loop that has yet to go through a step
        self.kept: algebra.Outcome | None = None  # the newest outcome, while the roll is called before it is applied
        self._newest: ServeId = (0, 0)
        self._streams: dict[int, _Stream] = {}
        self._shares: list[tuple[ServeId, Portion]] = []
        self._outcomes: dict[int, _Outcome] = {}
        self._early: list[tuple[ServeId, SentOutcome]] = []  # of a serving that was not told yet

    # --- from donors ---------------------------------------------------------------------------------------------
    def receive(self, serial: int, donor: str, kind: str, payload: Any) -> None:
        if kind == "begin":
            self._streams[serial] = _Stream(donor, payload)
        if (stream := self._streams.get(serial)) is None:
            return  # its stream was closed here
        if kind == "end":
            stream.ended = True
        elif kind == "flushed":
            stream.flushed = payload
        elif kind == "share":
            self._shares.append((stream.serve, payload))
        elif kind == "outcome" and stream.serve > self.serving:
            self._early.append((stream.serve, payload))
        elif kind == "outcome":
            self._keep(payload)

    def _keep(self, piece: SentOutcome) -> None:
        if self.loaded and piece.step < self.owner.member.committed:
            return
        kept = self._outcomes.setdefault(piece.step, _Outcome())
        if piece.whole:
            kept.blocks.clear()
        kept.blocks |= piece.blocks
        kept.norm, kept.last = piece.norm, kept.last or piece.last

    # --- as the protocol sees it ---------------------------------------------------------------------------------
    @property
    def steps(self) -> Collection[int]:
        return self._outcomes

    @property
    def streams(self) -> Sequence[_Stream]:
        return list(self._streams.values())

    def serve(self, serving: ServeId) -> None:
        newest, self._newest = self._newest, max(self._newest, serving)
        self.serving, self.loaded, self.kept = serving, False, None
        self._streams = {n: stream for n, stream in self._streams.items() if counts(stream.serve, serving, newest)}
        self._shares = [row for row in self._shares if counts(row[0], serving, newest)]
        self._outcomes.clear()
        early, self._early = self._early, [row for row in self._early if row[0] > serving]
        for serve, piece in early:
            if serve == serving:
                self._keep(piece)

    def _portions(self) -> list[Portion]:
        return [portion for serve, portion in self._shares if serve == self.serving]

    def snapshot(self) -> Literal["incomplete", "unfit", "whole"]:
        portions = self._portions()
        if len({portion.place for portion in portions}) < (portions[0].parts if portions else 1):
            return "incomplete"
        if len({portion.step for portion in portions}) > 1:  # it would ask again; no donors of one order do that
            self.owner.world.oracle.violated("Bits", f"{self.owner.name} was served shares of different steps")
            return "unfit"
        return "whole"

    def load(self) -> int:
        portion = self._portions()[0]
        self.owner.state, self.loaded = portion.state, True
        self.came_in = True
        self.owner.sums.clear()
        self._shares = [row for row in self._shares if row[0] != self.serving]
        self._outcomes = {step: kept for step, kept in self._outcomes.items() if step >= portion.step}
        self.owner.world.oracle.applied(self.owner, "snapshot", portion.step)
        return portion.step

    def outcome(self, step: int) -> Literal["incomplete", "whole", "last"]:
        kept = self._outcomes.get(step)
        if kept is None or not tiled(kept.blocks, algebra.BUCKETS * algebra.BLOCKS):
            return "incomplete"
        return "last" if kept.last else "whole"

    def replay(self, step: int, *, late: bool) -> None:
        self._apply_kept()
        outcome = self._outcomes.pop(step).value()
        self.owner.copies.step = step  # what the loops had made of their state came with it, and is kept
        if late:
            self.kept = outcome
        else:
            self.owner.apply(outcome)
            self.owner.world.oracle.applied(self.owner, "replay", step + 1)

    def _apply_kept(self) -> None:
        outcome, self.kept = self.kept, None
        if outcome is not None:
            self.owner.apply(outcome)

    def keep_live(self) -> None:
        self._streams = {serial: stream for serial, stream in self._streams.items() if not stream.ended}

    def over(self) -> None:
        self._streams.clear()
        self._shares.clear()
        self._outcomes.clear()
        self.serving, self.loaded = (0, 0), False

    def ready(self) -> None:
        """A wait is never mistaken for a computation here."""

    def say(self, messages: Sequence[Any]) -> None:
        self.owner.say(*messages)
        if messages:
            self.owner.world.point("ready", self.owner)

    # --- as the replica drives it --------------------------------------------------------------------------------
    def follow(self) -> None:
        """One turn: what arrived has been taken in."""
        self.course.begin_turn()
        self.course.advance()

    def give_up_if_orphaned(self) -> None:
        if self.owner.member.state in ("joining", "ready") and not self.owner.busy:
            self.course.give_up_if_orphaned(self.owner.kernel.now)

    def drained(self, view: View) -> bool:
        """Whether all that was sent before this view is here and replayed; else it is looked at again when something
        arrives, and after a while. Raises ViewAbandoned."""
        owner = self.owner
        waits_s = self.course.drain_s(view, owner.kernel.now)
        if waits_s > 0.0:
            owner.kernel.after(waits_s, owner, owner.run)
            return False
        self.course.drained(view, late=owner.member.switched and owner.member.num_rows == 1)
        return True

    def settle(self) -> None:
        """Apply what the roll call did not wait for."""
        if self.kept is not None:
            self._apply_kept()
            self.course.live()
            self.owner.world.oracle.applied(self.owner, "late replay")

    def settling(self, view: View) -> bool:
        """Whether there is something to apply after the roll; then that has begun."""
        if self.kept is not None:
            self.owner.occupy(self.owner.world.scenario.optimizer_s, self._settled, view)
        return self.kept is not None

    def _settled(self, view: View) -> None:
        self.settle()
        if self.owner.member.formed and not self.owner.member.over(view.id):
            self.owner.formed(view)
