"""Stops and departures that wait for their save: held back, and let go when it is published or their time is up.

Decides nothing of membership: what is let go, the machine hears as if it had just been said. No torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from outlast.core import events as ev
from outlast.core.protocol import Coordinator
from outlast.core.protocol import messages as m
from outlast.errors import MembershipError
from outlast.journal import Journal
from outlast.runtime.coordinator._save_requests import Leavers, SaveRequests
from outlast.runtime.transport import save_messages as wire

__all__ = ["HeldBack"]

_AGAIN_S = 0.5  # until a save that people wait for is asked for again


class HeldBack:
    """Holds each stop and departure back until its save is published, or its time is up. `limit_s`: how long that may
    take (0: nothing is held); `takes_s()`: how long a save may, where nobody kills the run; `under_way()`: whether a
    save is; `handle`: what the machine hears."""

    def __init__(
        self,
        journal: Journal,
        coordinator: Coordinator,
        requests: SaveRequests,
        leavers: Leavers,
        *,
        limit_s: float,
        takes_s: Callable[[], float],
        under_way: Callable[[], bool],
        handle: Callable[[Any], None],
    ) -> None:
        self._journal, self._coordinator, self._requests, self._leavers = journal, coordinator, requests, leavers
        self._stop_save_s, self._takes_s, self._under_way, self._handle = limit_s, takes_s, under_way, handle
        self._own: m.Stop | None = None  # the run stops by itself
        self._after: list[tuple[int, m.Stop | m.Leaving]] = []  # (number of the request, what goes on when it is met)
        self._go_on: Callable[[Any], None] = lambda message: None
        self._knows = False  # what was saved
        self._hasty: list[m.Stop | m.Leaving] = []  # said to a coordinator that does not know it yet
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None  # until another save is asked for

    # --- what comes ----------------------------------------------------------------------------------------------
    def before(self, message: Any, go_on: Callable[[Any], None]) -> bool:
        """A stop or a departure: whether a save goes first. `go_on` is told of it when that is done, or its time is up;
        of departures that one save is made for at once."""
        if not isinstance(message, m.Stop | m.Leaving) or not self._stop_save_s:
            return False
        if not self._knows:
            return self._too_early(message, go_on)
        c, leavers = self._coordinator, self._leavers
        if c.over or c.ending is not None or c.view is None or not c.roster.alive(c.view.members):
            return False
        who = leavers.asked(message)
        if c.change is not None and not (leavers.stops or leavers.nobody_stays):
            return False  # a view is being made in any case, and others have the state
        self._requests.ask_now(who)
        self._go_on = go_on
        self._hold(message)
        self._tell_awaited()
        self._loop.call_later(self._limit_s(message), self._time_is_up, message)
        return True

    def returned(self, hello: m.Hello, go_on: Callable[[Any], None]) -> m.Hello:
        """A member that was asked to leave says hello to a coordinator that has just taken over, or once more: its
        departure waits for a save all the same, and until then it is a member as any other."""
        c, going = self._coordinator, m.Leaving(member=hello.member)
        if not hello.leaving or c.view is None or hello.member not in c.view.members:
            return hello
        held = [*self._hasty, *(message for _, message in self._after)]
        if going not in held and not self.before(going, go_on):
            return hello
        return msgspec.structs.replace(hello, leaving=False)

    def heard(self, event: ev.AnyEvent) -> None:
        """What was just written into the journal: too few replicas are left, perhaps."""
        if isinstance(event, ev.VacancyDecided) and event.action == "stop":
            self._loop.call_soon(self._stop, f"too few replicas: {event.reason}")

    def _stop(self, reason: str) -> None:
        """The run stops by itself, after a save."""
        self._own = m.Stop(reason=reason, exit_code=MembershipError.exit_code)
        if not self.before(self._own, self._handle):
            self._handle(self._own)

    def view_changed(self) -> None:
        """A view is known to who commits its saves: what was asked too early may be asked then."""
        self._knows = True
        self._loop.call_soon(self._no_longer_early)
        self._loop.call_soon(self._tell_awaited)

    def _too_early(self, message: m.Stop | m.Leaving, go_on: Callable[[Any], None]) -> bool:
        """Whether it waits for what an earlier coordinator had saved to be known here."""
        known = self._journal.get(wire.SAVE_EPOCHS) is not None and not self._coordinator.over
        if known and message not in self._hasty:
            self._go_on = go_on
            self._hasty.append(message)
            self._loop.call_later(self._limit_s(message), self._no_longer_early, True)
        return known

    def _no_longer_early(self, at_last: bool = False) -> None:
        """What was asked too early is asked now; `at_last`: its time is up."""
        hasty, self._hasty = self._hasty, []
        for message in hasty:
            if at_last or not self.before(message, self._go_on):
                self._go_on(message)

    def _limit_s(self, message: m.Stop | m.Leaving) -> float:
        """How long the save before it may take. Who asks for a stop kills soon; where the run stops by itself nobody
        does."""
        return self._stop_save_s if message != self._own else max(self._stop_save_s, self._takes_s())

    # --- what becomes of the saves ---------------------------------------------------------------------------------
    @property
    def reason(self) -> str:
        """Why the newest save was asked for; "" once one that answers it has been."""
        return self._requests.reason

    def saved(self, number: int, last: bool) -> None:
        """A save was published, which answers the request of this number and all before it. `last`: no step follows;
        who was asked to go ends with the run, which has come to its end."""
        self._requests.answered(number)
        if last:
            self._after = [held for held in self._after if isinstance(held[1], m.Stop)]
        if self._after and self._coordinator.change is not None and self._leavers.nobody_stays:
            # A view is being made, in which a step more is committed before anybody hears of the stop.
            self._requests.ask("every replica was asked to leave")
            self._hold(*(message for _, message in self._after))
        else:  # with one of an odd number no step was begun: whoever asked for it, it is what the run stops with
            self._release(max(number, self._requests.number) | 1 if number % 2 else number)

    def abandoned(self, step: int, cause: str) -> None:
        """The save of this step came to nothing."""
        if cause == "view_changed":
            self._requests.ask(f"the save of step {step} was lost with its view")
            return
        if self._own is not None:  # it was tried: another is not waited for as long
            self._loop.call_later(self._stop_save_s, self._tried, self._own)
        if self._after and self._again is None:
            self._again = self._loop.call_later(_AGAIN_S, self._ask_again)

    def _ask_again(self) -> None:
        """The save that is waited for came to nothing, and there may be time for another: not before all that is under
        way has ended, for members have memory for few."""
        self._again = None
        if self._after and self._under_way():
            self._again = self._loop.call_later(_AGAIN_S, self._ask_again)
        elif self._after:
            self._requests.ask(self._requests.reason or "the save before it came to nothing")

    def _hold(self, *messages: m.Stop | m.Leaving) -> None:
        """They go on when the newest request is met."""
        held = [(asked, message) for asked, message in self._after if message not in messages]
        self._after = [*held, *((self._requests.number, message) for message in messages)]

    def _time_is_up(self, message: m.Stop | m.Leaving) -> None:
        """However often its save was asked for."""
        self._release(max((asked for asked, held in self._after if held == message), default=0))

    def _tried(self, message: m.Stop) -> None:
        """A save came to nothing a while ago. The stop goes on, unless another is under way."""
        if not self._under_way():
            self._time_is_up(message)

    def _release(self, number: int) -> None:
        """The request of this number is met, and all before it, or its time is up. An odd one, of a stop, is met by no
        save that steps follow."""
        over = [asked <= number and number % 2 >= asked % 2 for asked, _ in self._after]
        met = [message for (_, message), is_over in zip(self._after, over, strict=True) if is_over]
        self._after = [held for held, is_over in zip(self._after, over, strict=True) if not is_over]
        for stop in (message for message in met if isinstance(message, m.Stop)):
            self._go_on(stop)
        if going := tuple(message.member for message in met if isinstance(message, m.Leaving)):
            self._go_on(m.Departing(members=going))
        self._tell_awaited()

    def _tell_awaited(self) -> None:
        """Who waits for lost replicas makes no step: not while a stop, or the departure of all, waits for its save."""
        c = self._coordinator
        awaited = bool(self._after) and (self._leavers.stops or self._leavers.all_go)
        may_wait = c.settings.vacancies.kind != "shrink" or c.settings.min_replicas > 1
        if may_wait and awaited != c.shortage.saving:
            self._handle(m.SaveAwaited(waits=awaited))
