"""A script after its loop: the writer writes, the others end once they are told that somebody's script has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.core.protocol import messages as m

if TYPE_CHECKING:
    from outlast.prove.adversary._replica import Replica

__all__ = ["go_on"]


def go_on(replica: Replica, told: m.Ended) -> bool:
    """Whether there is something to do."""
    if replica.mesh is not None:
        replica.close_view()
    if told.writer == replica.name:
        replica.occupy(replica.world.scenario.compute_s, _written, replica)
        return True
    if told.settled:
        _end(replica)
    return False


def _written(replica: Replica) -> None:
    replica.world.oracle.wrote(replica)
    _end(replica)


def _end(replica: Replica) -> None:
    replica.exit = "finished"
    replica.leave_run()
