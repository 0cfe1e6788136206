"""The protocol's courses over sockets: what a course asks is said to all and awaited, what it tells is sent.

The counterpart of `prove/adversary/_rounds.py`, which carries the same courses (`core/protocol/step/effects.py` says
what one is) out in virtual time. Decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from outlast.core.phases import Phase
from outlast.core.protocol.step.effects import Act, AskAll, ChannelName, Course, Effect, Seat, replying
from outlast.errors import ViewAbandoned
from outlast.runtime.transport.mesh import Mesh
from outlast.runtime.transport.peer_messages import CloserLook, Extra, Final, HeaderSaid, Parts, Prints, Roll
from outlast.runtime.view.port import ViewPort
from outlast.runtime.view.rounds import HOLD, SLICES, STATES, VOTE, Channel

__all__ = ["Acts", "carry_out", "go_through", "seat_of"]

T = TypeVar("T")
Acts = Mapping[str, Callable[[Act], Iterator[Any] | None]]
"""How each `Act` is done here, by its name; those that take the loop's help yield batches for it."""
NO_ACTS: Acts = MappingProxyType({})


def seat_of(port: ViewPort) -> Seat:
    """The member, as the protocol's courses know it."""
    return Seat(
        me=port.env.me,
        host=port.env.agent,
        device=port.device,
        member=port.member,
        lock=port.lock,
        now_s=time.monotonic,
    )


def carry_out(port: ViewPort, course: Course[T], acts: Acts = NO_ACTS) -> T:
    """Go through a course whose acts need no batch; returns what it comes to, and raises what it ends in."""
    try:
        next(go_through(port, course, acts))
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("a batch, and no loop to compute it")


def go_through(port: ViewPort, course: Course[T], acts: Acts = NO_ACTS) -> Generator[Any, None, T]:
    """Go through a course, and yield the batches of its acts, each to see one backward."""

    def reply_to(effect: Effect) -> Generator[Any, None, Any]:
        if isinstance(effect, AskAll):
            return _asked(port, effect)
        if isinstance(effect, Act):
            yield from acts[effect.what](effect) or ()
        else:
            port.tell_coordinator(effect.messages)
        return None

    return replying(course, reply_to)


def _asked(port: ViewPort, ask: AskAll) -> dict[str, dict[str, Any]]:
    """Everybody's words. All of mine are said before anybody's are waited for."""
    mesh = port.mesh
    if mesh is None:
        raise ViewAbandoned("the view is closed")
    if ask.half != "hear":
        for name, mine in ask.words.items():
            mesh.broadcast(_message(ask.step, name, mine, ask.turn))
    if ask.half == "say":
        return {}
    phase = Phase.ROLL_CALL if ask.roll else Phase.FINAL if "final" in ask.words else Phase.HEADER
    return {name: _heard(mesh, ask, name, phase) for name in ask.words}


_CHANNELS: dict[str, Channel[Any]] = {"slices": SLICES, "vote": VOTE, "orders": HOLD, "states": STATES}
_MESSAGES: dict[str, tuple[type[Any], str]] = {
    "roll": (Roll, "entry"), "parts": (Parts, "rows"), "closer look": (CloserLook, "culprits"),
    "prints": (Prints, "said"), "header": (HeaderSaid, ""), "final": (Final, "step"),
}  # fmt: skip
"""What has messages of its own: their type, and the field with what was said; "": all of it."""


def _message(step: int, name: str, mine: Any, turn: int) -> Any:
    if name in ("roll", "final"):
        return Roll(mine) if name == "roll" else Final(step)
    if name == "header":
        return mine
    if name in _MESSAGES:
        return _MESSAGES[name][0](step, mine)
    channel = _CHANNELS[name]
    return Extra(step, channel.number + turn, channel.write(mine))


def _heard(mesh: Mesh, ask: AskAll, name: ChannelName, phase: Phase) -> dict[str, Any]:
    mine, channel = ask.words[name], _CHANNELS.get(name)
    kind, field = _MESSAGES.get(name, (Extra, "body"))
    box: dict[str, Any] = mesh.collect(kind, ask.step, channel.number + ask.turn if channel is not None else 0, phase)
    said = {}
    for member in mesh.view.members:
        if member == mesh.me:
            said[member] = mine
        else:
            word = getattr(box[member], field) if field else box[member]
            said[member] = channel.read(member, word) if channel is not None else word
    return said
