"""Whose turn it is to coordinate, where several hosts share the record: who waits for a turn, and who has it.

The virtual counterpart of `runtime/coordinator/_election.py` and of what the coordinator's server does with the record:
which turn may be followed, how a record is stored, and which heartbeats may be answered is said, for both, by
`core/protocol/record_lease.py`. A coordinator that waits for the store does nothing else, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from outlast.core.protocol import messages as m
from outlast.core.protocol.record_lease import HeldTurn, ReadRow, StoredRow, Storing
from outlast.prove.adversary._hosts import CoordinatorProcess
from outlast.prove.adversary._kernel import SimulatedProcess
from outlast.prove.adversary._network import Dialled
from outlast.prove.adversary._record_store import HostClock, SharedStore, StoreClient, TurnClaim, TurnRead
from outlast.prove.adversary._surroundings import Surroundings

__all__ = ["SharedCoordinator", "TurnCandidate", "Turns"]

_BEATS, _LOOKS = 6, 8  # in a lease
_SIGN_S = 0.1  # how often a coordinator looks after itself
_READ_LATE = 0.1
_RECORD, _CLAIM = "fleet", "claim"
_ENDS_WITHIN = 6.0  # leases, once nothing hinders a coordinator from learning that it was followed


class TurnStage(Surroundings, Protocol):
    """The world, as those who wait for a turn need it."""

    launcher: SimulatedProcess
    finish: m.Finish | None
    coordinators: list[CoordinatorProcess]

    def begun(self, coordinator: CoordinatorProcess) -> None: ...
    def clients(self) -> Sequence[Any]: ...


class SharedCoordinator(CoordinatorProcess):
    """A coordinator whose record is on other hosts than its own. `asked_s`: when it had asked for its turn."""

    def __init__(
        self, turns: Turns, claim: TurnClaim, record: m.FleetRecord | None, clock: HostClock, asked_s: float
    ) -> None:
        super().__init__(turns.world, turns.world.serial(), (claim.epoch, record))
        self.turns, self.claim, self.clock = turns, claim, clock
        self.client = StoreClient(turns.world, turns.store, self, claim.seat)
        self.turn = HeldTurn(turns.world.scenario.record_lease_s, asked_s)
        self._answers = turns.world.variant.answers()
        self._stored = record
        self._inbox: list[tuple[Dialled, Any]] = []
        self._course: Storing | None = None
        self._signs = self._num_puts = 0
        self._renew()
        self._give_sign()

    # --- the turn ------------------------------------------------------------------------------------------------
    def _renew(self) -> None:
        self._signs += 1
        asked_s = self.clock.now()
        self.client.ask(partial(self.turns.store.give_sign, self.claim, self._signs), partial(self._renewed, asked_s))

    def _renewed(self, asked_s: float, answer: object) -> None:
        if answer is False:
            self.turn.followed = True
            return
        if answer is True:
            self.turn.confirmed(asked_s)
        self.kernel.after(self.turn.lease_s / _BEATS, self, self._renew)

    def _give_sign(self) -> None:
        """Look whether another has followed, and answer what may be answered now."""
        self.turns.check_end(self)
        self.kernel.after(_SIGN_S, self, self._give_sign)
        if self.storing or self._superseded():
            return
        for name, sent_s in self._answers.due(self.turn.confirmed_s):
            self._answer(name, sent_s)

    def _superseded(self) -> bool:
        """Whether I know that another has followed; then this is my end."""
        if not self.turn.followed or self.world.variant.goes_on_followed:
            return False
        self.handle(m.Superseded())
        return True

    # --- what is said to it --------------------------------------------------------------------------------------
    def receive(self, link: Dialled, event: Any) -> None:
        if self.storing:
            self._inbox.append((link, event))
        else:
            super().receive(link, event)

    def beat(self, link: Dialled, sent_s: float) -> None:
        if self._superseded() or not self.turn.held(self.clock.now()):
            return
        answered = self._answers.heard(link.client.name, sent_s, self.clock.now(), self.turn.confirmed_s)
        if answered is not None:
            self._answer(link.client.name, answered)

    def _answer(self, name: str, sent_s: float) -> None:
        link = self.links.get(name)
        if link is not None:
            self.turns.check_answer(self, sent_s)
            self.answer(link, sent_s)

    # --- what it stores ------------------------------------------------------------------------------------------
    def _persist(self, record: m.FleetRecord) -> None:
        if record == self._stored and self.turn.held(self.clock.now()):
            return
        self.storing, self._stored, self._num_puts = True, record, self._num_puts + 1
        self._course = self.world.variant.storing(_RECORD, record, _CLAIM, self.claim)
        self._go_through(None)

    def _go_through(self, reply: StoredRow | bool | str | None) -> None:
        """The course, with the store's answers, until it is over."""
        assert self._course is not None
        if self.turn.followed:
            self._was_stored(False)
            return
        try:
            effect = self._course.send(reply)
        except StopIteration as done:
            self.turn.followed |= not done.value
            self._was_stored(bool(done.value))
            return
        store = self.turns.store
        if isinstance(effect, ReadRow):
            self.client.ask(partial(store.read, effect.key, _CLAIM), self._go_through)
        else:
            self.client.ask(partial(store.put_if, self, self.claim, effect, self._num_puts), self._go_through)

    def _was_stored(self, done: bool) -> None:
        self.storing, self._course = False, None
        if done or self.world.variant.goes_on_followed:
            self.world.point("persist", self)
        else:
            self.followed()
        if self.paused:
            self.hold(self._resumed, (), first=True)
        else:
            self._resumed()

    def _resumed(self) -> None:
        self._go_on()
        inbox, self._inbox = self._inbox, []
        for index, (link, event) in enumerate(inbox):
            if self.ended:
                return
            if self.paused:
                self._inbox = inbox[index:] + self._inbox
                self.hold(self._resumed, (), first=True)
                return
            self.receive(link, event)


