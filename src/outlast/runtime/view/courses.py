"""The protocol's courses over sockets: what a course asks is said to all and awaited, what it tells is sent.

The counterpart of `prove/adversary/_rounds.py`, which carries the same courses (`core/protocol/step/verdict.py`) out in
virtual time. Decides nothing.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

from outlast.core.phases import Phase
from outlast.core.protocol.step.verdict import AskAll, Course, Seat
from outlast.errors import ViewAbandoned
from outlast.runtime.transport.mesh import Mesh
from outlast.runtime.transport.peer_messages import CloserLook, Extra, Parts
from outlast.runtime.view.port import ViewPort
from outlast.runtime.view.rounds import SLICES, VOTE, Channel

__all__ = ["carry_out", "seat_of"]

T = TypeVar("T")


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


def carry_out(port: ViewPort, course: Course[T]) -> T:
    """Go through a course; returns what it comes to, and raises what it ends in."""
    reply: Any = None
    ended: ViewAbandoned | None = None
    while True:
        try:
            effect = course.send(reply) if ended is None else course.throw(ended)
        except StopIteration as done:
            result: T = done.value
            return result
        reply, ended = None, None
        try:
            if isinstance(effect, AskAll):
                reply = _asked(port, effect)
            else:
                port.tell_coordinator(effect.messages)
        except ViewAbandoned as reason:
            ended = reason


def _asked(port: ViewPort, ask: AskAll) -> dict[str, dict[str, Any]]:
    """Everybody's words. All of mine are said before anybody's are waited for."""
    mesh, step = port.mesh, ask.step
    if mesh is None:
        raise ViewAbandoned("the view is closed")
    phase = Phase.ROLL_CALL if ask.roll else Phase.HEADER
    for name, mine in ask.words.items():
        mesh.broadcast(_message(step, name, mine))
    return {name: _heard(mesh, step, name, mine, phase) for name, mine in ask.words.items()}


_CHANNELS: dict[str, Channel[Any]] = {"slices": SLICES, "vote": VOTE}  # others have messages of their own


def _message(step: int, name: str, mine: Any) -> Any:
    if name == "parts":
        return Parts(step, mine)
    if name == "closer look":
        return CloserLook(step, mine)
    channel = _CHANNELS[name]
    return Extra(step, channel.number, channel.write(mine))


def _heard(mesh: Mesh, step: int, name: str, mine: Any, phase: Phase) -> dict[str, Any]:
    kind: type[Any] = {"parts": Parts, "closer look": CloserLook}.get(name, Extra)
    channel = _CHANNELS.get(name)
    box: dict[str, Any] = mesh.collect(kind, step, channel.number if channel is not None else 0, phase)
    said = {}
    for member in mesh.view.members:
        if member == mesh.me:
            said[member] = mine
        elif channel is not None:
            said[member] = channel.read(member, box[member].body)
        else:
            said[member] = box[member].rows if name == "parts" else box[member].culprits
    return said
