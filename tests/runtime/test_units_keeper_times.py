"""When the coordinator's part in checkpoints does what, in a time that jumps: its store is real, its members listen."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.runtime import jumping_loop
from tests.runtime.test_units_keeper import Office

from outlast.config import RunConfig
from outlast.core import events as ev
from outlast.core.protocol import View, ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet.roster import Peer
from outlast.core.protocol.saves.commit import SaveId
from outlast.runtime.coordinator._publisher import Archive
from outlast.runtime.settings.save_settings import SaveSettings
from outlast.runtime.transport import save_messages as wire

SAVE = SaveId(epoch=1, n=1, step=4)


class Timed(Office):
    """Its clock is the running loop's, from 0 on; the time of what it tells members is in `told_s`."""

    def __init__(self, base: Path, config: RunConfig | None = None, **settings: Any) -> None:
        self.told_s: list[tuple[float, Any]] = []
        super().__init__(base, config)
        known = msgspec.json.decode(self.coordinator.facts["checkpoints"], type=SaveSettings)
        changed = msgspec.json.encode(msgspec.structs.replace(known, **settings)).decode()
        self.coordinator.facts["checkpoints"] = changed

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() - jumping_loop.BEGAN_S

    def _tell(self, names: Any, message: Any) -> None:
        super()._tell(names, message)
        self.told_s.append((self.now_s(), message))

    def asked_s(self) -> list[tuple[float, str]]:
        return [(round(at_s, 1), said.reason) for at_s, said in self.told_s if isinstance(said, wire.SaveNow)]

    def begins(self, *members: str) -> None:
        """The first view, and nobody waits for the store."""
        self.coordinator.view = View(id=ViewId(epoch=1, n=1), members=members, start=True)
        for name in members:
            self.coordinator.roster.peers[name] = Peer(name=name, agent="a0", status="member")
        self.keeper.look()

    def said_s(self, kind: str) -> list[float]:
        return [round(fields["now_s"], 1) for name, fields in self.written if name == kind]

    def _write(self, kind: str, **fields: Any) -> None:
        super()._write(kind, **fields, now_s=self.now_s())


async def until(test: Callable[[], Any]) -> None:
    """What a thread does takes no time here."""
    while not test():
        await asyncio.sleep(0)


