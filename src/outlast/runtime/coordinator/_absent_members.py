"""A coordinator that has taken over calls the members that have not come to it: they cannot know where it is.

A host learns of a new coordinator from the record. One that is cut off from the record alone, often the last
coordinator's own, is reached by everybody else, and would be given up. A call is a handshake
(`transport/handshake.py`) whose claim says the epoch and the address; the member's socket hears it while the member
computes. Nothing is sent beside it, and it decides nothing: whether a call was heard shows when the member comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable, Mapping

from outlast.core.protocol import Coordinator
from outlast.errors import WireRefusal
from outlast.runtime.coordinator._port import Port
from outlast.runtime.transport.calls import Call
from outlast.runtime.transport.endpoints import lane_address
from outlast.runtime.transport.handshake import PeerClaim
from outlast.runtime.transport.tls import Tls

__all__ = ["begin_calls", "call_in"]

_FIRST_S = 0.25  # who sees the record has come by then
_AGAIN_S = 0.5
_CALL_S = 1.0
_AT_ONCE = 256


def begin_calls(
    environ: Mapping[str, str], record: str, coordinator: Coordinator, port: Port,
    unsound: Callable[[BaseException | None], None],
) -> Callable[[], object]:  # fmt: skip
    """`call_in` beside what the loop does else, where hosts share the record. Return what ends it. `unsound(error)`
    hears of its end."""
    if record == "sqlite":
        return lambda: None

    def absent() -> dict[str, str]:
        return {name: address for name, address in coordinator.callable_at.items() if name not in port.writers}

    secret, run, here = bytes.fromhex(environ["OUTLAST_SECRET"]), environ["OUTLAST_RUN"], environ["OUTLAST_COORDINATOR"]
    task = asyncio.ensure_future(call_in(secret, run, here, coordinator.epoch, absent, port.tls))
    task.add_done_callback(lambda ended: unsound(None if ended.cancelled() else ended.exception()))
    return task.cancel


async def call_in(
    secret: bytes, run: str, address: str, epoch: int, absent: Callable[[], Mapping[str, str]], tls: Tls | None = None
) -> None:
    """Tell those who are `absent` ({member: where it is called}) that the coordinator of this `epoch` is at `address`,
    again and again until nobody is: they have come, or were given up. Of a replica its lead is called. Never raises
    for what others do, nor for what one of them has said of where it is."""
    claim = PeerClaim("coordinator", address, (epoch, 0), run)
    room = asyncio.Semaphore(_AT_ONCE)

    async def call(member: str, at: str) -> None:
        async with room:
            with contextlib.suppress(OSError, WireRefusal, TimeoutError, ValueError, OverflowError):
                async with asyncio.timeout(_CALL_S):
                    await _call(Call(lane_address(at, 0), secret, member, claim, tls))

    await asyncio.sleep(_FIRST_S)
    while missing := absent():
        await asyncio.gather(*(call(member, at) for member, at in missing.items()))
        await asyncio.sleep(_AGAIN_S)


async def _call(call: Call) -> None:
    """Until the other end has heard it and hangs up. OSError, WireRefusal."""
    try:
        while True:
            await _ready(call.sock.fileno(), call.events)
            if call.connecting:
                call.connected()
            elif call.proved():
                break
        await _ready(call.sock.fileno(), select.POLLIN)
    finally:
        call.sock.close()


async def _ready(fd: int, events: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (
        (loop.add_writer, loop.remove_writer) if events & select.POLLOUT else (loop.add_reader, loop.remove_reader)
    )
    add(fd, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        remove(fd)