class TurnCandidate(SimulatedProcess):
    """A host's process that would coordinate: it looks at the claim, tells its host where to turn, and claims when it
    may. Its own launcher's last coordinator is known to be dead, and is followed at once."""

    def __init__(self, turns: Turns, seat: int) -> None:
        super().__init__(turns.world.kernel, f"t{turns.world.serial()}")
        self.turns, self.seat, self.clock = turns, seat, HostClock(turns.world)
        self.watch = turns.world.variant.watch(turns.world.scenario.record_lease_s)
        self._client = StoreClient(turns.world, turns.store, self, seat)
        self._epoch = 0
        self._look()

    def _look(self) -> None:
        self._client.ask(self.turns.store.read_turn, partial(self._seen, self.clock.now()))

    def _seen(self, asked_s: float, seen: TurnRead | str) -> None:
        if not isinstance(seen, str):
            if seen.claim is not None:
                self._epoch = max(self._epoch, seen.claim.epoch)
                self.turns.place(self.seat, seen.claim)
            if self._due(seen, asked_s):
                self._take(seen.claim)
                return
        self._again()

    def _again(self) -> None:
        self.kernel.after(self.watch.lease_s / _LOOKS, self, self._look)

    def _due(self, seen: TurnRead, asked_s: float) -> bool:
        if seen.claim is None:
            return self.seat == 0
        if seen.claim.seat == self.seat:
            return True
        return self.watch.silent(seen.claim.token, seen.signs, asked_s, self.clock.now())

    def _take(self, before: TurnClaim | None) -> None:
        mine = TurnClaim(self._epoch + 1, f"{self.name}.{self._epoch + 1}", self.seat)
        asked_s, store = self.clock.now(), self.turns.store
        self._client.ask(partial(store.take_turn, before, mine), partial(self._claimed, mine, asked_s))

    def _claimed(self, mine: TurnClaim, asked_s: float, won: object) -> None:
        """Where it is not known whether I have won, I look again: my own host's claim is followed at once."""
        if won is True:
            self._read(mine, asked_s)
        else:
            self._again()

    def _read(self, mine: TurnClaim, asked_s: float) -> None:
        self._client.ask(partial(self.turns.store.read, _RECORD, _CLAIM), partial(self._begin, mine, asked_s))

    def _begin(self, mine: TurnClaim, asked_s: float, row: StoredRow | str) -> None:
        if isinstance(row, str):
            self._read(mine, asked_s)
        else:
            self.end()
            self.turns.begin(mine, row.value, self.clock, asked_s)


