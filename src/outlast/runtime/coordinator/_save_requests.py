"""The coordinator's requests for saves: to whom, by which number, and whether that save is the run's last.

When one is due is `_save_pacing.py`'s; what waits for one is `_held_back.py`'s. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from outlast.core.protocol import Coordinator
from outlast.core.protocol import messages as m
from outlast.runtime.coordinator._save_place import SavePlace
from outlast.runtime.transport import save_messages as wire

__all__ = ["Leavers", "SaveRequests"]


class Leavers:
    """Knows who was asked to leave, and whether the run ends with that. `stops`: the run itself was asked to."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.stops = False
        self._going: set[str] = set()

    def asked(self, message: m.Stop | m.Leaving) -> str:
        """Somebody, or the run, is asked to leave. Return who, in words: once the run is, it is not for any member."""
        if isinstance(message, m.Leaving):
            self._going.add(message.member)
            if not self.stops:
                return f"{message.member} was asked to leave"
        self.stops = self.stops or isinstance(message, m.Stop)
        return "the run was asked to stop"

    @property
    def all_go(self) -> bool:
        """Whether all who have the state were asked to leave."""
        view = self._coordinator.view
        return view is not None and self._going.issuperset(self._coordinator.roster.alive(view.members))

    @property
    def nobody_stays(self) -> bool:
        """Whether all who have the state were asked to leave and nobody comes: the run stops with its next save."""
        coming = self._coordinator.roster.having("spawning", "fresh", "joining", "ready")
        return self.all_go and self._going.issuperset(coming)


class SaveRequests:
    """Asks the members for saves, each time by a higher number. `number`: the newest request's; `reason`: what it was
    made for, "" once a save that answers it has been published."""

    def __init__(
        self,
        coordinator: Coordinator,
        leavers: Leavers,
        place: SavePlace,
        *,
        tell: Callable[[Iterable[str], Any], None],
        write: Callable[..., None],
    ) -> None:
        self._coordinator, self._leavers, self._place = coordinator, leavers, place
        self._tell, self._write = tell, write
        self.number = coordinator.epoch << 20
        self.reason = ""

    def ask(self, reason: str) -> None:
        """Have the members save after the next step in which all can."""
        if self._place.base is None:
            return
        last = self._leavers.stops or self._leavers.nobody_stays
        self.number = self.number // 2 * 2 + (3 if last else 2)
        self.reason = reason
        self._send(list(self._coordinator.roster.peers))

    def ask_now(self, reason: str) -> None:
        """Ask, and say in the journal why that is not left to when a save is due."""
        self.ask(reason)
        self._tell_wish(reason)

    def wanted(self, reason: str) -> None:
        """Somebody asks for a save now: as a wish of the run's own, and told in the journal."""
        c = self._coordinator
        if self._place.base is None or c.over or c.ending is not None:
            why = "the run is over" if c.over or c.ending is not None else "the run keeps no checkpoints, or not yet"
            self._write("notice", level="warning", text=f"{reason}, and none is made: {why}")
            return
        self._tell_wish(reason)
        self.ask(reason)

    def greet(self, name: str) -> None:
        """Ask a member that said hello as well, unless it is answered."""
        if self.reason:
            self._send([name])

    def answered(self, number: int) -> None:
        """A save was published that answers the request of this number; an odd one answers all."""
        if number % 2 or number >= self.number:
            self.reason = ""

    def _send(self, names: list[str]) -> None:
        self._tell(names, wire.SaveNow(epoch=self._coordinator.epoch, number=self.number, reason=self.reason))

    def _tell_wish(self, reason: str) -> None:
        self._write("checkpoint_interval", interval_s=0.0, mtbr_s=0.0, reason=f"now: {reason}")
