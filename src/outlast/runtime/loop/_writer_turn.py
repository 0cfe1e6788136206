"""Who writes what only one should: the first member of the view; after the last step, whoever the coordinator says.

After the loop a replica is told "not you" only once the script of the writer has ended, so that somebody is still there
to write should the writer die first (protocol, 43). It decides nothing: who follows is `core/protocol`'s matter.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import TYPE_CHECKING

from outlast.core.protocol import messages as m
from outlast.errors import MembershipError

if TYPE_CHECKING:
    from outlast.runtime.member.driver import Replica

__all__ = ["Turn"]

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LOOK_S = 1.0  # should another thread have taken the news that this one waits for


class Turn:
    """What one replica was told of writing."""

    def __init__(self, replica: Replica) -> None:
        self._replica, self._home = replica, os.getpid()
        self._told: dict[tuple[str, int], bool] = {}  # by line of the script: what it was told last
        self.asked = 0  # how often, in the loop

    @property
    def skipped(self) -> bool:
        """Whether some line was told before the last step that this is not the writer, and has not asked since; what
        the script left out for that reason cannot be made up for. A line that asks in every step asks again."""
        return not all(self._told.values())

    def mine(self) -> bool:
        """Whether this replica writes. After the last step it waits until that is certain."""
        member = self._replica.member
        if member.ended is not None:
            self._told.clear()
            return self._wait(member.ended)
        self.asked += 1
        mine = self._told[_line()] = self.leads()
        return mine

    def leads(self) -> bool:
        """Whether this replica is the first of the view."""
        member = self._replica.member
        return member.view is None or member.view.members[0] == member.me

    def _wait(self, told: m.Ended) -> bool:
        member, poll = self._replica.member, select.poll()
        poll.register(self._replica.link.wake_fd, select.POLLIN)
        while told.writer != member.me and not told.settled and os.getpid() == self._home:
            if member.closed != "finished":
                raise MembershipError(
                    f"the run is over: {member.closed}",
                    where=f"replica {member.me}, after the last step",
                    did="this replica stops",
                    remedy="outlast why tells what happened",
                )
            poll.poll(_LOOK_S * 1000.0)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._replica.link.wake_fd)
            told = member.ended or told
        return told.writer == member.me


def _line() -> tuple[str, int]:
    """The line outside of the runtime that asks."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
