"""What a course of the protocol yields, and who goes through it.

A course is a generator. It yields what is to be said (`AskAll` to every member of the view, `TellFleet` to the
coordinator) or done (`Act`), is sent what all members said, returns what follows, and raises what ends the view, the
replica or the run. So the order of things, and what follows from words, exist once: `runtime/view/courses.py` carries
courses out over sockets, `prove/adversary/_rounds.py` in virtual time. Where a view ends while others are waited for,
ViewAbandoned is thrown into the course, which may have something left to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from outlast.core.protocol.step.member import Member
from outlast.core.protocol.step.todo import HandOver
from outlast.core.protocol.types import Header, RollEntry
from outlast.errors import ViewAbandoned

__all__ = ["Act", "AskAll", "ChannelName", "Course", "Effect", "Seat", "TellFleet", "replying"]

T = TypeVar("T")
Y = TypeVar("Y")
ChannelName = Literal[
    "roll", "orders", "states", "prints", "header", "parts", "slices", "vote", "closer look", "final"
]  # fmt: skip


class AskAll(msgspec.Struct, frozen=True):
    """Say these words to all members, each on its channel, and go on with everybody's, by channel and member, in the
    view's order; all are said before any is waited for. `roll`: while no step is computed; `turn`: of several such
    rounds between two steps; `half`: say them now and hear the others' later, by another `AskAll` of the same words."""

    step: int
    words: dict[ChannelName, Any]
    roll: bool = False
    turn: int = 0
    half: Literal["both", "say", "hear"] = "both"


class TellFleet(msgspec.Struct, frozen=True):
    """Tell the coordinator."""

    messages: tuple[Any, ...]


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """Do this here, however long it takes. `forming.py`, `deciding.py` and `verdict.py` say what each is."""

    what: Literal[
        "part", "drain", "begin", "read newer", "connect", "keep", "give", "take", "rest", "exchange", "audit",
        "look closer", "save the end", "settle the end", "say how far",
    ]  # fmt: skip
    entries: tuple[RollEntry, ...] = ()
    handing: HandOver | None = None
    leaves: tuple[int, ...] = ()
    headers: tuple[Header, ...] = ()


Effect = AskAll | TellFleet | Act
Course = Generator[Effect, Any, T]


def replying(course: Course[T], reply_to: Callable[[Effect], Generator[Y, Any, Any]]) -> Generator[Y, Any, T]:
    """Go through a course. `reply_to` yields what an effect needs, and returns the reply; a view that ends meanwhile
    (ViewAbandoned) ends in the course. Returns what the course comes to, and raises what it ends in."""
    reply: Any = None
    ended: ViewAbandoned | None = None
    while True:
        try:
            effect = course.send(reply) if ended is None else course.throw(ended)
        except StopIteration as done:
            result: T = done.value
            return result
        reply = ended = None
        try:
            reply = yield from reply_to(effect)
        except ViewAbandoned as reason:
            ended = reason


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A member, as its courses know it. `lock`: held while `member` is asked or told."""

    me: str
    host: str
    device: str
    member: Member
    lock: AbstractContextManager[Any]
    now_s: Callable[[], float]
