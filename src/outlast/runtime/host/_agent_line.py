"""An agent's connection to the coordinator: called where that is now, and again when it ends.

What is said on it is the agent's matter; here it is only sent, or not. No wait but for a call, which is short.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from outlast.errors import WireRefusal
from outlast.runtime.host._host_system import HostSystem
from outlast.runtime.transport.coordinator_place import CoordinatorPlace
from outlast.runtime.transport.frames import Link
from outlast.runtime.transport.tls import Tls

__all__ = ["AgentLine"]

_SOON_S, _LATER_S, _SLOWER = 0.02, 0.5, 1.5  # between two calls: at first, at most, and by what factor each is later
_CALL_S, _CALL_ONE_THAT_MOVES_S = 2.0, 1.0
T = TypeVar("T")


class AgentLine:
    """`first`: a connection that there is already; `dial`: how the coordinator is called; `tls`: by this
    alone."""

    def __init__(
        self,
        name: str,
        run: str,
        secret: bytes,
        place: CoordinatorPlace,
        first: Link | None,
        system: HostSystem,
        dial: Callable[..., Link],
        tls: Tls | None,
    ) -> None:
        self._claim = secret, "agent", name
        self._run, self._place, self._system, self._dial = run, place, system, dial
        self._first, self._tls, self._complained = first, tls, ""
        self._called = place.now()
        self._heard_s = system.now_s()
        self.link: Link | None = None
        self.retry_s = _SOON_S

    @property
    def fds(self) -> list[int]:
        """What becomes readable when something is said, or it ends."""
        return [self.link.sock.fileno()] if self.link is not None else []

    @property
    def limit_s(self) -> float:
        """How long each wait of a call may take."""
        return _CALL_ONE_THAT_MOVES_S if self._place.moves else _CALL_S

    def connect(self) -> bool:
        """Call; False: try again in `retry_s`."""
        try:
            first, self._first = self._first, None
            self._called = self._place.now()
            self.link = first or self._dial(self._called, *self._claim, self.limit_s, self._run, self._tls)
        except (OSError, WireRefusal, msgspec.DecodeError) as error:
            self._complain(error)
            self.retry_s = min(_LATER_S, self.retry_s * _SLOWER)
            return False
        self.retry_s, self._heard_s = _SOON_S, self._system.now_s()
        return True

    def _complain(self, error: Exception) -> None:
        """Say once what somebody can do about it."""
        if isinstance(error, WireRefusal) and error.remedy and error.message != self._complained:
            self._complained = error.message
            print(f"outlast: the coordinator: {error}", file=sys.stderr, flush=True)

    @property
    def more(self) -> bool:
        """Whether something has been received already that `fds` do not tell of."""
        return self.link is not None and self.link.more

    def send(self, message: Any) -> None:
        """Say this, if there is anybody. OSError: the connection has ended."""
        if self.link is not None:
            self.link.send(message)

    def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """What is said next. OSError, msgspec.DecodeError, WireRefusal: no more is to be heard on this one."""
        assert self.link is not None
        message = self.link.receive(decoder)
        self._heard_s = self._system.now_s()
        return message

    def lost(self, silent_s: float) -> bool:
        """Whether this connection is worth no more: nothing was heard for so long, or the coordinator has moved."""
        silent = self._system.now_s() - self._heard_s > silent_s
        return self.link is not None and (silent or self._place.now() != self._called)

    def drop(self) -> None:
        if self.link is not None:
            self.link.close()
        self.link = None
