"""One member of a run: carries out what `core/protocol.Member` decides, over real sockets.

`resume()` forms views, calls rolls, hands outcomes over and follows as a spare until there is a microbatch to compute
or a step to exchange; `StepCourse` in `step.py` takes a step to its commit. Every wait ends on an event: a peer's
frame, the coordinator's word, or a deadline. An exception between verdict and commit leaves this object unusable (rule
12).
"""

from __future__ import annotations

import time

from outlast.core.phases import Phase
from outlast.core.protocol import (
    Compute,
    Exchange,
    Follow,
    Form,
    Leave,
    Wait,
)
from outlast.core.protocol.step.deciding import leave
from outlast.core.protocol.step.verdict import PartRows
from outlast.errors import Evicted, SignatureMismatch, StepMisuse, ViewAbandoned
from outlast.runtime.checks.row_admission import wait_for_more
from outlast.runtime.checks.state_comparison import Comparison, settled
from outlast.runtime.member._forming import Forming
from outlast.runtime.view.courses import Acts, carry_out, seat_of

__all__ = ["Replica"]


class Replica(Forming):
    """Carries a member from one thing to do to the next, until there is a microbatch to compute."""

    # --- until there is work -------------------------------------------------------------------------------------
    def resume(self) -> Compute | Exchange | Leave | Wait | None:
        """Whatever it takes until a microbatch, an exchange or the end is next. None: the run has closed for me. Wait:
        there is time for the loop to go through the step that it has yet to go through."""
        while True:
            with self.lock:
                todo = self.member.next(time.monotonic())
                self._raise_if_refused()
                if self.member.closed is not None:
                    return None
            try:
                if isinstance(todo, Compute | Exchange | Leave):
                    return todo
                if isinstance(todo, Wait) and todo.why == "held back" and self.engine.late is not None:
                    return todo
                if isinstance(todo, Wait):
                    self._depart_if_told(todo)
                    self._abandon_if_over()
                    self._idle()
                    if todo.why == "held back":
                        wait_for_more(self, self.donor, self.guards, self._entries, self._settled)
                    else:
                        self.spare.idle(self.patience(Phase.CONNECT))
                elif isinstance(todo, Follow):
                    self.spare.follow()
                elif isinstance(todo, Form):
                    self._form(todo.view)
                else:
                    self._hand_over(todo)
            except ViewAbandoned as reason:
                self.abandon(reason)

    def _idle(self) -> None:
        """Waiting for somebody's word is nobody's silence."""
        if self.clock.phase not in (Phase.IDLE, Phase.DEPART):
            self.enter(Phase.IDLE)

    def _settled(self) -> PartRows:
        """Fingerprints of what only outcomes change; none where the loop has written parameters since the newest: that
        of another may not have come so far."""
        self.enter(Phase.ROLL_CALL)
        state = self.engine.state
        known = {*state.names, *state.buffers, *state.elsewhere}
        return () if self.engine.loop.written() else settled(self.parts(), known)

    def _raise_if_refused(self) -> None:
        told = self.member.evicted
        if told is None:
            return
        where = f"replica {self.env.me}"
        if told.remedy == "facts":
            raise SignatureMismatch(
                f"this replica differs from its run: {told.reason}",
                where=where,
                did="it was refused; the run goes on",
                remedy="start every replica with the same script, data and environment, or bitwise = false; put a file "
                "that was changed back, or stop the run and start it again: it resumes",
            )
        raise Evicted(told.reason, where=where, did="the run went on without it", remedy="outlast why says more")

    def _depart_if_told(self, todo: Wait) -> None:
        if todo.why == "departed" and not self._departed:
            self._departed = True
            self.enter(Phase.DEPART)
            self._close_view()  # it ends as planned: nothing to report, the view after it is not to be disturbed
            self.donor.close()  # a joiner admitted by the same view waits for the last word

    def _abandon_if_over(self) -> None:
        if self.mesh is not None and self.member.over(self.mesh.view.id):
            self.abandon(ViewAbandoned("told to leave"))

    # --- before a step (`step.py`), and after the last -----------------------------------------------------------
    def begun(self, step: int) -> None:
        """The loop is inside the step, as all members' loops are or will be: what it made of the state until here is
        the step's. In a view's first one states are compared from here on."""
        self.engine.begun(step)
        if not self._compared and self.member.view is not None:
            self._compared = True
            self.engine.restore_buffers()
            self.comparison = Comparison(self._entries, self.engine.state, self.engine.moving)
            self.engine.frozen.append(self.comparison)

    def finish(self, todo: Leave) -> None:
        """The closing barrier: everybody committed the last step."""
        if self.mesh is None:
            raise ViewAbandoned("the view is closed")
        acts: Acts = {
            "save the end": lambda _: self._save_end(),
            "settle the end": lambda _: self._settle_end(todo),
            "say how far": lambda _: self.link.beat(),
        }
        carry_out(self, leave(seat_of(self)), acts)

    def _save_end(self) -> None:
        if self.saves is not None:
            self.saves.last()
        self.enter(Phase.FINAL)

    def _settle_end(self, todo: Leave) -> None:
        if self.saves is not None:
            self.enter(Phase.IDLE)
            self.saves.settle_last(todo.view.id, lambda: self._over(todo.view))
            self.saves.check_end()
        self.pace.parts.tell()

    def leave_early(self) -> None:
        """The loop ends before `until`: every replica must end at the same step."""
        with self.lock:
            self.member.until = self.member.committed
        while (todo := self.resume()) is not None:
            if not isinstance(todo, Leave):
                raise StepMisuse("the loop ended while others train on", where=f"replica {self.env.me}")
            self.close_barrier(todo)

    def close_barrier(self, todo: Leave) -> None:
        """`finish`, in this view or after the next one has formed."""
        try:
            self.finish(todo)
        except ViewAbandoned as reason:
            self.abandon(reason)

    def retire(self) -> None:
        """Training is over for this replica: keep nothing but the link to the coordinator."""
        if self._retired:
            return
        self._retired = True
        if not self._departed:  # else the agent reads from the phase that it left as planned
            self.progress.enter(Phase.IDLE)
        self.donor.close()
        self._close_view()
        if self.saves is not None:
            self.saves.close()
        self.link.forget_saves()
        self.siblings.end(self.member.done)
        self.spare.close()
        self.listener.close()

    def close(self) -> None:
        """Leave nothing behind."""
        self.retire()
        if self.saves is None or self.env.coordinator is not None:
            self.link.close()  # alone, a disk that comes back late wakes through its descriptor: it goes with the saves
