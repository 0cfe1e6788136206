"""Whom this member waits for, pair by pair: seconds, late headers, and what TCP had to send again.

Role: told to the coordinator now and then, for people and for finding bad links (`outlast health links --run`). The
training thread's alone. Decides nothing, and costs a clock read for each wait and a system call a peer for each report.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median_low

from outlast.core.step_parts import PairWait
from outlast.runtime.transport.connections import Connection

__all__ = ["PairWaits"]

_LATE_S = 0.02  # later than the others' by more than that, and by more than these had taken
_MOST_PEERS = 16  # of whom one member speaks
_INFO_BYTES, _UNANSWERED, _RESENT, _SEGMENTS = 160, 2, 100, 156  # of Linux's struct tcp_info, and places in it


class PairWaits:
    """Measures how long each peer was waited for. `conns`: those of the view at hand."""

    def __init__(self) -> None:
        self.conns: Mapping[str, Connection] = {}
        self._waited: Counter[str] = Counter()
        self._exchanges: Counter[str] = Counter()
        self._late: Counter[str] = Counter()
        self._segments: Counter[str] = Counter()  # of connections that are closed
        self._resent: Counter[str] = Counter()

    def took(self, absent: Sequence[str], seconds: float) -> None:
        """So long a wait for all of these."""
        for name in absent:
            self._waited[name] += seconds / len(absent)  # type: ignore[assignment]

    def headed(self, arrived: Mapping[str, float], began_s: float) -> None:
        """All headers of a step are here. One that came much later than those of others do was held up on its way, or
        its sender was; with a single peer there is nothing to compare."""
        waits = {name: max(0.0, at_s - began_s) for name, at_s in arrived.items()}
        usual_s = median_low(waits.values()) if waits else 0.0
        for name, seconds in waits.items():
            self._exchanges[name] += 1
            self._late[name] += seconds - usual_s > max(_LATE_S, usual_s)

    def settle(self) -> None:
        """The view's connections are about to be closed."""
        for name, conn in self.conns.items():
            segments, resent = _counted(conn.sock)
            self._segments[name] += segments
            self._resent[name] += resent
        self.conns = {}

    def told(self) -> dict[str, PairWait]:
        """All so far, of the peers that follow me in no particular order: of many, only of some."""
        names = list(dict.fromkeys([*self.conns, *self._segments, *self._exchanges, *self._waited]))[:_MOST_PEERS]
        return {name: self._of(name) for name in names}

    def _of(self, name: str) -> PairWait:
        conn = self.conns.get(name)
        segments, resent = _counted(conn.sock) if conn is not None else (0, 0)
        return PairWait(
            waited_s=float(self._waited[name]),
            exchanges=self._exchanges[name],
            late=self._late[name],
            segments=self._segments[name] + segments,
            resent=self._resent[name] + resent,
        )


def _counted(sock: socket.socket) -> tuple[int, int]:
    """(segments with data that TCP has sent, of those it sent again); zeros on one machine, or once it is closed. What
    a peer never answered is not counted: it may be dead, which is no fault of a link."""
    if sock.family == socket.AF_UNIX:
        return 0, 0
    with contextlib.suppress(OSError):
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        if len(info) >= _SEGMENTS + 4:
            (segments,), (resent,) = struct.unpack_from("=I", info, _SEGMENTS), struct.unpack_from("=I", info, _RESENT)
            return segments, max(0, resent - info[_UNANSWERED])
    return 0, 0
