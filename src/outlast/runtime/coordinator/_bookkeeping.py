"""What the coordinator's process makes of heartbeats: losses, the times of steps, and which step took far too long.

Every member tells the same steps; each is written down once. An earlier coordinator's journal says how far it had come.
Decides nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from outlast.core import events
from outlast.core.phases import WAITS, Phase
from outlast.core.protocol import Ledger, Span, StepTime
from outlast.core.step_parts import StepParts
from outlast.runtime.transport.frames import Heartbeat

__all__ = ["Bookkeeping", "ToldProgress"]

_MOST_NAMES, _LONGEST = 64, 64  # in one member's word about its steps
_WORTH_TELLING_S = 0.5  # of a step that took too long; shorter ones stand in the account alone
_CHANGE = Phase.CONNECT.name.lower()  # a member passes it in a change of view alone
_SETTLED_S = 3.0  # after a step's end everybody has told it: then it is known who did not wait for others


class ToldProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far earlier coordinators have written progress down. `next_loss`: the step after the last one whose loss is
    told; `committed`, `committed_at_s`: of the newest entry that counts steps, in Unix seconds, -1 where none does;
    `stalls`: that have no entry of their own yet; `recovered`: the step that a recovery is told of; the rest is the
    newest entry's."""

    next_loss: int = 0
    committed: int = -1
    committed_at_s: float = 0.0
    view: tuple[int, int] = (0, 0)
    stable: int = 0
    step_s: float = 0.0
    until: int = 0
    stalls: tuple[events.Stall, ...] = ()
    recovered: int = -1

    def after(self, told: events.ProgressMade | events.Stall | events.Recovery) -> ToldProgress:
        """Return what it is after the next entry."""
        if isinstance(told, events.Recovery):
            step = told.step if told.downtime_s else self.recovered
            left = tuple(stall for stall in self.stalls if not _recovered_from(stall, step))
            return msgspec.structs.replace(self, stalls=left, recovered=step)
        if isinstance(told, events.Stall):
            left = tuple(stall for stall in self.stalls if stall.step != told.step)
            return msgspec.structs.replace(self, stalls=left)
        counted = told if told.committed >= 0 else self
        epoch, n = told.view
        return ToldProgress(
            next_loss=max([self.next_loss, *(step + 1 for step, _ in told.losses[-1:])]),
            committed=counted.committed,
            committed_at_s=counted.committed_at_s,
            view=(epoch, n),
            stable=told.stable,
            step_s=told.step_s,
            until=told.until,
            stalls=tuple(told.stalls),
            recovered=self.recovered,
        )


