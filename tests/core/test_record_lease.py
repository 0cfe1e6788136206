"""A turn to coordinate over a shared record: what is stored under it, what is answered, when it is followed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest

from outlast.core.protocol.record_lease import (
    UNKNOWN,
    AnswersDue,
    HeldTurn,
    PutIfMine,
    ReadRow,
    StoredRow,
    TurnWatch,
    storing,
)


def gone_through(replies: Iterable[Any]) -> tuple[list[ReadRow | PutIfMine], bool | None]:
    """What is asked of a store that answers so, and what comes of it; None: it asks on."""
    course, asked = storing("fleet", "new", "claim", "mine"), []
    try:
        asked.append(next(course))
        for reply in replies:
            asked.append(course.send(reply))
    except StopIteration as done:
        return asked, done.value
    return asked, None


def test_a_record_is_stored_on_the_claim_and_on_what_was_there_before_it() -> None:
    asked, stored = gone_through([StoredRow("old", 7), True])
    assert asked == [ReadRow("fleet"), PutIfMine("fleet", "new", 7, False)]
    assert stored is True


def test_what_is_there_already_is_not_written_again_and_the_turn_is_asked_for_all_the_same() -> None:
    asked, _ = gone_through([StoredRow("new", 7)])
    assert asked[-1] == PutIfMine("fleet", "new", 7, True)


def test_who_gets_no_answer_reads_again_what_became_of_it() -> None:
    asked, stored = gone_through([UNKNOWN, StoredRow(None, 0), UNKNOWN, StoredRow("new", 8), True])
    assert [type(each) for each in asked] == [ReadRow, ReadRow, PutIfMine, ReadRow, PutIfMine]
    assert asked[-1] == PutIfMine("fleet", "new", 8, True)
    assert stored is True


@pytest.mark.parametrize(("holder", "stored"), [("another", False), (None, False), ("mine", None)])
def test_a_refused_write_means_that_another_has_followed_unless_the_claim_is_still_mine(
    holder: str | None, stored: bool | None
) -> None:
    """Then an attempt that was given up was done late, and it begins again."""
    asked, found = gone_through([StoredRow("old", 7), False, StoredRow(holder, 1)])
    assert asked[2] == ReadRow("claim")
    assert found is stored
    if stored is None:
        assert asked[3] == ReadRow("fleet")


def test_a_turn_is_held_for_a_lease_after_its_newest_confirmed_write_was_begun() -> None:
    turn = HeldTurn(2.0, -math.inf)
    assert not turn.held(0.0)
    turn.confirmed(5.0)
    turn.confirmed(4.0)
    assert turn.held(6.9)
    assert not turn.held(7.0)
    turn.followed = True
    assert not turn.held(5.5)


def test_a_heartbeat_is_answered_once_the_turn_was_confirmed_after_it_had_come() -> None:
    """Else a coordinator that was stopped with its clock would prolong a lease that its successor takes for ended."""
    answers = AnswersDue()
    assert answers.heard("r0", 10.0, now_s=3.0, confirmed_s=2.9) is None
    assert answers.due(2.9) == []
    assert answers.heard("r1", 20.0, now_s=3.2, confirmed_s=2.9) is None
    assert answers.due(3.1) == [("r0", 10.0)]
    assert answers.due(3.1) == []
    assert answers.heard("r0", 11.0, now_s=3.5, confirmed_s=3.1) == 10.0  # it is there; the lease is no longer for it
    assert answers.due(3.5) == [("r1", 20.0)]  # at the same moment is not after it
    assert answers.due(3.6) == [("r0", 11.0)]
    assert answers.heard("r0", 12.0, now_s=4.0, confirmed_s=math.inf) == 12.0


def test_heartbeats_that_come_faster_than_confirmations_do_not_put_off_their_answer() -> None:
    answers, found = AnswersDue(), []
    for tenth in range(40):
        now_s = tenth / 10
        answers.heard("r0", now_s, now_s, confirmed_s=now_s - 0.35)
        found += [sent_s for _, sent_s in answers.due(now_s - 0.35)]
    assert len(found) > 5
    assert all(later - earlier < 0.6 for earlier, later in itertools.pairwise(found))


def test_silence_counts_from_the_newest_sign_and_a_pause_is_nobodys() -> None:
    watch = TurnWatch(3.0)
    assert not watch.silent("a", 1, 0.0, 0.0)
    assert not watch.silent("a", 2, 1.0, 1.0)
    assert not watch.silent("a", 1, 2.0, 2.0)  # an older sign is none
    assert not watch.silent("a", 2, 3.0, 3.1)
    assert not watch.silent("a", 2, 4.0, 4.0)
    assert watch.silent("a", 2, 4.2, 4.2)
    assert not watch.silent("b", 0, 4.3, 4.3)  # another's claim
    assert not watch.silent("b", 0, 9.0, 9.0)  # nobody looked for longer than half a lease
    assert not watch.silent("b", 0, 10.0, 10.0)
    assert not watch.silent("b", 0, 11.0, 11.0)
    assert watch.silent("b", 0, 12.2, 12.3)
