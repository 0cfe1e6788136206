"""A script after its loop: the writer writes, the others end once they are told that somebody's script has ended."""

from __future__ import annotations

from outlast.core.protocol import messages as m
from outlast.prove.adversary._surroundings import Owner

__all__ = ["go_on"]


def go_on(replica: Owner, told: m.Ended) -> bool:
    """Whether there is something to do."""
    if replica.in_mesh:
        replica.close_view()
    if told.writer == replica.name:
        replica.occupy(replica.world.scenario.compute_s, _written, replica)
        return True
    if told.settled:
        _end(replica)
    return False


def _written(replica: Owner) -> None:
    replica.world.oracle.wrote(replica)
    _end(replica)


def _end(replica: Owner) -> None:
    replica.exit = "finished"
    replica.leave_run()
