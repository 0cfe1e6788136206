"""Between two steps: the save that is due, and the last one of a run that is asked to stop.

Invariant: after the last save no step is begun, so what was committed is what was saved. All members conclude from the
same headers that it is the last one.
"""

from __future__ import annotations

from outlast.core.phases import Phase
from outlast.core.protocol.step.deciding import settle
from outlast.core.protocol.step.effects import Act
from outlast.errors import ViewAbandoned
from outlast.runtime.member.driver import Replica
from outlast.runtime.view.courses import carry_out, seat_of

__all__ = ["boundary"]


def boundary(replica: Replica) -> None:
    """Take the save that is due. If the run stops with it, wait for the stop, or to hear that the save came to nothing;
    that all have committed the step is settled as at the end of the loop, for no later step will show it."""
    saves, view, step = replica.saves, replica.member.view, replica.member.committed
    if saves is None:
        return
    saves.boundary()
    if replica.mesh is None or view is None or not saves.stopping(view, step):
        return
    over = lambda: replica.member.over(view.id)  # noqa: E731

    def settled(_: Act) -> None:
        replica.enter(Phase.IDLE)
        saves.settle_last(view.id, over)

    replica.link.beat()  # who is asked to stop says no more: how long the last step took would be told by nobody
    try:
        replica.enter(Phase.FINAL)
        carry_out(replica, settle(seat_of(replica)), {"settle the end": settled})
        saves.await_stop(view, step, over)
    except ViewAbandoned as reason:
        replica.abandon(reason)
