"""A record that several hosts share as it must not be used: variants in which a turn that was lost still counts."""

from __future__ import annotations

from typing import Any

from outlast.core.protocol.record_lease import UNKNOWN, AnswersDue, PutIfMine, ReadRow, Storing
from outlast.prove.adversary._variants import Variant

__all__ = ["TURNS_BROKEN"]


class WritesUnfenced(Variant):
    """The record takes any write, whoever holds the turn."""

    fenced = False


class LostTurnTold(Variant):
    """A coordinator whose write was refused, or that hears that it was followed, goes on telling its views."""

    goes_on_followed = True


class _AtOnce(AnswersDue):
    def heard(self, name: str, sent_s: float, now_s: float, confirmed_s: float) -> float | None:
        return sent_s


class AnswersByClock(Variant):
    """A heartbeat is answered while the turn is held by the holder's own clock, confirmed since or not."""

    answers = _AtOnce


class LateWritesDone(Variant):
    """A write depends on the turn alone, so a copy that was held back puts an older record back."""

    compares_revisions = False


def _trusting(key: str, value: Any) -> Storing:
    row = yield ReadRow(key)
    if row != UNKNOWN:
        yield PutIfMine(key, value, row.revision, False)
    return True


class UnknownTakenForStored(Variant):
    """A record counts as stored once it was asked for, whatever the store answers."""

    def storing(self, key: str, value: Any, claim_key: str, claim: Any) -> Storing:
        return _trusting(key, value)


TURNS_BROKEN: dict[str, tuple[type[Variant], int]] = {
    "writes-unfenced": (WritesUnfenced, 500),
    "lost-turn-told": (LostTurnTold, 500),
    "answers-by-clock": (AnswersByClock, 500),
    "late-writes-done": (LateWritesDone, 500),
    "unknown-taken-for-stored": (UnknownTakenForStored, 500),
}
