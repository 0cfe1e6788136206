"""The record that several hosts share, in virtual time: rows, and transactions on the claim of whoever writes.

What is asked is done when it gets there and not when it was sent, though its sender has long given it up, or ended; an
answer may be lost. As etcd does for `journal/_shared.py`. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from outlast.core.protocol import messages as m
from outlast.core.protocol.record_lease import UNKNOWN, PutIfMine, StoredRow
from outlast.prove.adversary._kernel import SimulatedProcess
from outlast.prove.adversary._surroundings import Speaker, Surroundings

__all__ = ["STORE", "HostClock", "SharedStore", "StoreClient", "TurnClaim", "TurnRead"]

STORE = "record"
"""The store's end of a path; the other is a host's."""
_TRY_S = 0.12  # for one answer
_SLOW_SHARE = 0.4
_ABSENT = StoredRow(None, 0)


class TurnClaim(NamedTuple):
    """`token`: of this claim alone; `seat`: the number of the host whose launcher starts coordinators there."""

    epoch: int
    token: str
    seat: int


class TurnRead(NamedTuple):
    """A claim and how often its holder has given a sign."""

    claim: TurnClaim | None
    signs: int


class HostClock:
    """A process's monotonic clock. It may stand still while its host does, and may run on its own."""

    def __init__(self, world: Surroundings) -> None:
        self._kernel, self.ahead_s = world.kernel, 0.0
        self._asleep_s: float | None = None  # since then it stands still

    def now(self) -> float:
        return self.ahead_s + (self._kernel.now if self._asleep_s is None else self._asleep_s)

    def sleep(self) -> None:
        if self._asleep_s is None:
            self._asleep_s = self._kernel.now

    def wake(self) -> None:
        if self._asleep_s is not None:
            self.ahead_s -= self._kernel.now - self._asleep_s
            self._asleep_s = None


class SharedStore(SimulatedProcess):
    """Keeps the rows. While it is paused it has no majority: what is asked waits, and is done later."""

    def __init__(self, world: Surroundings) -> None:
        super().__init__(world.kernel, STORE)
        self.world = world
        self.lag_s = 0.0  # the most by which it is late just now
        self.claimed_s: dict[int, float] = {}  # epoch -> when
        self.claim: TurnClaim | None = None
        self._signs = ("", 0)
        self._rows: dict[str, StoredRow] = {}
        self._revision = 0
        self._newest = (0, 0)  # epoch and number of the newest record

    def late_s(self) -> float:
        """Draw by how much a request is late: of several machines that keep the record one is slow."""
        draw = self.kernel.rng.random
        return self.lag_s * draw() if self.lag_s and draw() < _SLOW_SHARE else 0.0

    def read_turn(self) -> TurnRead:
        token, signs = self._signs
        return TurnRead(self.claim, signs if self.claim is not None and token == self.claim.token else -1)

    def take_turn(self, before: TurnClaim | None, mine: TurnClaim) -> bool:
        """Put a claim in the place of the one that was read."""
        if self.claim != before:
            return False
        self.claim, self._signs = mine, (mine.token, 0)
        self.claimed_s[mine.epoch] = self.kernel.now
        self.world.durable.epoch = max(self.world.durable.epoch, mine.epoch)
        self.world.note(f"host {mine.seat} has claimed epoch {mine.epoch}")
        return True

    def give_sign(self, mine: TurnClaim, count: int) -> bool:
        if self._mine(mine):
            self._signs = (mine.token, count)
        return self._mine(mine)

    def read(self, key: str, claim_key: str) -> StoredRow:
        return StoredRow(self.claim, 1) if key == claim_key else self._rows.get(key, _ABSENT)

    def put_if(self, writer: Speaker, claim: TurnClaim, put: PutIfMine, number: int) -> bool:
        """`number`: of this record among its writer's; an older one never takes the place of a newer one."""
        row = self._rows.get(put.key, _ABSENT)
        if not self._mine(claim) or (row.revision != put.revision and self.world.variant.compares_revisions):
            return False
        if not put.again:
            self._revision += 1
            self._rows[put.key] = StoredRow(put.value, self._revision)
            if self._newest > (writer.epoch, number):
                self.world.oracle.violated("Durable", f"{writer.name} puts an older record back")
            self._newest = max(self._newest, (writer.epoch, number))
            record: m.FleetRecord = put.value
            self.world.durable.record = record
            self.world.oracle.durable(writer, record)
        return True

    def _mine(self, claim: TurnClaim) -> bool:
        return claim == self.claim or not self.world.durable.fenced


class _Question:
    """Something that was asked, and is answered once at most."""

    def __init__(self, then: Callable[[Any], None]) -> None:
        self._then: Callable[[Any], None] | None = then

    def answered(self, answer: Any) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(answer)


class StoreClient:
    """A process of a host that asks the store. `owner`: whose deliveries the answers are."""

    def __init__(self, world: Surroundings, store: SharedStore, owner: SimulatedProcess, seat: int) -> None:
        self._world, self._store, self._owner, self._seat = world, store, owner, f"host {seat}"

    def ask(self, what: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Have `what` done in the store; `then` takes what comes of it, or UNKNOWN once that takes too long."""
        question, number = _Question(then), self._world.serial()
        self._world.kernel.after(_TRY_S, self._owner, question.answered, UNKNOWN)
        self._world.network.lag((STORE, number), self._store.late_s())
        self._world.network.send(
            (STORE, number), (self._seat, STORE), self._store, self._carry_out, what, question, number
        )

    def _carry_out(self, what: Callable[[], Any], question: _Question, number: int) -> None:
        answer = what()
        self._world.network.send((number, STORE), (STORE, self._seat), self._owner, question.answered, answer)
