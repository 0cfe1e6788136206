"""The coordinator's record in etcd, and the story of the run beside it, for whichever host coordinates next.

Role: as `_record.py`, on several machines. Each write is one transaction on the holder's own claim, so who has been
followed writes nothing; a record's is one on its last change too, so a copy that a member held back puts nothing back
(`core/protocol/record_lease.py` decides what follows from etcd's answers). A thread renews the claim; `held` is whether
that has been confirmed within the lease, `confirmed_s` when nobody had followed yet. Events go along with the next
write, in order, and at the latest with the next sign of life; of kinds that are told over and over only the newest are
kept. A copy of each record is put on this host's disk, for who reads there; it counts for nothing. It does not decide
who coordinates.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from outlast.core.events import AnyEvent, ProgressMade, StepAnatomy, decode, encode
from outlast.core.protocol.record_lease import UNKNOWN, HeldTurn, ReadRow, StoredRow, Storing, storing
from outlast.errors import EnvironmentFault, ProtocolViolation
from outlast.journal._etcd import ITSELF, Access, Etcd, Unreachable
from outlast.journal._record import Record
from outlast.journal._turn import CoordinatorClaim, Seals, SharedTurn, TurnSeen

__all__ = ["SharedRecord"]

_PUT_S = 2.0  # one attempt; there is always another
_AT_ONCE = 100  # operations of a transaction: etcd takes 128
_AT_ONCE_BYTES = 512 * 1024  # etcd takes 1.5 MiB where nothing else is said
_MOST_WAITING = 20_000  # events, while etcd does not answer
_OFTEN = (ProgressMade, StepAnatomy)
_KEPT = 512  # of each of these
_PAGE = 500
_BEATS = 6  # in a lease


class SharedRecord:
    """Keeps the coordinator's record, and the events of the run, in etcd. `run`: the run's number; `local`: the record
    on this host's disk, where copies go."""

    def __init__(self, access: Access, run: str, secret: bytes, lease_s: float, local: Record) -> None:
        self._etcd, self._beating = Etcd(access), Etcd(access)
        self._prefix, self._seals, self._local = f"/outlast/{run}/", Seals(secret), local
        self._turn, self.lease_s = SharedTurn(self._etcd, self._prefix, self._seals), lease_s
        self._mine: CoordinatorClaim | None = None
        self._raw = b""
        self._hold = HeldTurn(lease_s, -math.inf)
        self._mutex = threading.Lock()
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._count = 0
        self._most_bytes = _AT_ONCE_BYTES
        self._told_upto = b""  # the place of the newest event that `story` has returned
        self.junk = ""  # a key that `story` has passed over, for nobody of this run wrote what it holds
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="outlast-record", daemon=True)

    # --- before it is my turn ------------------------------------------------------------------------------------
    def look(self, within_s: float) -> TurnSeen:
        """Whose turn it is. Raises Unreachable, EnvironmentFault."""
        return self._turn.look(within_s)

    def story(self, since: int, within_s: float) -> tuple[list[AnyEvent], int]:
        """Events that were written from this revision on, in their order, and the revision to ask for next; each once,
        though a write that was tried again may have put it there again. Raises Unreachable, EnvironmentFault."""
        found: dict[bytes, AnyEvent] = {}
        while True:
            rows, revision = self._etcd.range(self._prefix + "story/", within_s, since=since, limit=_PAGE)
            for row in rows:
                try:
                    place, _, body = self._seals.unsealed(row.key, row.value).partition(b" ")
                    if place > self._told_upto:
                        found[place] = decode(body.decode())
                except (EnvironmentFault, ValueError, msgspec.DecodeError):
                    self.junk = self.junk or row.key
            if len(rows) < _PAGE:
                break
            since = rows[-1].revision  # what it changed besides is asked for again
        self._told_upto = max(found, default=self._told_upto)
        return [found[place] for place in sorted(found)], revision + 1

    def take(self, seen: TurnSeen, mine: CoordinatorClaim, within_s: float) -> bool:
        """Begin my turn; False if another was quicker. Raises Unreachable, EnvironmentFault."""
        asked_s = time.monotonic()
        if not self._turn.take(seen.raw, mine, within_s):
            return False
        self._mine, self._raw = mine, self._turn.stored(mine)
        self._hold.confirmed(asked_s)
        self._local.follow(mine.epoch, mine.host)
        self._thread.start()
        return True

    # --- in my turn ----------------------------------------------------------------------------------------------
    @property
    def held(self) -> bool:
        """Whether my turn was confirmed within the lease, so that nobody can have followed me."""
        return self._hold.held(time.monotonic())

    @property
    def confirmed_s(self) -> float:
        """Say when, by this host's monotonic clock, nobody had followed me yet."""
        return self._hold.confirmed_s

    def claim(self, owner: str) -> int:
        """The epoch of my turn. `owner` is in the claim already."""
        return self._my_claim().epoch

    def put(self, epoch: int, key: str, value: bytes) -> bool:
        """Store `value`; False if another has followed me. While no majority of etcd answers it waits: what is not
        stored must not be told."""
        if epoch > self._my_claim().epoch:
            raise ProtocolViolation(f"a record under epoch {epoch}, which was never claimed", where=key)
        if epoch < self._my_claim().epoch:
            return False
        place = f"{self._prefix}records/{key}"
        if self._stored(storing(place, self._seals.seal(place, value), self._turn.claim_key, self._raw)):
            with contextlib.suppress(EnvironmentFault):  # this host's disk; the record is where it has to be
                self._local.put(epoch, key, value)
            return True
        return False

    def _stored(self, course: Storing) -> bool:
        """Go through it, with etcd's answers."""
        reply: StoredRow | bool | str | None = None
        while not self._hold.followed:
            try:
                effect = course.send(reply)
            except StopIteration as done:
                if not done.value:
                    self._hold.followed = True
                return bool(done.value)
            reply = UNKNOWN
            with contextlib.suppress(Unreachable):
                if isinstance(effect, ReadRow):
                    rows, _ = self._etcd.range(effect.key, _PUT_S, whole=False)
                    reply = StoredRow(rows[0].value, rows[0].revision) if rows else StoredRow(None, 0)
                else:
                    puts = {} if effect.again else {effect.key: effect.value}
                    reply = self._write(puts, self._etcd, (effect.key, effect.revision))
        return False

    def get(self, key: str) -> bytes | None:
        """The newest value of `key`, or None. Waits as `put` does."""
        place = f"{self._prefix}records/{key}"
        while True:
            with contextlib.suppress(Unreachable):
                rows, _ = self._etcd.range(place, _PUT_S, whole=False)
                return self._seals.unsealed(place, rows[0].value) if rows else None

    def newest_epoch(self) -> int:
        """The highest epoch that I know of."""
        return self._my_claim().epoch + self._hold.followed

    def append(self, told: Iterable[AnyEvent]) -> None:
        """Take events for whoever follows; returns at once."""
        epoch = self._my_claim().epoch
        with self._mutex:
            for event in told:
                place, kind = f"{epoch:08d}-{self._count:012d}", event.__struct_config__.tag
                often = isinstance(event, _OFTEN)
                key = f"{self._prefix}story/" + (f"often-{kind}-{self._count % _KEPT:04d}" if often else place)
                self._waiting.append((key, self._seals.seal(key, place.encode() + b" " + encode(event))))
                self._count += 1
            while len(self._waiting) > _MOST_WAITING:
                self._waiting.popleft()

    def end(self, exit_code: int, within_s: float) -> bool:
        """The run is over: all that was told, and the code. Whether it could be written."""
        until_s = time.monotonic() + within_s
        while self._mine is not None and not self._hold.followed and time.monotonic() < until_s:
            with contextlib.suppress(Unreachable):
                with self._mutex:
                    waiting = len(self._waiting)
                last = len(self._batch()) == waiting
                code = {self._turn.end_key: self._seals.seal(self._turn.end_key, str(exit_code).encode())}
                if not self._write(code if last else {}, self._etcd):
                    self._hold.followed = True
                    return False
                if last:
                    return True
        return False

    def close(self) -> None:
        """Whoever waits for my turn need not wait for the lease's end: nothing is written any more."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(_PUT_S)
        self._etcd.close()
        self._beating.close()

    def _my_claim(self) -> CoordinatorClaim:
        if self._mine is None:
            raise ProtocolViolation("a record is asked of who has no turn")
        return self._mine

    def _write(
        self, puts: dict[str, bytes], etcd: Etcd, unchanged: tuple[str, int] | None = None, *, alone: bool = False
    ) -> bool:
        """These, and events that wait unless `alone`, if it is still my turn, and the key in `unchanged` was changed
        last at this revision. Raises Unreachable, EnvironmentFault."""
        along = [] if alone else self._batch()
        try:
            mine = etcd.put_if(self._turn.claim_key, self._raw, dict(along) | puts, _PUT_S, unchanged)
        except EnvironmentFault as fault:
            if not along or fault.where != ITSELF:
                raise
            self._most_bytes = max(1, self._most_bytes // 2)
            if len(along) == 1:  # the others do not wait for it
                self._sent(along)
            along, mine = [], etcd.put_if(self._turn.claim_key, self._raw, puts, _PUT_S, unchanged)
        if mine:
            self._sent(along)
        return mine

    def _batch(self) -> Sequence[tuple[str, bytes]]:
        """The oldest events that wait: one, and as many more as fit."""
        along: list[tuple[str, bytes]] = []
        room = self._most_bytes
        with self._mutex:
            for item in itertools.islice(self._waiting, _AT_ONCE):
                room -= len(item[0]) + len(item[1])
                if along and room < 0:
                    break
                along.append(item)
        return along

    def _sent(self, along: Sequence[tuple[str, bytes]]) -> None:
        sent = set(map(id, along))
        with self._mutex:
            while self._waiting and id(self._waiting[0]) in sent:
                self._waiting.popleft()

    def _renew(self) -> None:
        """Until I am followed, or close."""
        count, alone = 0, False
        while not self._closing.wait(self.lease_s / _BEATS):
            count, asked_s = count + 1, time.monotonic()
            try:
                if not self._write(self._turn.beat(self._my_claim(), count), self._beating, alone=alone):
                    self._hold.followed = True
                    return
            except Unreachable:
                alone = True  # half a megabyte of events may be what was too much; the turn must not end of it
                continue
            except EnvironmentFault:  # a user who may write no longer
                continue
            alone = False
            self._hold.confirmed(asked_s)