def played(scene: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await scene()

    jumping_loop.run(whole())


def test_a_store_that_refuses_is_tried_again_every_half_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [3]
    whole = Archive.newest_epoch

    def refuses(archive: Archive) -> int:
        left[0] -= 1
        if left[0] > 0:
            raise OSError(errno.EIO, "the disk is gone")
        return whole(archive)

    monkeypatch.setattr(Archive, "newest_epoch", refuses)

    async def scene() -> None:
        office = Timed(tmp_path)
        office.begins("r0.1")
        for tried in (1, 2):
            await until(lambda tried=tried: len(office.said("checkpoint_failed")) == tried)
            assert office.keeper.place.archive is None
            await asyncio.sleep(30.0)
        await until(lambda: office.keeper.place.archive)
        assert office.said_s("checkpoint_failed") == [0.0, 30.0]
        assert [fields["cause"] for fields in office.said("checkpoint_failed")] == ["unreadable"] * 2
        await office.close()

    played(scene)


def test_a_store_that_does_not_answer_is_told_of_and_taken_when_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, whole = threading.Event(), Archive.newest_epoch

    def hangs(archive: Archive) -> int:
        answers.wait(60.0)
        return whole(archive)

    monkeypatch.setattr(Archive, "newest_epoch", hangs)

    async def scene() -> None:
        office = Timed(tmp_path, timeout_s=40.0)
        office.begins("r0.1")
        await asyncio.sleep(500.0)
        assert office.said_s("checkpoint_failed") == [40.0]
        assert "it has not answered for 40 s" in office.said("checkpoint_failed")[0]["reason"]
        answers.set()
        await until(lambda: office.keeper.place.archive)
        assert any(isinstance(said, wire.SaveBase) for said in office.told)
        await office.close()

    played(scene)


def test_a_save_of_which_a_writer_is_never_heard_again_fails_and_its_view_saves_the_next(tmp_path: Path) -> None:
    async def scene() -> None:
        office = Timed(tmp_path, timeout_s=40.0)
        office.begins("r0.1", "r1.1")
        await until(lambda: office.keeper.place.archive)
        office.keeper.received("r0.1", wire.SaveBegun(member="r0.1", save=SAVE, writer=0, reason="every step"))
        await asyncio.sleep(899.0)
        assert office.said("checkpoint_failed") == []
        await asyncio.sleep(2.0)
        [failed] = office.said("checkpoint_failed")
        assert (failed["step"], failed["cause"]) == (4, "writer_failed")
        settled = [said for said in office.told if isinstance(said, wire.SaveSettled)]
        assert [(said.save, said.generation) for said in settled] == [(SAVE, None)]
        await office.close()

    played(scene)


def test_when_to_save_follows_from_the_record_and_is_asked_for_again_while_nobody_saves(tmp_path: Path) -> None:
    """The first tells what a save costs; losses bring the next one closer."""

    async def scene() -> None:
        office = Timed(tmp_path, every=0)
        started = ev.RunStarted(
            at_s=0.0, run_id="", command=[], num_replicas=2, num_spares=0, signature={}, config={}
        )  # fmt: skip
        office.keeper.heard(started)
        office.begins("r0.1", "r1.1")
        await until(lambda: office.keeper.place.archive)
        office.keeper.heard(ev.ViewFormed(at_s=0.0, epoch=1, n=1, step=0, roll_call_s=0.1))
        assert office.said("checkpoint_interval")[0]["interval_s"] == 10.0, "the first save measures what one costs"
        await asyncio.sleep(10.0)
        assert [at_s for at_s, _ in office.asked_s()] == [10.0]
        saved = ev.CheckpointSaved(
            at_s=office.now_s(), step=4, generation=0, view=[1, 1], num_writers=2, state_bytes=9, written_bytes=9,
            blocked_s=2.0, copied_s=1.0, durable_s=3.0, reason="due", url="",
        )  # fmt: skip
        office.keeper.heard(saved)
        interval_s = office.said("checkpoint_interval")[-1]["interval_s"]
        assert interval_s > 60.0
        await asyncio.sleep(3.5 * interval_s)
        asked = [at_s - 10.0 for at_s, reason in office.asked_s() if reason.startswith("due: ")]
        assert asked == [pytest.approx(n * interval_s, abs=0.2) for n in (0, 1, 2, 3)]
        for _ in range(5):
            office.keeper.heard(ev.FleetGone(at_s=office.now_s(), step=3, detail=""))
        assert office.said("checkpoint_interval")[-1]["interval_s"] < interval_s / 2
        office.coordinator.over = True
        num = len(office.asked())
        await asyncio.sleep(3.5 * interval_s)
        assert len(office.asked()) == num, "the run is over"
        await office.close()

    played(scene)


@pytest.mark.parametrize("message", [m.Stop(reason="terminated"), m.Leaving(member="r0.1")])
def test_a_stop_that_waits_for_a_save_goes_on_when_its_time_is_up(tmp_path: Path, message: Any) -> None:
    async def scene() -> None:
        office = Timed(tmp_path, RunConfig(stop_save_s=25.0))
        office.begins("r0.1")
        await until(lambda: office.keeper.place.archive)
        gone = list[tuple[float, Any]]()
        assert office.keeper.before(message, lambda said: gone.append((office.now_s(), said)))
        assert len(office.asked()) == 1
        await asyncio.sleep(20.0)
        office.keeper.before(message, lambda said: gone.append((office.now_s(), said)))
        assert gone == []
        await asyncio.sleep(60.0)
        assert gone[0][0] == pytest.approx(25.0), "however often it is asked"
        assert all(at_s == pytest.approx(25.0) for at_s, _ in gone)
        await office.close()

    played(scene)


def test_a_stop_that_comes_before_it_is_known_what_was_saved_waits_no_longer_than_a_save_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(Archive, "newest_epoch", lambda self: answers.wait(60.0) * 0)

    async def scene() -> None:
        office = Timed(tmp_path, RunConfig(stop_save_s=25.0))
        office.journal.put(office.coordinator.epoch, wire.SAVE_EPOCHS, b"0")  # an earlier coordinator's
        office.begins("r0.1")
        gone, stop = list[tuple[float, Any]](), m.Stop(reason="terminated")
        for _ in range(2):
            assert office.keeper.before(stop, lambda said: gone.append((office.now_s(), said)))
        await asyncio.sleep(60.0)
        assert gone == [(pytest.approx(25.0), stop)], "once"
        answers.set()
        await office.close()

    played(scene)


@pytest.mark.parametrize(("asked", "at_s"), [(7, 0.0), (6, 25.0)])
def test_a_stop_goes_on_with_the_last_save_that_an_earlier_coordinator_asked_for(
    tmp_path: Path, asked: int, at_s: float
) -> None:
    """Its members have begun no step since, and make none in which another could be asked for."""

    async def scene() -> None:
        office = Timed(tmp_path, RunConfig(stop_save_s=25.0))
        office.begins("r0.1")
        await until(lambda: office.keeper.place.archive)
        gone = list[float]()
        assert office.keeper.before(m.Stop(reason="terminated"), lambda _: gone.append(office.now_s()))
        assert office.number() > 7
        office.keeper._held.saved(asked, last=False)
        await asyncio.sleep(60.0)
        assert gone == [pytest.approx(at_s)]
        await office.close()

    played(scene)


def slow(step_s: float, durable_s: float) -> list[Any]:
    """What the journal has of a run whose steps and saves take so long."""
    saved = ev.CheckpointSaved(
        at_s=1.0, step=2, generation=0, view=[1, 1], num_writers=1, state_bytes=1, written_bytes=1, blocked_s=0.0,
        copied_s=0.0, durable_s=durable_s, reason="", url="",
    )  # fmt: skip
    made = ev.ProgressMade(at_s=1.0, view=[1, 1], stable=2, losses=[], step_s=step_s)
    return [made, saved] if durable_s else [made]


def too_few() -> ev.VacancyDecided:
    return ev.VacancyDecided(at_s=2.0, action="stop", running=1, wanted=2, least=2, wait_s=0.0, reason="too few")


@pytest.mark.parametrize(
    ("step_s", "durable_s", "ends_s"),
    [(15.0, 40.0, 4 * (2 * 15.0 + 40.0)), (15.0, 0.0, 4 * 2 * 15.0 + 600.0), (0.1, 0.2, 25.0)],
)
def test_a_stop_that_nobody_asked_for_waits_for_its_save_as_long_as_saves_take(
    tmp_path: Path, step_s: float, durable_s: float, ends_s: float
) -> None:
    """Of two replicas one is left, with the work of both. Nobody kills a run that stops by itself; one that is asked
    to stop meanwhile has as long as ever."""

    async def scene() -> None:
        office = Timed(tmp_path, RunConfig(stop_save_s=25.0))
        office.begins("r0.1")
        await until(lambda: office.keeper.place.archive)
        went = list[tuple[float, str]]()
        office.handle = lambda message: went.append((office.now_s(), message.reason))
        for event in [*slow(step_s, durable_s), too_few()]:
            office.keeper.heard(event)
        await asyncio.sleep(1000.0)
        assert went == [(pytest.approx(ends_s), "too few replicas: too few")]
        began_s = office.now_s()
        office.keeper.before(m.Stop(reason="terminated"), office.handle)
        await asyncio.sleep(1000.0)
        assert went[1:] == [(pytest.approx(began_s + 25.0), "terminated")]
        await office.close()

    played(scene)


@pytest.mark.parametrize(("again", "ends_s"), [(False, 85.0), (True, 720.0)])
def test_where_the_last_save_fails_only_one_that_is_under_way_is_waited_for_as_long(
    tmp_path: Path, again: bool, ends_s: float
) -> None:
    async def scene() -> None:
        office = Timed(tmp_path, RunConfig(stop_save_s=25.0))
        office.begins("r0.1")
        await until(lambda: office.keeper.place.archive)
        went = list[float]()
        office.handle = lambda message: went.append(office.now_s())
        for event in [*slow(15.0, 0.0), too_few()]:
            office.keeper.heard(event)
        await asyncio.sleep(60.0)
        office.keeper.received("r0.1", wire.SaveLost(member="r0.1", save=SAVE, writer=0, reason="no room"))
        if again:
            later = SaveId(epoch=1, n=1, step=5)
            office.keeper.received("r0.1", wire.SaveBegun(member="r0.1", save=later, writer=0, reason="asked"))
        await asyncio.sleep(800.0)
        assert went == [pytest.approx(ends_s)]
        await office.close()

    played(scene)


@pytest.mark.parametrize("message", [m.Stop(reason="terminated"), m.Leaving(member="r0.1")])
def test_a_save_that_people_wait_for_is_asked_for_again_where_it_fails(tmp_path: Path, message: Any) -> None:
    """They wait no longer for that, and who asked for a stop is asked for a last save again: the number is odd."""

    async def scene() -> None:
        office = Timed(tmp_path, RunConfig(stop_save_s=25.0))
        office.begins("r0.1")
        await until(lambda: office.keeper.place.archive)
        gone = list[float]()
        assert office.keeper.before(message, lambda _: gone.append(office.now_s()))
        for step in (4, 5, 6):
            await asyncio.sleep(2.0)
            lost = SaveId(epoch=1, n=1, step=step)
            office.keeper.received("r0.1", wire.SaveLost(member="r0.1", save=lost, writer=0, reason="no room"))
            other = SaveId(epoch=1, n=1, step=step + 100)  # two at once are no reason to ask twice
            office.keeper.received("r0.1", wire.SaveLost(member="r0.1", save=other, writer=0, reason="no room"))
        await asyncio.sleep(2.0)
        asked = [(at_s, said.number) for at_s, said in office.told_s if isinstance(said, wire.SaveNow)]
        assert [round(at_s, 1) for at_s, _ in asked] == [0.0, 2.5, 4.5, 6.5]
        assert all(number % 2 for _, number in asked), "one replica is all of them"
        assert gone == []
        under_way = SaveId(epoch=1, n=1, step=7)
        office.keeper.received("r0.1", wire.SaveLost(member="r0.1", save=lost, writer=0, reason="no room"))
        office.keeper.received("r0.1", wire.SaveBegun(member="r0.1", save=under_way, writer=0, reason="stop"))
        await asyncio.sleep(60.0)
        assert len(office.asked()) == 4, "not while another is under way"
        office.keeper.received("r0.1", wire.SaveLost(member="r0.1", save=under_way, writer=0, reason="no room"))
        await asyncio.sleep(1.0)
        assert len(office.asked()) == 4, "nobody waits any more"
        assert gone == [pytest.approx(25.0)]
        await office.close()

    played(scene)
