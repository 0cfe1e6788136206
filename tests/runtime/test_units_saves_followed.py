"""Saves that came to nothing as their coordinator was followed: real members' parts, and the next coordinator's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.test_units_keeper import Office
from tests.runtime.test_units_saves import Made, Trained, made, taken

from outlast.config import RunConfig
from outlast.core import events as ev
from outlast.core.protocol import View, ViewId
from outlast.core.protocol.saves.agreement import LostSaves
from outlast.core.protocol.saves.commit import SaveId
from outlast.runtime.coordinator._record_summary import JournalFold
from outlast.runtime.saving.member_saves import Saves
from outlast.runtime.transport import save_messages as wire

__all__ = ["made"]

SAVE = SaveId(epoch=1, n=1, step=4)
Pair = list[tuple[Saves, Trained, list[Any]]]


def a_part_fails(made: Made, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Both members of a view have taken a save, and the second's part came to nothing. What they said of it went to a
    coordinator that is gone."""
    view = View(id=ViewId(1, 1), members=("r0.1", "r1.1"))
    pair = [made(every=4, me=name) for name in view.members]
    monkeypatch.setattr(pair[1][0].archive, "save", refuse)
    for saves, member, _ in pair:
        member.view, member.stable = view, 0
        saves.told(wire.SaveBase(epoch=1, base=0))
        saves.enter(view, 4)
        assert saves._prepared is not None
        saves._prepared.result(30)
        taken(saves, view, 4, saves.vote(3))
        saves.stable(view.id, 4)
    assert [type(pair[0][2][-1]), type(pair[1][2][-1])] == [wire.SaveDone, wire.SaveLost]
    return pair


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError("read-only")


async def followed(office: Office, pair: Pair) -> None:
    """Both say hello to the next one, and hear what it has to say."""
    await office.installed(1, "r0.1", "r1.1")
    for name, (saves, _, _) in zip(("r0.1", "r1.1"), pair, strict=True):
        for message in saves.repeat():
            office.keeper.received(name, message)
    for settled in [said for said in office.told if isinstance(said, wire.SaveSettled)]:
        for saves, _, _ in pair:
            saves.told(settled)


def test_a_part_that_failed_is_told_to_who_follows(made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other's promise would wait for it until the save is overdue, and no other save be asked for meanwhile, also
    before a stop."""
    pair = a_part_fails(made, monkeypatch)

    async def scene() -> None:
        office = Office(tmp_path)
        await followed(office, pair)
        assert not office.keeper._commits.under_way
        assert [saves._flights for saves, _, _ in pair] == [{}, {}]
        assert [(e["step"], e["cause"]) for e in office.said("checkpoint_failed")] == [(4, "writer_failed")]
        await office.close()

    asyncio.run(scene())


def test_that_a_save_was_given_up_is_told_to_who_follows(
    made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The coordinator had heard that the part failed, and had told that to one alone as it ended; and written it."""
    pair = a_part_fails(made, monkeypatch)
    pair[1][0].told(wire.SaveSettled(epoch=1, save=SAVE, generation=None, reason="writer 1: read-only"))

    async def scene() -> None:
        office = Office(tmp_path)
        story = office.keeper._story
        story._failed_before.add((SAVE.view, SAVE.step))
        await followed(office, pair)
        assert not office.keeper._commits.under_way
        assert [saves._flights for saves, _, _ in pair] == [{}, {}]
        assert office.said("checkpoint_failed") == [], "it is told once"
        await office.close()

    asyncio.run(scene())


def test_who_has_not_heard_the_answer_is_answered_again(
    made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pair = a_part_fails(made, monkeypatch)

    async def scene() -> None:
        office = Office(tmp_path)
        await followed(office, pair)
        before = len(office.told)
        for message in pair[1][0].repeat():
            office.keeper.received("r1.1", message)
        [again] = office.told[before:]
        assert (again.save, again.generation) == (SAVE, None)
        assert len(office.said("checkpoint_failed")) == 1
        await office.close()

    asyncio.run(scene())


def test_what_was_lost_in_an_earlier_view_or_before_a_later_save_is_not_said_again() -> None:
    lost, later = LostSaves(), SaveId(epoch=1, n=1, step=8)
    lost.add(SAVE, "full")
    lost.add(later, "full")
    assert [save.step for save, _ in lost.of((1, 1))] == [4, 8]
    lost.passed(SaveId(epoch=1, n=1, step=6))
    lost.add(SAVE, "step 6 was published first")
    assert lost.of((1, 1)) == [(later, "full")]
    assert lost.of((1, 2)) == []
    lost.add(SaveId(epoch=1, n=2, step=9), "full")
    assert lost.of((1, 1)) == []
    for step in range(10, 30):
        lost.add(SaveId(epoch=1, n=2, step=step), "full")
    assert [save.step for save, _ in lost.of((1, 2))] == list(range(22, 30))


def test_which_saves_have_failed_is_taken_from_the_journal() -> None:
    fold = JournalFold(RunConfig())
    fold.take(ev.CheckpointBegan(at_s=0.0, step=4, view=[1, 1], reason=""))
    fold.take(ev.CheckpointFailed(at_s=0.0, step=-1, cause="unwritable", reason="full", url=""))
    assert list(fold.copy().failed) == []
    fold.take(ev.CheckpointFailed(at_s=0.0, step=4, cause="writer_failed", reason="full", url=""))
    assert list(fold.copy().failed) == [((1, 1), 4)]
