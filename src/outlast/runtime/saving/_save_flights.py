"""What becomes of a member's saves once they have begun: promises, answers, failures, and what the coordinator says.

What a member's saves have is put together here, once. Which step is saved, and the end, are `member_saves.py`'s.
"""

from __future__ import annotations

import concurrent.futures
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outlast.checkpoint import Handle
from outlast.checkpoint import save_events as ce
from outlast.checkpoint.room import give_back, make_room
from outlast.core.policy import RunRecord
from outlast.core.protocol import ViewId
from outlast.core.protocol.saves.agreement import LostSaves, SavePromise, SaveVotes, learn_stable
from outlast.core.protocol.saves.commit import PartReport, SaveId
from outlast.runtime.host.environment import Environment
from outlast.runtime.saving.archives import archive_of, occupied
from outlast.runtime.saving.other_ranks import OtherRanks, SavingMember
from outlast.runtime.saving.restore import tree_of
from outlast.runtime.settings.save_settings import SaveSettings
from outlast.runtime.training.engine import Engine
from outlast.runtime.transport import save_messages as wire

__all__ = ["SaveFlight", "SaveFlights"]


@dataclass(slots=True, kw_only=True)
class SaveFlight(SavePromise):
    """A save that nobody has settled yet. `sent`: the promise, as it was given."""

    handle: Handle
    reason: str
    asked: int  # the newest request that it answers
    blocked_s: float
    held: Callable[[float], None]
    sent: wire.SaveDone | None = None

    def wait(self) -> None:
        """Before the optimizer writes; as `Frozen.wait`."""
        began_s = time.monotonic()
        self.handle.wait_copied()
        took_s = time.monotonic() - began_s
        self.blocked_s += took_s
        self.held(took_s)


