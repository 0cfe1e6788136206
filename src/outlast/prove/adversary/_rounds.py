"""The protocol's courses in virtual time: what is said goes over the simulated mesh, what is awaited is looked for.

The counterpart of `runtime/view/courses.py`, which carries the same courses out over sockets. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from outlast.core.protocol.step.effects import Act, AskAll, Course
from outlast.errors import ViewAbandoned
from outlast.prove.adversary._surroundings import Owner

__all__ = ["Acts", "SimulatedRounds"]

Acts = Mapping[str, Callable[[Act], bool | None]]
"""How each `Act` is done here, by its name. False: it goes on, and is asked again when something has happened."""
_NO_ACTS: Acts = MappingProxyType({})


class SimulatedRounds:
    """One course. `result`: what it came to, once `advance` has said that it is over."""

    def __init__(self, owner: Owner, course: Course[Any], acts: Acts = _NO_ACTS) -> None:
        self.owner, self.course, self.acts, self.result = owner, course, acts, None
        self._ask: AskAll | None = None  # what is waited for
        self._act: Act | None = None
        self._keys: tuple[Any, ...] = ()

    def advance(self) -> bool:
        """Go as far as possible; whether that is to the end. Raises what the course does."""
        reply: Any = None
        ended: ViewAbandoned | None = None
        while True:
            if self._ask is not None:
                try:
                    reply = self._heard(self._ask)
                except ViewAbandoned as reason:
                    ended = reason
                else:
                    if reply is None:
                        return False
                self._ask = None
            if self._act is not None:
                try:
                    if self.acts[self._act.what](self._act) is False:
                        return False
                except ViewAbandoned as reason:
                    ended = reason
                self._act = None
            try:
                effect = self.course.send(reply) if ended is None else self.course.throw(ended)
            except StopIteration as done:
                self.result = done.value
                return True
            reply = ended = None
            if isinstance(effect, AskAll):
                self._say(effect)
            elif isinstance(effect, Act):
                self._act = effect
            else:
                self.owner.say(*effect.messages)

    def _say(self, ask: AskAll) -> None:
        mesh, keys = self.owner.mesh, tuple((name, ask.step, ask.turn) for name in ask.words)
        if mesh is not None and ask.half != "hear":
            for key, mine in zip(keys, ask.words.values(), strict=True):
                mesh.broadcast(key, mine)
        if ask.half != "say":
            self._ask, self._keys = ask, keys
            self.owner.awaiting(*keys)

    def _heard(self, ask: AskAll) -> dict[str, dict[str, Any]] | None:
        """Everybody's words, in the view's order; None while some are awaited. Raises ViewAbandoned."""
        mesh = self.owner.in_view()
        for key in self._keys:
            if not mesh.whole(key):
                return None
        said: dict[str, dict[str, Any]] = {}
        for (name, mine), key in zip(ask.words.items(), self._keys, strict=True):
            theirs = mesh.take(key) | {self.owner.name: mine}
            said[name] = {member: theirs[member] for member in mesh.view.members}
        return said
