"""Whose turn it is to coordinate, where the record is shared: a claim, and a sign of life beside it, in etcd.

Role: a claim holds while its sign of life goes on changing. Who reads that it has not changed for longer than the lease
may put a claim with the next epoch in its place, in one transaction on the old one. Nobody compares clocks of two
machines. What is stored is signed with the run's secret, under its key's name: who can only write to etcd can take the
record away, or put an older one back, and cannot make one. Decides nothing about when to take a turn.
"""

from __future__ import annotations

import contextlib
import hmac
from typing import NamedTuple

import msgspec

from outlast.errors import EnvironmentFault
from outlast.journal._etcd import Etcd, Unreachable

__all__ = ["CoordinatorClaim", "Seals", "TurnSeen", "SharedTurn"]

_MAC = 32


class CoordinatorClaim(msgspec.Struct, frozen=True, kw_only=True):
    """`token`: of this claim alone; `seat`: of the launcher that starts coordinators there; `address`: at which this
    one listens, HOST:PORT."""

    epoch: int
    token: str
    seat: str
    host: str
    address: str


class TurnSeen(NamedTuple):
    """`raw`: the claim as it is stored; `beat`: how often its holder has given a sign, -1 where none of its own is
    there; `end`: the run's exit code, once it is over."""

    claim: CoordinatorClaim | None
    raw: bytes | None
    beat: int
    end: int | None


class Seals:
    """Signs what is stored under a key, and checks it."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def seal(self, key: str, data: bytes) -> bytes:
        return self._sign(key, data) + data

    def unsealed(self, key: str, stored: bytes) -> bytes:
        """EnvironmentFault if it is not of this run."""
        proof, data = stored[:_MAC], stored[_MAC:]
        if not hmac.compare_digest(proof, self._sign(key, data)):
            raise EnvironmentFault(
                f"what etcd holds under {key} was not written with this run's secret",
                did="it is not believed",
                remedy="see who else may write there: a user of its own for outlast, and TLS",
            )
        return data

    def _sign(self, key: str, data: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._secret, b"outlast record" + len(name).to_bytes(4, "big") + name + data, "sha256")


class SharedTurn:
    """Reads and puts the claim of who coordinates, and its sign of life. `prefix`: with which all keys of the run
    begin."""

    def __init__(self, etcd: Etcd, prefix: str, seals: Seals) -> None:
        self._etcd, self._seals = etcd, seals
        self._folder = prefix + "turn/"
        self.claim_key, self.beat_key = self._folder + "claim", self._folder + "beat"
        self.end_key = self._folder + "end"

    def look(self, within_s: float) -> TurnSeen:
        """Raises Unreachable; EnvironmentFault for what nobody of this run has written."""
        rows = {row.key: row.value for row in self._etcd.range(self._folder, within_s)[0]}
        raw, end = rows.get(self.claim_key), rows.get(self.end_key)
        claim = None
        if raw is not None:
            claim = msgspec.json.decode(self._seals.unsealed(self.claim_key, raw), type=CoordinatorClaim)
        code = int(self._seals.unsealed(self.end_key, end)) if end is not None else None
        return TurnSeen(claim, raw, self._beat_of(claim, rows.get(self.beat_key, b"")), code)

    def _beat_of(self, claim: CoordinatorClaim | None, stored: bytes) -> int:
        with contextlib.suppress(EnvironmentFault):
            token, _, count = self._seals.unsealed(self.beat_key, stored).decode().rpartition(" ")
            if claim is not None and token == claim.token:
                return int(count)
        return -1

    def beat(self, mine: CoordinatorClaim, count: int) -> dict[str, bytes]:
        """A sign of life of this claim's holder, to be put."""
        return {self.beat_key: self._seals.seal(self.beat_key, f"{mine.token} {count}".encode())}

    def stored(self, claim: CoordinatorClaim) -> bytes:
        """A claim as it is stored: what every write of its holder depends on."""
        return self._seals.seal(self.claim_key, msgspec.json.encode(claim))

    def take(self, before: bytes | None, mine: CoordinatorClaim, within_s: float) -> bool:
        """Put my claim in the place of `before`; whether it is there now. Raises Unreachable where that is not known:
        whoever looks again and finds it may go on with it."""
        with contextlib.suppress(Unreachable):
            puts = {self.claim_key: self.stored(mine)} | self.beat(mine, 0)
            if self._etcd.put_if(self.claim_key, before, puts, within_s):
                return True
        found = self.look(within_s).claim
        return found is not None and found.token == mine.token
