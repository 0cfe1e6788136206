"""The turn to coordinate, where several hosts share the record: held, followed, and what may be said under it.

A claim in the record is a turn. Its holder confirms it over and over; who reads for longer than the lease that nothing
was confirmed may put a claim of the next epoch in its place. What keeps the run whole is the order of things, and no
clock: each write depends on the writer's own claim, and a heartbeat is answered only once the claim was confirmed after
it had come (`AnswersDue`). A holder that was stopped with its clock, or whose rival's request came late, can
therefore prolong no lease that its successor counts as over. Clocks decide when a turn is taken, nothing else.

`runtime/coordinator` and `journal` go by this over etcd, `prove/adversary/_turns.py` in virtual time. Source: rules 1
and 32. It does not say who takes a turn.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any, Final, Literal, NamedTuple

__all__ = ["UNKNOWN", "AnswersDue", "HeldTurn", "PutIfMine", "ReadRow", "StoredRow", "TurnWatch", "storing"]

UNKNOWN: Final[Literal["unknown"]] = "unknown"
"""The reply of a store that did not answer in time: what was asked may have been done, or be done later."""
_MARGIN_S = 0.1  # beyond the lease


class ReadRow(NamedTuple):
    """Ask for what is stored under a key: a `StoredRow`, or UNKNOWN."""

    key: str


class StoredRow(NamedTuple):
    """`revision`: of the store, at the key's last change; 0 with the value None: the key is not there."""

    value: Any
    revision: int


class PutIfMine(NamedTuple):
    """Store this if the claim is still mine and `key` was changed last at `revision`: whether it was so, or UNKNOWN.
    `again`: the value is there, so it is only asked whether the turn is."""

    key: str
    value: Any
    revision: int
    again: bool


Storing = Generator[ReadRow | PutIfMine, Any, bool]


def storing(key: str, value: Any, claim_key: str, claim: Any) -> Storing:
    """Store a record, however often that has to be tried; False: another has followed, and nothing was stored.

    An attempt that was given up may be carried out late, when its writer has long gone on. So each depends on what was
    there when it began, and one that finds its own claim unharmed was overtaken by such a one, and begins again.
    """
    while True:
        row = yield ReadRow(key)
        if row == UNKNOWN:
            continue
        done = yield PutIfMine(key, value, row.revision, row.value == value)
        if done is True:
            return True
        if done is False:
            holder = yield ReadRow(claim_key)
            if holder != UNKNOWN and holder.value != claim:
                return False


class HeldTurn:
    """A turn as its holder's clock has it. `confirmed_s`: when the newest sign of life was begun that was given under
    the claim, or the claim itself."""

    def __init__(self, lease_s: float, asked_s: float) -> None:
        self.lease_s, self.confirmed_s = lease_s, asked_s
        self.followed = False

    def confirmed(self, asked_s: float) -> None:
        """A write that was begun then has been done under the claim."""
        self.confirmed_s = max(self.confirmed_s, asked_s)

    def held(self, now_s: float) -> bool:
        """Whether the turn was confirmed within the lease: by clocks that run alike, nobody has followed."""
        return not self.followed and now_s < self.confirmed_s + self.lease_s


class AnswersDue:
    """Heartbeats that are not answered yet. The answer to one prolongs a lease from the moment it was sent, so the turn
    must have been mine after that."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[float, float]] = {}  # the oldest of each name: (heard, sent)
        self._answered: dict[str, float] = {}

    def heard(self, name: str, sent_s: float, now_s: float, confirmed_s: float) -> float | None:
        """Say which heartbeat of this name to answer now, by the time it was sent: this one where the turn was
        confirmed since, else the newest that was answered before, for who asks whether the coordinator is there."""
        if confirmed_s > now_s:
            self._waiting.pop(name, None)
            self._answered[name] = sent_s
        else:
            self._waiting.setdefault(name, (now_s, sent_s))
        return self._answered.get(name)

    def due(self, confirmed_s: float) -> list[tuple[str, float]]:
        """(name, when it was sent) of those that the turn was confirmed after, each once."""
        found = [(name, sent_s) for name, (heard_s, sent_s) in self._waiting.items() if heard_s < confirmed_s]
        for name, sent_s in found:
            del self._waiting[name]
            self._answered[name] = sent_s
        return found


class TurnWatch:
    """A turn as its reader's clock has it: since when it has given no sign. A pause of the reader's, or of the
    store's, is nobody's silence."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.unchanged_s = 0.0  # when the newest sign was seen first
        self._looked_s = -math.inf
        self._sign: tuple[str, int] = ("", -1)  # of the claim looked at: its token, and the most signs it has given

    def silent(self, token: str, signs: int, asked_s: float, now_s: float) -> bool:
        """Take a reading of the claim that was asked for then and is there now. Whether it may be followed."""
        paused = now_s - self._looked_s > self.lease_s / 2
        self._looked_s = now_s
        known, most = self._sign
        if known != token or signs > most or paused:
            self._sign = (token, max(signs, most) if known == token else signs)
            self.unchanged_s = now_s
        return asked_s - self.unchanged_s > self.lease_s + _MARGIN_S
