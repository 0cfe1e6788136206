"""One replica's part in the run's checkpoints: save when all can, promise what is durable, hear what became of it.

All members save the same step because they read it from the same headers: each says there whether it wants a save and
whether it could take one (`vote`), and the step after which nobody objects is saved at its boundary, just before the
loop's next step begins: user code that follows a step is then done, and forward and backward hide the copying. A part
is reported once it is durable *and* its step is stable; the coordinator publishes. Alone, this process publishes.
Never raises into a step because a disk failed. What to load, and when, is `resume.py`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import os
import select
import time
from collections.abc import Callable, Sequence

from outlast.checkpoint import save_events as ce
from outlast.core.protocol import View, ViewId
from outlast.core.protocol.saves.agreement import CANNOT
from outlast.core.protocol.saves.commit import SaveId
from outlast.errors import OutlastError, Unsaved, ViewAbandoned
from outlast.runtime.saving._save_flights import SaveFlight, SaveFlights
from outlast.runtime.saving.unsaved import end_with

__all__ = ["Saves"]

_BASE_S = 60.0  # how long the end of a loop waits for the coordinator to have looked into the store


class Saves(SaveFlights):
    """Decides with the other members which steps are saved, and has this one's parts written. `send`: to the
    coordinator, best effort; None in a fleet of one. `verified`: the newest step whose state the guards have
    verified."""

    # --- which step ----------------------------------------------------------------------------------------------
    def vote(self, step: int) -> int:
        """For my header of `step`: CANNOT, 0 for no wish, or the number of the newest request that I know."""
        with self._lock:
            every = self.settings.every
            if every and (step + 1) % every == 0:
                self._votes.wanted = f"every {every} steps"
            elif self._record is not None and self._record.due_s(time.monotonic()) <= 0:
                self._votes.wanted = self._record.saving(time.monotonic()).reason
            vote = self._votes.vote(self.ready() and self.others.ready)
            if vote == CANNOT and self._votes.wished:
                self._tell_held_up(step)
            return vote

    def _tell_held_up(self, step: int) -> None:
        """A save is wanted, and one that never came back from its disk has the memory for it: say so, once."""
        reason = self.archive.held_up
        if reason and reason != self._held_up:
            self._on_event(ce.SaveDelayed(step=step, reason=reason))
        self._held_up = reason

    def ready(self) -> bool:
        """Whether this view's share is known here, with memory for it that is free."""
        view = self.member.view
        prepared = self._prepared is not None and self._prepared.done()
        here = view is not None and view.id == self._view
        return self._base is not None and here and prepared and self.archive.can_save

    def decided(self, view: View, committed: int, votes: Sequence[int]) -> None:
        """All headers of the step are in: the same conclusion on every member."""
        self._certify_published(view)
        self._votes.decided(view.id, committed, votes)

    def _certify_published(self, view: View) -> None:
        """The guards verified a state at or after the newest generation's: it is certified. One member says so."""
        verified = self._verified()
        if verified is not None and self._certified < self._saved <= verified:
            self._certified = verified
            if view.members[0] == self.env.me:
                self.certify(verified)

    def want(self, reason: str) -> None:
        """Save after the next step in which all members can. Any thread, also a signal's handler."""
        self._votes.wanted = reason

    # --- taking one ----------------------------------------------------------------------------------------------
    def boundary(self) -> None:
        """Between two steps of the loop, the next one not begun: take the save that the headers decided on."""
        view, committed = self.member.view, self.member.committed
        if view is None or not self.member.formed or self.member.over(view.id):
            return
        with self._lock:
            reason = self._votes.due(view.id, committed)
        if reason is not None:
            self._take(view, committed, reason)
        self.enter(view, committed)
        if self.env.until:
            self._keep_up(view, committed)

    def enter(self, view: View, committed: int) -> None:
        """A step of this view is next."""
        if committed:  # before the first step optimizers have no state: the slots would be too small
            self._enter(view)

    def follow(self, view: View, step: int, reason: str, attempt: int, wait: bool) -> None:
        """Take the save that the lead of this replica takes."""
        if wait:
            self._prepare(view)
        self._take(view, step, reason, attempt=attempt, wait=wait)

    def stopping(self, view: View, step: int) -> bool:
        """Whether the save just tried is the last of a run that is asked to stop. The same on every member."""
        return self._votes.stops(view.id, step)

    def await_stop(self, view: View, step: int, over: Callable[[], bool]) -> None:
        """The stop follows the save's publication, or the end of the time for it. Returns if the save has come to
        nothing: another is asked for. Raises ViewAbandoned."""
        self._await(lambda: not self._votes.awaits_stop(view.id, step), over, self.env.config.stop_save_s)

    def _keep_up(self, view: View, committed: int) -> None:
        """For `resume-check`, which compares each step: the loop waits, so that no save is passed over."""
        if self._prepared is not None:
            self._prepared.result()
        with contextlib.suppress(ViewAbandoned):
            self._await(
                lambda: all(save.step >= committed for save in list(self._flights)), lambda: self.member.over(view.id)
            )

    def _enter(self, view: View) -> None:
        """A view: my share of the writing is another one, and memory for it is made beside training."""
        if view.id != self._view:
            self._view = view.id
            place, width = view.members.index(self.env.me), self.env.width
            self.archive.set_members(place * width + self.env.place, len(view.members) * width)
            self._prepared = self.archive.prepare_later(self._tree())

    def _take(self, view: View, step: int, reason: str, *, attempt: int = 0, wait: bool = False) -> None:
        assert self._base is not None
        self.others.take(view.id, step, reason, attempt, wait)
        self._votes.taken = (view.id, step)
        save = SaveId(epoch=self._base + view.id.epoch, n=view.id.n, step=step, attempt=attempt)
        began_s, tree = time.monotonic(), self._tree()
        try:
            handle = self.archive.save(
                step, tree, view=save.view, attempt=attempt, changing=self._changing(), wait=wait
            )
            if handle is None:  # the state has grown: memory for it is made, and then it is tried again
                self._prepared = self.archive.prepare_later(tree)
        except (OutlastError, OSError, MemoryError) as error:  # it has grown something that cannot be kept
            self._lost(save, f"{type(error).__name__}: {error}")
            return
        if handle is None:
            self._lost(save, "no snapshot slot was free")
            self.want(self._votes.wanted or reason or "a save that was delayed")
            return
        # After the last step there is no later one to wait for.
        asked = self._votes.asked if wait else self._votes.answers(view.id, step)
        flight = SaveFlight(
            save=handle.save, view=view.id, handle=handle, reason=reason, asked=asked,
            blocked_s=time.monotonic() - began_s, held=self._held,
        )  # fmt: skip
        self._held(flight.blocked_s)
        with self._lock:
            self._flights[save] = flight
            if self._record is not None:
                self._record.began(began_s)
        self.engine.frozen.append(flight)
        if self._send is not None:
            self._send([self._began_message(flight)])
        handle.durable.add_done_callback(lambda done: self._durable(flight, done))

    def _changing(self) -> list[str]:
        """What changes inside a step: buffers, and what the loop registered. outlast's own waits as parameters do."""
        theirs = [key for key in self.engine.state.extra if not key.startswith("outlast.")]
        return [*(f"model.{name}" for name in self.engine.state.buffers), *(f"extra.{key}*" for key in theirs)]

    # --- the end -------------------------------------------------------------------------------------------------
    def last(self, *, final: bool = False) -> None:
        """The loop is over: save what it leaves, unless this very step was tried in this view. `final`: user code may
        change the state from here on, so it is copied before this returns, and not taken again."""
        view, step = self.member.view, self.member.committed
        if view is not None and not self._ended:  # a short run is over before it is known where epochs begin
            self._await(lambda: self._base is not None, lambda: self.member.over(view.id), _BASE_S)
        if self._base is None or self._ended or view is None or not self.member.formed or self.member.over(view.id):
            return
        self._ended = final
        if self._votes.tried(view.id, step):
            return
        self._prepare(view)
        self._take(view, step, "the loop ended", attempt=1, wait=True)
        if final:
            self.copied()

    def _prepare(self, view: View) -> None:
        """Wait until a save can be taken. Raises ViewAbandoned if the view ends first."""
        self._enter(view)
        assert self._prepared is not None
        concurrent.futures.wait([self._prepared], self.settings.timeout_s)
        self._await(lambda: self.archive.can_save or bool(self.archive.held_up), lambda: self.member.over(view.id))

    def copied(self) -> None:
        """Wait until the state may change, whatever is done to it."""
        for flight in list(self._flights.values()):
            flight.wait()

    def forgo(self) -> None:
        """Save nothing more: what is there is no longer what the last step left."""
        self._ended = True

    def settle_last(self, view: ViewId, over: Callable[[], bool]) -> None:
        """Every member has passed the last barrier: wait for the last save. Raises ViewAbandoned if the view ends."""
        self.others.stable(view, self.member.committed)
        self.stable(view, self.member.committed)
        self._await(lambda: not self._flights, over)

    def _await(self, done: Callable[[], bool], over: Callable[[], bool], limit_s: float = math.inf) -> None:
        """Until `done`, or the time for it is up. Raises ViewAbandoned if the view is over."""
        poll, end_s = select.poll(), time.monotonic() + min(limit_s, self.settings.timeout_s)
        poll.register(self._wake_fd, select.POLLIN)
        while not done() and time.monotonic() < end_s:
            if over():
                raise ViewAbandoned("the view ended while its last save was written")
            poll.poll(1000.0)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)

    def check_end(self) -> None:
        """After `settle_last`, in a fleet of one: is the last step in a checkpoint? Else the process ends with a code
        of its own (a coordinator sees to it in a fleet)."""
        done = self.member.committed
        if self.alone and self._newest[1] < done:
            end_with(Unsaved.of(done, self._newest[1], self.archive.store.url, self._why_lost))

    def close(self) -> None:
        """Stop. Alone, what is under way is finished first: nobody else would."""
        self.archive.close(wait=self.alone)
        if self.alone:
            for place in self._places:
                place.leave()