class Turns:
    """The hosts that may coordinate, and where each of them says that the coordinator is."""

    def __init__(self, world: TurnStage) -> None:
        self.world, self.store = world, SharedStore(world)
        self.num_seats = world.scenario.num_seats
        self._places: list[TurnClaim | None] = [None] * self.num_seats
        self._candidates: dict[int, TurnCandidate] = {}
        self._seats: dict[str, int] = {}  # agent -> its host's number

    def start(self) -> None:
        for seat in range(self.num_seats):
            self.wait_again(seat)

    def wait_again(self, seat: int) -> None:
        """The host's launcher starts a process that waits for its turn, in the place of one that is gone."""
        there = self._candidates.get(seat)
        alive = [c for c in self.world.coordinators if self.seat_of(c) == seat and not c.ended and not c.given_up]
        if (there is None or there.ended) and not alive and self.world.finish is None:
            self._candidates[seat] = TurnCandidate(self, seat)

    def seat_of(self, coordinator: CoordinatorProcess) -> int:
        assert isinstance(coordinator, SharedCoordinator)
        return coordinator.claim.seat

    def clock_of(self, coordinator: CoordinatorProcess) -> HostClock:
        assert isinstance(coordinator, SharedCoordinator)
        return coordinator.clock

    def clocks_on(self, seat: int) -> list[HostClock]:
        """The clocks of this host's processes that wait for a turn, or have one."""
        holders = [c for c in self.world.coordinators if self.seat_of(c) == seat and not c.ended]
        waiting = self._candidates.get(seat)
        return [self.clock_of(c) for c in holders] + ([waiting.clock] if waiting and not waiting.ended else [])

    def begin(self, claim: TurnClaim, record: m.FleetRecord | None, clock: HostClock, asked_s: float) -> None:
        """A claim was made, and its holder begins."""
        self.place(claim.seat, claim)
        coordinator = SharedCoordinator(self, claim, record, clock, asked_s)
        self.world.coordinators.append(coordinator)
        self.world.coordinators.sort(key=lambda each: each.epoch)
        self.world.begun(coordinator)

    # --- where to turn -------------------------------------------------------------------------------------------
    def place(self, seat: int, claim: TurnClaim) -> None:
        """All of a host turn to whoever holds this claim; never back to an earlier one."""
        before = self._places[seat]
        if before is not None and before.epoch >= claim.epoch:
            return
        self._places[seat] = claim
        for client in self.world.clients():
            if self._host_of(client) == seat and not client.ended:
                self.world.kernel.after(_SIGN_S * self.world.kernel.rng.random(), client, self._turn, client)

    def _turn(self, client: Any) -> None:
        if client.link is not None and client.link.server is not self.listening(client):
            client.hang_up(late=self.world.kernel.rng.random() < 0.5)

    def _host_of(self, client: Any) -> int:
        name = getattr(client, "agent", client).name
        return self._seats.setdefault(name, len(self._seats) % self.num_seats)

    def listening(self, client: Any) -> CoordinatorProcess | None:
        """Who listens where the client's host says that the coordinator is; sometimes where it said so before, for an
        earlier word of two may be read last."""
        alive = [c for c in self.world.coordinators if not c.ended and isinstance(c, SharedCoordinator)]
        place = self._places[self._host_of(client)]
        if place is not None and len(alive) > 1 and self.world.kernel.rng.random() < _READ_LATE:
            return next((c for c in alive if c.epoch < place.epoch), None)
        return next((c for c in alive if c.claim == place), None)

    # --- what must hold ------------------------------------------------------------------------------------------
    def check_answer(self, coordinator: SharedCoordinator, sent_s: float) -> None:
        """A heartbeat is answered: nobody had followed when it was sent, or a lease would outlast its successor's
        count."""
        later = [at_s for epoch, at_s in self.store.claimed_s.items() if epoch > coordinator.epoch]
        if later and sent_s > min(later):
            what = f"{coordinator.name} prolongs a lease {sent_s - min(later):.3f} s after it was followed"
            self.world.oracle.violated("Lease", what)

    def check_end(self, coordinator: SharedCoordinator) -> None:
        """One that was followed ends, once nothing hinders it from learning that."""
        scenario = self.world.scenario
        late_s = max(scenario.calm_after_s, self.store.claimed_s.get(self.world.durable.epoch, 0.0))
        over = self.world.kernel.now > late_s + _ENDS_WITHIN * scenario.record_lease_s
        if coordinator.epoch < self.world.durable.epoch and over:
            self.world.oracle.violated("Ending", f"{coordinator.name} was followed, and goes on")