class SaveFlights:
    """Takes a member's parts of saves from memory to storage. `send`: to the coordinator, best effort; None in a fleet
    of one. `verified`: the newest step whose state the guards have verified."""

    def __init__(
        self,
        env: Environment,
        engine: Engine,
        member: SavingMember,
        settings: SaveSettings,
        facts: dict[str, str],
        *,
        send: Callable[[Sequence[Any]], None] | None,
        wake_fd: int,
        verified: Callable[[], int | None],
    ) -> None:
        self.env, self.engine, self.member, self.settings, self.facts = env, engine, member, settings, facts
        self.others = OtherRanks()
        self._places = occupied(env, settings)
        self.archive = archive_of(env, settings, facts, on_event=self._on_event)
        self._send, self._wake_fd, self._verified = send, wake_fd, verified
        self.wakes: object = None  # what has that descriptor: it is open as long as a save's thread may write to it
        self._lock = threading.RLock()
        self._flights: dict[SaveId, SaveFlight] = {}
        self._unsaid: list[wire.SaveSaid] = []  # until the coordinator is there to hear it
        self._connected = False
        self._base: int | None = None
        self._view: ViewId | None = None
        self._prepared: concurrent.futures.Future[None] | None = None
        self._votes, self._gone = SaveVotes(), LostSaves()
        self._held_up = self._why_lost = ""
        self._ended = False
        self._saved = self._certified = -1  # the newest step published, and the newest one certified since
        self.held_s = 0.0  # by saves, all of this process together
        self._newest = (-1, -1)  # alone: (epoch, step) of the newest generation of ours
        self._record: RunRecord | None = None
        if send is None and not settings.every:
            self._record = RunRecord(min_s=settings.min_s)
            self._record.begin(time.monotonic())

    @property
    def alone(self) -> bool:
        """Whether this process publishes."""
        return self._send is None

    def _tree(self) -> dict[str, Any]:
        self.engine.restore_buffers()
        engine, spread = self.engine, self.env.width > 1
        at = self.member.committed
        return tree_of(engine.state, at, self.facts, engine.stopped, engine.stop_wanted, spread=spread)

    def _held(self, seconds: float) -> None:
        self.held_s += seconds

    def stable(self, view: ViewId, stable: int) -> None:
        """Steps up to `stable` can be taken back by nothing; learnt in `view`. Promises of other views lapse."""
        if not self._flights:
            return
        with self._lock:
            lapsed = learn_stable(self._flights.values(), view, stable)
            for flight in lapsed:
                del self._flights[flight.save]
            kept = list(self._flights.values())
        for flight in lapsed:
            self._let_go(flight, None)
        for flight in kept:
            self._promise(flight)

    def _durable(self, flight: SaveFlight, done: concurrent.futures.Future[PartReport]) -> None:
        """In the writer's thread."""
        error = done.exception()
        if error is None:
            flight.durable = True
            self._promise(flight)
            return
        with self._lock:
            known = self._flights.pop(flight.handle.save, None) is flight
        if known:  # else it was given up before, by a view change or for a later one
            self._lost(flight.handle.save, str(error))

    def _promise(self, flight: SaveFlight) -> None:
        """Durable and stable: say so, once."""
        with self._lock:
            handle = flight.handle
            if not (self._flights.get(handle.save) is flight and flight.is_due):
                return
            flight.given = True
            flight.sent = self._done_message(flight, handle.durable.result())
        if self._send is not None:
            self._send([flight.sent])
        else:
            self.archive.commit_later(handle).add_done_callback(lambda done: self._committed(flight, done))

    def _began_message(self, flight: SaveFlight) -> wire.SaveBegun:
        handle = flight.handle
        return wire.SaveBegun(member=self.env.me, save=handle.save, writer=handle.part.writer, reason=flight.reason)

    def _lost_message(self, save: SaveId, reason: str) -> wire.SaveLost:
        return wire.SaveLost(member=self.env.me, save=save, writer=self.archive.replica, reason=reason)

    def _done_message(self, flight: SaveFlight, report: PartReport) -> wire.SaveDone:
        handle, until = flight.handle, self.member.until or 0
        return wire.SaveDone(
            member=self.env.me,
            save=handle.save,
            report=report,
            reason=flight.reason,
            asked=flight.asked,
            state_bytes=handle.state_bytes,
            staged_bytes=handle.staged_bytes,
            written_bytes=handle.written_bytes,
            blocked_s=flight.blocked_s,
            copied_s=handle.copied_s,
            durable_s=handle.durable_s,
            steps_left=max(0, until - self.member.committed),
        )

    def _lost(self, save: SaveId, reason: str) -> None:
        self._why_lost = reason
        with self._lock:
            self._gone.add(save, reason)
        if self._record is not None:
            self._record.failed()
        if self._send is None:
            print(f"outlast: the save of step {save.step} failed, training goes on: {reason}", file=sys.stderr)
        else:
            self._send([self._lost_message(save, reason)])
        os.eventfd_write(self._wake_fd, 1)

    def _committed(self, flight: SaveFlight, done: concurrent.futures.Future[int]) -> None:
        """In a fleet of one: published, pruned, and perhaps being drained."""
        error = done.exception()
        with self._lock:
            self._flights.pop(flight.handle.save, None)
        save = flight.handle.save
        if error is not None:
            self._let_go(flight, None)
            give_back(self.archive.store, save)
            if (save.epoch, save.step) > self._newest:  # else a later one was faster
                self._lost(save, str(error))
        else:
            self._newest = max(self._newest, (save.epoch, save.step))
            if self._record is not None:
                self._record.saved(flight.blocked_s, flight.handle.durable_s)
        os.eventfd_write(self._wake_fd, 1)

    def _let_go(self, flight: SaveFlight, generation: int | None) -> None:
        """Tell the engine, but never while the save's own threads still use its slot."""
        save = flight.handle.save
        flight.handle.durable.add_done_callback(lambda _: self._settled(save, generation))

    def _settled(self, save: SaveId, generation: int | None) -> None:
        self.archive.settle(save, generation)
        os.eventfd_write(self._wake_fd, 1)

    def told(self, message: wire.ToMember) -> None:
        """From the coordinator's link, on its thread."""
        self.others.said(message)
        with self._lock:
            if isinstance(message, wire.SaveBase):
                self._base = message.base
            elif isinstance(message, wire.SaveNow):
                self._votes.request(message.number, message.reason)
            else:
                flight = self._flights.pop(message.save, None)
                if message.generation is not None:
                    self._saved = max(self._saved, message.save.step)
                    self._gone.passed(message.save)
                elif self._base is not None:
                    self._gone.add(message.save, message.reason)
                    self._votes.lost(ViewId(message.save.epoch - self._base, message.save.n), message.save.step)
                    os.eventfd_write(self._wake_fd, 1)
                if flight is not None:
                    self._let_go(flight, message.generation)

    def repeat(self) -> list[wire.FromMember]:
        """What a coordinator that was out of reach may have missed: what has begun, promises not yet answered, and what
        came to nothing in this view, which only the one before it may have been told or have decided."""
        self.others.said(None)
        view = self.member.view
        with self._lock:
            unsaid, self._unsaid, self._connected = self._unsaid, [], True
            lost = self._gone.of((self._base + view.id.epoch, view.id.n)) if self._base is not None and view else []
            return [
                *unsaid,
                *(flight.sent or self._began_message(flight) for flight in self._flights.values()),
                *(self._lost_message(save, why) for save, why in lost),
            ]

    def certify(self, step: int) -> None:
        """The state after `step` was verified: the newest generation up to it is certified."""
        if self._send is not None:
            self._send([wire.SaveCertified(member=self.env.me, step=step)])

    def _on_event(self, event: ce.CheckpointEvent) -> None:
        """From the engine, on any of its threads."""
        if self.env.place and isinstance(event, ce.Loaded | ce.Differs | ce.Unwritable):
            return  # the lead of this replica says so
        if isinstance(event, ce.Unwritable) and self.alone:
            print(f"outlast: checkpoints: {event.reason}", file=sys.stderr)
        if isinstance(event, ce.Neighbour):  # who publishes sees it: this process is alone
            print(f"outlast: checkpoints: {event.detail}", file=sys.stderr)
        if not isinstance(event, ce.SaveDelayed | ce.SaveRetried | ce.Skipped | ce.Loaded | ce.Differs | ce.Unwritable):
            return
        if self._send is None:
            if isinstance(event, ce.SaveRetried) and event.full:
                make_room(self.archive)
            if isinstance(event, ce.SaveDelayed | ce.SaveRetried | ce.Skipped):
                print(f"outlast: checkpoints: {_in_words(event)}", file=sys.stderr)
            return
        said = wire.SaveSaid(member=self.env.me, event=event)
        with self._lock:
            if not self._connected:
                self._unsaid.append(said)
                return
        self._send([said])


def _in_words(event: ce.SaveDelayed | ce.SaveRetried | ce.Skipped) -> str:
    """What a fleet of one tells its terminal, having no journal."""
    match event:
        case ce.SaveDelayed():
            return f"the save of step {event.step} is delayed: {event.reason}"
        case ce.SaveRetried():
            return f"writing {event.save} is tried again (time {event.attempt}): {event.reason}"
        case ce.Skipped():
            which = f"generation {event.generation}" if event.generation >= 0 else "a place"
            return f"passed over {which} ({event.tier}, {event.file or event.url}): {event.reason}"
