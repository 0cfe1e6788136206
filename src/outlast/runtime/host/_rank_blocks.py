"""The progress blocks of an agent's ranks, in its launcher's hands as well: when the agent dies, they die with it, and
nobody else knows what they had committed since their last heartbeats.

The agent hands each rank's block and pidfd over when it has started it, and names it again when it has told its
end. Neither waits for the other: what cannot be handed over at once, or mapped, is left out, and costs only an account
its last steps. The launcher does not judge what it reads; the coordinator is told.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

from outlast.core.protocol import messages as m
from outlast.runtime.host._host_system import HERE, HostSystem
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.transport.regions import Region

__all__ = ["BlocksShown", "RankBlocks", "exit_of"]

_DIE_S = 0.25  # for ranks to be gone after their agent: a signal on its way
_NAME_BYTES = 256


class BlocksShown:
    """The agent's end."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        fd = environ.get("OUTLAST_RANKS_FD")
        self._sock = socket.socket(fileno=int(fd)) if fd else None
        if self._sock is not None:
            self._sock.set_inheritable(False)
            self._sock.setblocking(False)
        self._ended: list[str] = []

    def began(self, member: str, block_fd: int, pid_fd: int) -> None:
        """A rank was started."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                socket.send_fds(self._sock, [member.encode()], [block_fd, pid_fd])

    def ended(self, member: str) -> None:
        """It has ended. Its block is kept until that is `told`: there may be no coordinator that has heard it."""
        self._ended.append(member)

    def told(self) -> None:
        """The ends so far are known from this agent, which goes on."""
        ended, self._ended = self._ended, []
        if self._sock is not None:
            for member in ended:
                with contextlib.suppress(OSError):
                    self._sock.send(member.encode())


class RankBlocks:
    """The launcher's end. `fd` is readable when there is news to take in; the agent is started with `passed`."""

    def __init__(self, system: HostSystem = HERE) -> None:
        self._system = system
        self._sock, self.passed = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        self._ranks: dict[str, tuple[Progress, int]] = {}

    @property
    def fd(self) -> int:
        return self._sock.fileno()

    def take_in(self) -> bool:
        """Whatever the agent has handed over; False once it has ended."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, _NAME_BYTES, 2)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            member = data.decode()
            self._forget(member)
            if len(fds) == 2:
                self._keep(member, *fds)
            else:  # it has ended, or this process may have no more descriptors
                for fd in fds:
                    os.close(fd)

    def _keep(self, member: str, block_fd: int, pid_fd: int) -> None:
        try:
            region = Region(Progress.SIZE, fd=block_fd)  # from here on the descriptor is the region's
        except OSError:  # no memory or no mapping is to be had just now
            os.close(pid_fd)
        else:
            self._ranks[member] = (Progress(region), pid_fd)

    def close(self, noticed_s: float, detail: str) -> tuple[m.Exited, ...]:
        """The agent has died, as `detail` says: what its ranks had done. Waits a moment for those still ending."""
        self.take_in()
        self._await_ends(noticed_s + _DIE_S)
        found = tuple(
            exit_of(member, block, noticed_s, "agent_lost", detail) for member, (block, _) in self._ranks.items()
        )
        for member in list(self._ranks):
            self._forget(member)
        self._sock.close()
        return tuple(found)

    def _await_ends(self, until_s: float) -> None:
        alive = {fd for _, fd in self._ranks.values()}
        while alive and (left_s := until_s - self._system.now_s()) > 0:
            alive.difference_update(self._system.ready(alive, left_s))

    def _forget(self, member: str) -> None:
        known = self._ranks.pop(member, None)
        if known is not None:
            known[0].region.close()
            os.close(known[1])


def exit_of(member: str, block: Progress, noticed_s: float, cause: m.Cause, detail: str) -> m.Exited:
    """What is told of a rank's end, with what its block says."""
    joined, steps = block.changes > 0, block.commits()
    return m.Exited(
        member=member,
        cause=cause,
        detail=detail,
        joined=joined,
        last_alive_s=block.read()[3] if joined else 0.0,
        noticed_at_s=noticed_s,
        committed=max(block.read()[1], steps[-1].step + 1 if steps else 0),
        steps=steps,
    )