class Bookkeeping:
    """Writes into the journal what members tell of their steps. `told`: what stands there already; `write(kind,
    **fields)` appends to it; within `patience_s` all have told a step; `apart_s`: Unix time less `clock`'s."""

    def __init__(
        self,
        told: ToldProgress,
        write: Callable[..., None],
        patience_s: float,
        apart_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write, self._apart_s, self._clock = write, apart_s, clock
        self._ledger = Ledger(patience_s=patience_s)
        if told.committed >= 0:
            self._ledger = Ledger(told.committed, told.committed_at_s - apart_s, patience_s=patience_s)
        self._losses: dict[int, float] = {}
        self._next_loss, self._told_stable = told.next_loss, 0
        self._beat = Heartbeat(  # the newest
            sender="", sent_s=0.0, view=told.view, stable=told.stable, step_s=told.step_s, until=told.until
        )
        # Each stands in the entries about progress from the moment it is known: this process may not live to tell it.
        self._stalls, self._uncarried = {stall.step: stall for stall in told.stalls}, False
        self._changes: dict[float, StepTime] = {}  # steps in which the view changed for long, by their commit
        self._recovered = told.recovered
        self._began_s = clock()

    def steps(self, member: str, times: Iterable[StepTime], wanted: int = 0) -> list[tuple[float, float]]:
        """Take the times of steps; (the commit before it, its commit) of each that is news. `wanted`: replicas that the
        run is to have now."""
        news, now_s, self._ledger.wanted = [], self._clock(), wanted
        for step in times:
            if step.outage_s >= _WORTH_TELLING_S:
                self._changes[step.end_s] = step
            pairs = self._ledger.take(step, now_s)
            news += pairs
            self._changed(pairs)
            if step.stalled_s >= _WORTH_TELLING_S:
                counted = any(at_s == step.end_s for _, at_s in pairs)
                self._stalled(member, step, counted or self._ledger.explains(step))
        return news

    def _stalled(self, member: str, step: StepTime, news: bool) -> None:
        known = self._stalls.get(step.step)
        if news or (known is not None and not known.replica and step.phase not in WAITS):
            self._uncarried = True
            self._stalls[step.step] = events.Stall(
                at_s=step.end_s + self._apart_s,
                step=step.step,
                seconds=step.stalled_s,
                usual_s=step.took_s - step.stalled_s,
                replica="" if step.phase in WAITS else member,
                phase=Phase(step.phase).name.lower(),
            )

    def _changed(self, pairs: Iterable[tuple[float, float]]) -> None:
        """Keep a stall for each of these steps in which the view changed for long, and no recovery tells of it."""
        for step in [self._changes.pop(at_s) for _, at_s in pairs if at_s in self._changes]:
            stall = events.Stall(
                at_s=step.end_s + self._apart_s,
                step=step.step,
                seconds=step.outage_s,
                usual_s=step.took_s - step.outage_s,
                replica="",
                phase=_CHANGE,
            )
            if not _recovered_from(stall, self._recovered):
                self._stalls[step.step], self._uncarried = stall, True
        self._changes = {at_s: step for at_s, step in self._changes.items() if at_s > self._ledger.until_s}

    def wrote(self, kind: str, fields: Mapping[str, Any]) -> None:
        """The coordinator's machine had this written. A recovery tells of the change of view before its step."""
        if kind == "recovery" and fields["downtime_s"]:
            self._recovered = fields["step"]
            stall = self._stalls.get(self._recovered)
            if stall is not None and _recovered_from(stall, self._recovered):
                del self._stalls[self._recovered]

    def heard(self, beat: Heartbeat) -> StepParts | None:
        """What one heartbeat says besides. Returns the member's word about its steps, if it said one that can be."""
        self._beat = beat
        told = ((step, loss) for step, loss in beat.losses if step >= self._next_loss)
        self._losses.update((step, loss) for step, loss in told if math.isfinite(loss))  # JSON has no other numbers
        if beat.parts is None or not _sound(beat.parts):
            return None
        self._write("step_anatomy", replica=beat.sender, **msgspec.to_builtins(beat.parts))
        return beat.parts

    def tell(self, messages: int, *, last: bool = False) -> list[tuple[float, float]]:
        """Write down what is news; at the end also that steps told before have become stable since. As of `steps`, what
        had waited and waits no longer."""
        settled = self._ledger.settle(self._clock(), last=last)
        self._changed(settled)
        spans, beat = self._ledger.drain(), self._beat
        if spans or self._losses or self._uncarried or (last and beat.stable > self._told_stable):
            losses, self._losses = sorted(self._losses.items()), {}
            self._next_loss, self._told_stable = (losses[-1][0] + 1 if losses else self._next_loss), beat.stable
            for span in spans[:-1]:
                self._progress(messages, [], span)
            self._progress(messages, losses, spans[-1] if spans else None)
        self._tell_stalls(last)
        return settled

    def _tell_stalls(self, last: bool) -> None:
        """Write down those that everybody has told by now. A successor waits for members to tell it as well."""
        since_s = self._clock() - _SETTLED_S
        for stall in list(self._stalls.values()):
            if last or since_s > max(stall.at_s - self._apart_s, self._began_s):
                del self._stalls[stall.step]
                self._write("stall", **{name: getattr(stall, name) for name in stall.__struct_fields__})

    def _progress(self, messages: int, losses: list[Any], span: Span | None) -> None:
        beat, self._uncarried = self._beat, False
        counted: dict[str, Any] = {}
        if span is not None:
            counted = {
                "first": span.first, "committed": span.committed, "seconds": span.seconds,
                "committed_at_s": span.until_s + self._apart_s,
            }  # fmt: skip
        self._write(
            "progress",
            view=list(beat.view),
            stable=beat.stable,
            losses=losses,
            step_s=beat.step_s,
            messages=messages,
            until=beat.until,
            stalls=msgspec.to_builtins(list(self._stalls.values())),
            **counted,
        )


def _recovered_from(stall: events.Stall, step: int) -> bool:
    """Whether the recovery before this step tells of what the stall would."""
    return stall.phase == _CHANGE and stall.step == step


def _sound(parts: StepParts) -> bool:
    """Whether a word can be written down: JSON has no other numbers than finite ones, and no member speaks of many."""
    numbers = [parts.batches[1], *parts.seconds.values(), *(wait.waited_s for wait in parts.waits.values())]
    names = [*parts.seconds, *parts.waits]
    return all(map(math.isfinite, numbers)) and len(names) <= _MOST_NAMES and all(len(n) <= _LONGEST for n in names)
