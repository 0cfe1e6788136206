"""The coordinator's port: who is let in, what each says until its connection ends, and what is said to it.

Bodies of frames go to `receive` as they come, each connection's in order. Strangers and broken words are counted, and
end the connection. Nothing is decided here: who may say what is checked by who receives.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import operator_messages as om
from outlast.errors import WireRefusal
from outlast.runtime.coordinator._caller_stream import CallerStream
from outlast.runtime.coordinator._hosts import of_another_run
from outlast.runtime.coordinator._refusals import Refusals
from outlast.runtime.coordinator._tls_transport import streams_over
from outlast.runtime.transport.door import Door
from outlast.runtime.transport.frames import COORDINATOR, frame
from outlast.runtime.transport.handshake import PeerClaim
from outlast.runtime.transport.seal import Keys
from outlast.runtime.transport.tls import Tls

__all__ = ["Port", "SentAway"]

_LAST_WORD_S = 2.0  # for somebody who is sent away to hear why
_KEEPALIVE = {socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}  # for hosts that are gone
_LONGEST_S = 32767  # that a connection may be idle for; the kernel's own bound


class SentAway(Exception):
    """A host is not taken: what it is told. Nothing that it says beside its offer is heard."""

    def __init__(self, told: hm.Turned) -> None:
        self.told = told


class Port:
    """`receive(role, name, body)` takes a frame; `hung_up(name)` hears of a connection's end; `unsound(error)` hears
    what taking a frame raised, if it was not about the connection. `idle_s`: for so long a path may carry nothing and
    its connections do not end. `writers`: the newest connection of each name."""

    def __init__(
        self,
        secret: bytes,
        run: str,
        epoch: int,
        refusals: Refusals,
        *,
        receive: Callable[[str, str, bytes], None],
        hung_up: Callable[[str], None],
        unsound: Callable[[BaseException | None], None],
        idle_s: float,
    ) -> None:
        self._secret, self._run, self._epoch, self._refusals = secret, run, epoch, refusals
        self._receive, self._hung_up, self._unsound = receive, hung_up, unsound
        self._keepalive = {socket.TCP_KEEPIDLE: min(math.ceil(idle_s) + 1, _LONGEST_S), **_KEEPALIVE}
        self.writers: dict[str, CallerStream] = {}
        self.door: Door | None = None
        self.tls: Tls | None = None
        self._conversations: set[asyncio.Task[None]] = set()

    def open(self, sock: socket.socket, tls: Tls | None = None) -> None:
        """Let callers in at this listening socket; with `tls` by that alone."""
        self.tls, self.door = tls, Door(sock, self._secret, COORDINATOR, self._admit, self._refuse, tls)
        asyncio.get_running_loop().add_reader(self.door.fileno(), self.door.turn)

    def turn(self) -> None:
        """Send strangers away who say nothing."""
        if self.door is not None:
            self.door.turn()

    @property
    def crowded(self) -> bool:
        """Whether there are more callers than come in, so that one of the run's own may be among them."""
        return self.door is not None and self.door.crowded

    def send(self, names: Iterable[str], data: bytes) -> None:
        """A frame to each of these; who is not connected misses it."""
        for name in names:
            if (writer := self.writers.get(name)) is not None:
                writer.write(data)

    def hang_up(self, names: Iterable[str]) -> None:
        """End these connections at once."""
        for name in names:
            if (writer := self.writers.get(name)) is not None:
                writer.abort()

    async def drain(self) -> None:
        """Wait until all has been sent that was said, for everybody who still takes it."""
        for writer in list(self.writers.values()):
            try:
                async with asyncio.timeout(2.0):
                    await writer.drain()
            except (TimeoutError, ConnectionError):
                continue

    async def close(self) -> None:
        """Let nobody in any more, and hang up."""
        if self.door is not None:
            asyncio.get_running_loop().remove_reader(self.door.fileno())
            self.door.close()
        tasks = list(self._conversations)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- one connection ------------------------------------------------------------------------------------------
    def _admit(self, sock: socket.socket, claim: PeerClaim, keys: Keys) -> None:
        if claim.role not in ("member", "agent", "launcher", "operator") or (
            (claim.role == "operator") != om.is_operator(claim.name)
        ):
            sock.close()
            return
        task = asyncio.ensure_future(self._serve(sock, claim, keys))
        self._conversations.add(task)
        task.add_done_callback(self._ended)

    def _refuse(self, reason: str, who: str) -> None:
        self._refusals.add("the coordinator's port", reason, who)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._conversations.discard(task)
        self._unsound(None if task.cancelled() else task.exception())

    async def _taken(self, sock: socket.socket, keys: Keys) -> CallerStream:
        """OSError."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in self._keepalive.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        return CallerStream(*await streams_over(sock), keys)

    async def _serve(self, sock: socket.socket, claim: PeerClaim, keys: Keys) -> None:
        """A proved connection, to its end."""
        try:
            writer = await self._taken(sock, keys)
        except OSError:  # the system has no room for it just now: who called calls again
            sock.close()
            return
        if (stranger := of_another_run(self._run, self._epoch, claim)) is not None:
            self._refusals.add("the coordinator's port", "of another run", claim.name)
            await _send_away(writer, stranger)
            return
        self.writers[claim.name] = writer
        try:
            while True:
                self._receive(claim.role, claim.name, await writer.read())
        except SentAway as sent:
            await _send_away(writer, sent.told)
        except WireRefusal as error:
            self._refusals.add("", error.message, claim.name)
        except msgspec.DecodeError:
            self._refusals.add("", "a message that is not of this protocol", claim.name)
        except (OSError, asyncio.IncompleteReadError):
            pass  # it ended: its agent, or its own return, says why
        finally:
            if self.writers.get(claim.name) is writer:
                del self.writers[claim.name]
                self._hung_up(claim.name)
            writer.close()


async def _send_away(caller: CallerStream, told: Any) -> None:
    """Say why, and hear nothing more."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_LAST_WORD_S):
            await caller.say_last(frame(told))
    caller.close()
