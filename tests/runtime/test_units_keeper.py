"""The coordinator's part in checkpoints, in this process: what it says of saves that come to nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from outlast.checkpoint import CheckpointEngine, LocalStore, heads
from outlast.config import RunConfig
from outlast.core import events as ev
from outlast.core.policy import RunRecord, VacancyPolicy
from outlast.core.protocol import Coordinator, Settings, View, ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet.roster import Peer
from outlast.core.protocol.fleet.state import Change
from outlast.core.protocol.saves.commit import PartReport, SaveId
from outlast.journal import Journal
from outlast.runtime.coordinator._saves import Keeper
from outlast.runtime.settings.save_settings import SaveSettings
from outlast.runtime.transport import save_messages as wire


class Office:
    """A keeper with a journal, a store and members that only listen."""

    def __init__(self, base: Path, config: RunConfig | None = None) -> None:
        self.place = base / "c"
        self.journal = Journal.create(base / "run")
        self.coordinator = Coordinator(Settings(num_replicas=2), self.journal.claim("coordinator"))
        settings = SaveSettings(
            target=str(self.place), every=1, keep_last=9, keep_every=0, drain_to="", num_slots=2, min_s=1.0
        )
        self.coordinator.facts["checkpoints"] = msgspec.json.encode(settings).decode()
        self.written: list[tuple[str, dict[str, Any]]] = []
        self.told: list[Any] = []
        self.handled: list[Any] = []
        self.handle: Callable[[Any], None] = self.handled.append
        self.keeper = Keeper(
            self.journal, self.coordinator, run="mine", config=config or RunConfig(), write=self._write,
            tell=self._tell, probe=lambda phase, step: None, now=self.now_s, handle=lambda event: self.handle(event),
        )  # fmt: skip

    def now_s(self) -> float:
        return 0.0

    def _write(self, kind: str, **fields: Any) -> None:
        self.written.append((kind, fields))

    def _tell(self, names: Iterable[str], message: Any) -> None:
        self.told.append(message)

    def said(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.written if name == kind]

    def asked(self) -> list[str]:
        return [message.reason for message in self.told if isinstance(message, wire.SaveNow)]

    def number(self) -> int:
        """Of the newest request."""
        return max(message.number for message in self.told if isinstance(message, wire.SaveNow))

    async def installed(self, n: int, *members: str) -> None:
        """The view is known to the keeper, its store opened."""
        self.coordinator.view = View(id=ViewId(epoch=1, n=n), members=members, start=n == 1)
        for name in members:
            self.coordinator.roster.peers[name] = Peer(name=name, agent="a0", status="member")
        self.keeper.look()
        while not any(isinstance(message, wire.SaveBase) for message in self.told):
            await asyncio.sleep(0)

    async def close(self) -> None:
        await self.keeper.close()
        self.journal.close()


def done(save: SaveId, report: PartReport, asked: int = 0, steps_left: int = 5) -> wire.SaveDone:
    return wire.SaveDone(
        member="r0.1", save=save, report=report, reason="", state_bytes=1, staged_bytes=1, written_bytes=1,
        blocked_s=0.0, copied_s=0.0, durable_s=0.0, asked=asked, steps_left=steps_left,
    )  # fmt: skip


def test_a_save_that_is_heard_of_when_its_view_has_ended_is_lost_with_it_and_asked_for_again(tmp_path: Path) -> None:
    async def scene() -> None:
        office = Office(tmp_path)
        await office.installed(1, "r0.1", "r1.1")
        await office.installed(2, "r0.1")
        save = SaveId(epoch=1, n=1, step=4)
        for writer in (0, 1):
            began = wire.SaveBegun(member=f"r{writer}.1", save=save, writer=writer, reason="every step")
            office.keeper.received(f"r{writer}.1", began)
        assert [fields["step"] for fields in office.said("checkpoint_began")] == [4]
        assert [(e["step"], e["cause"]) for e in office.said("checkpoint_failed")] == [(4, "view_changed")]
        assert office.asked() == ["the save of step 4 was lost with its view"]
        await office.close()

    asyncio.run(scene())


def test_what_was_written_for_a_publication_that_failed_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        office = Office(tmp_path)
        await office.installed(1, "r0.1")
        archive = office.keeper.place.archive
        assert archive is not None
        engine = CheckpointEngine(str(office.place), run="mine")
        handle = engine.save(4, {"w": torch.ones(5000)}, view=(1, 1))
        assert handle is not None
        report = handle.durable.result(20)
        assert any(name.startswith(handle.save.token) for name in archive._store.names())

        def full(number: int, head: bytes) -> bool:
            raise OSError(errno.ENOSPC, "no room")

        monkeypatch.setattr(archive._store, "publish", full)
        office.keeper.received("r0.1", done(handle.save, report))
        while not office.said("checkpoint_failed"):
            await asyncio.sleep(0)
        await office.close()
        assert office.said("checkpoint_failed")[0]["cause"] == "publish_failed"
        assert not any(name.startswith(handle.save.token) for name in archive._store.names())
        engine.close()

    asyncio.run(scene())


def test_who_may_have_been_followed_publishes_and_removes_nothing_until_the_claim_is_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [False]
    monkeypatch.setattr(Journal, "held", property(lambda self: held[0]))
    monkeypatch.setattr("outlast.runtime.coordinator._save_commits._UNHELD_S", 0.0)

    async def scene() -> None:
        office = Office(tmp_path)
        await office.installed(1, "r0.1")
        engine, tidied = CheckpointEngine(str(office.place), run="mine"), list[int]()
        archive = office.keeper.place.archive
        assert archive is not None
        asked, publish = list[int](), archive.publish

        def spied(save: SaveId, reports: Any, *, certified: bool) -> int:
            asked.append(save.step)
            number = publish(save, reports, certified=certified)
            held[0] = save.step != 5
            return number

        monkeypatch.setattr(archive, "publish", spied)
        monkeypatch.setattr(archive, "tidy", lambda generation, kept: tidied.append(generation))
        handle = engine.save(4, {"w": torch.ones(500)}, view=(1, 1))
        assert handle is not None
        office.keeper.received("r0.1", done(handle.save, handle.durable.result(20)))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not asked
        held[0] = True
        while not office.said("checkpoint_saved"):
            await asyncio.sleep(0)
        engine.settle(handle.save, 0)
        assert (tidied, asked) == ([0], [4])
        await published(office, engine, 5, asked=0)
        assert not held[0], "it was in doubt by the time that the head was written"
        assert (tidied, asked) == ([0], [4, 5])
        await office.close()
        engine.close()

    asyncio.run(scene())


class Timers:
    """A loop that tells which of its timers were cancelled."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._made = loop, list[tuple[str, asyncio.TimerHandle]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_later(self, delay_s: float, call: Any, *args: Any) -> asyncio.TimerHandle:
        made = self._loop.call_later(delay_s, call, *args)
        self._made.append((call.__name__, made))
        return made

    def of(self, name: str) -> list[bool]:
        return [handle.cancelled() for called, handle in self._made if called == name]


def test_a_publication_that_waited_until_the_claim_was_in_doubt_is_made_only_when_it_is_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was on its thread already, and nothing looked again before the head was written."""
    held, tried = [True], list[bool]()
    monkeypatch.setattr(Journal, "held", property(lambda self: held[0]))
    monkeypatch.setattr("outlast.runtime.coordinator._save_commits._UNHELD_S", 0.0)

    async def scene() -> None:
        office = Office(tmp_path)
        await office.installed(1, "r0.1")
        engine, store = CheckpointEngine(str(office.place), run="mine"), office.place
        archive = office.keeper.place.archive
        assert archive is not None

        def begun(phase: Any, step: int) -> None:
            if not tried:
                held[0] = False
            tried.append(held[0])

        monkeypatch.setattr(archive, "_probe", begun)
        timers = Timers(asyncio.get_running_loop())
        monkeypatch.setattr(office.keeper._commits, "_loop", timers)
        handle = engine.save(4, {"w": torch.ones(500)}, view=(1, 1))
        assert handle is not None
        office.keeper.received("r0.1", done(handle.save, handle.durable.result(20)))
        while not tried:
            await asyncio.sleep(0)
        archive.publisher.submit(int).result(20)  # what was begun has ended
        for _ in range(100):
            await asyncio.sleep(0)
        assert LocalStore(str(store)).generations() == []
        assert timers.of("_unanswered") == [True], "no patience with the store outlives the attempt it was for"
        archive.certify(0)
        archive.publisher.submit(int).result(20)
        held[0] = True
        while not office.said("checkpoint_saved"):
            await asyncio.sleep(0)
        assert LocalStore(str(store)).generations() == [0]
        assert tried == [False, True, True]  # begun, begun again, done
        assert not office.said("checkpoint_failed")
        archive.publisher.submit(int).result(20)
        assert [head.certified for head in heads(LocalStore(str(store)))[0]] == [True], "what was to be done then"
        assert not [fields["note"] for fields in office.said("checkpoint_pruned") if fields["note"]]
        await office.close()
        engine.close()

    asyncio.run(scene())


async def published(office: Office, engine: CheckpointEngine, step: int, asked: int, steps_left: int = 5) -> None:
    """The only writer's save of this step, with the request that it answers."""
    handle = engine.save(step, {"w": torch.ones(500)}, view=(1, 1))
    assert handle is not None
    office.keeper.received("r0.1", done(handle.save, handle.durable.result(20), asked, steps_left))
    while step not in [fields["step"] for fields in office.said("checkpoint_saved")]:
        await asyncio.sleep(0)
    engine.settle(handle.save, len(office.said("checkpoint_saved")))


@pytest.mark.parametrize("message", [m.Stop(epoch=1, reason="", exit_code=143), m.Leaving(member="r0.1")])
def test_a_stop_waits_for_its_own_save_not_for_one_that_was_under_way(tmp_path: Path, message: Any) -> None:
    """And the sole holder of the state that is asked to leave is the stop of the run: an odd number tells so. Steps
    follow every other save, whatever was asked for before it."""

    async def scene() -> None:
        office, went = Office(tmp_path), list[str]()
        await office.installed(1, "r0.1")
        engine = CheckpointEngine(str(office.place), run="mine")
        assert office.keeper.before(message, lambda message: went.append("on"))
        assert office.number() % 2 == 1
        office.keeper.wanted("due")
        for step, asked in ((4, 0), (5, 2), (6, office.number() - 1)):
            await published(office, engine, step, asked=asked)
            assert went == []
            told = len(office.asked())
            office.keeper.greet("r1.1")
            assert len(office.asked()) == told + 1, "who comes is asked as well"
        await published(office, engine, 7, asked=office.number())
        assert went == ["on"]
        engine.close()
        await office.close()

    asyncio.run(scene())


@pytest.mark.parametrize("changes", [False, True])
def test_who_leaves_goes_with_all_others_that_the_save_was_made_for(tmp_path: Path, changes: bool) -> None:
    """One after the other, a step more would be made and saved by nobody; so it would in a view that is being made as
    the save is published, and then it is asked for again."""

    async def scene() -> None:
        office, went = Office(tmp_path), list[Any]()
        await office.installed(1, "r0.1")
        engine = CheckpointEngine(str(office.place), run="mine")
        for name in ("r0.1", "r1.1"):
            assert office.keeper.before(m.Leaving(member=name), went.append)
        first = office.number()
        if changes:
            office.coordinator.change = Change(
                upto=ViewId(epoch=1, n=1), view=("r0.1",), old={}, cause="planned", waiting=set()
            )
        await published(office, engine, 4, asked=first)
        if changes:
            assert (went, office.number() > first, office.number() % 2) == ([], True, 1)
            office.coordinator.change = None
            await published(office, engine, 5, asked=office.number())
        assert went == [m.Departing(members=("r0.1", "r1.1"))]
        engine.close()
        await office.close()

    asyncio.run(scene())


@pytest.mark.parametrize("message", [m.Leaving(member="r0.1"), m.Stop(epoch=1, reason="", exit_code=143)])
def test_who_was_asked_to_leave_and_has_made_the_last_step_ends_with_the_run(tmp_path: Path, message: Any) -> None:
    """Struck from outside beside a coordinator that had just died: all 400 steps were made and saved, and the run ended
    as stopped before the last one. A stop of the run goes on all the same."""

    async def scene() -> None:
        office, went = Office(tmp_path), list[Any]()
        await office.installed(1, "r0.1")
        engine = CheckpointEngine(str(office.place), run="mine")
        assert office.keeper.before(message, went.append)
        await published(office, engine, 400, asked=office.number(), steps_left=0)
        assert went == ([] if isinstance(message, m.Leaving) else [message])
        engine.close()
        await office.close()

    asyncio.run(scene())


def test_who_leaves_while_others_stay_or_come_stops_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        office = Office(tmp_path)
        await office.installed(1, "r0.1", "r1.1")
        assert office.keeper.before(m.Leaving(member="r0.1"), lambda message: None)
        assert office.number() % 2 == 0
        office.coordinator.roster.peers["r1.2"] = Peer(name="r1.2", agent="a0", status="spawning")
        office.coordinator.roster.mark("r1.2", "joining")
        assert office.keeper.before(m.Leaving(member="r1.1"), lambda message: None)
        assert office.number() % 2 == 0
        office.coordinator.roster.mark("r1.2", "gone")
        office.keeper.wanted("due")
        assert office.number() % 2 == 1, "nobody stays now, and nobody comes"
        await office.close()

    asyncio.run(scene())


def test_the_last_save_lets_go_whatever_was_asked_for_since(tmp_path: Path) -> None:
    """All who have the state go, and then somebody comes: the members wait for the stop with the agreed save."""

    async def scene() -> None:
        office, went = Office(tmp_path), list[Any]()
        await office.installed(1, "r0.1")
        engine = CheckpointEngine(str(office.place), run="mine")
        assert office.keeper.before(m.Leaving(member="r0.1"), went.append)
        first = office.number()
        office.coordinator.roster.peers["r1.2"] = Peer(name="r1.2", agent="a0", status="spawning")
        office.coordinator.roster.mark("r1.2", "joining")
        office.keeper.wanted("due")
        assert (first % 2, office.number() % 2) == (1, 0)
        await published(office, engine, 4, asked=first)
        assert went == [m.Departing(members=("r0.1",))]
        engine.close()
        await office.close()

    asyncio.run(scene())


@pytest.mark.parametrize("message", [m.Stop(epoch=1, reason="", exit_code=143), m.Leaving(member="r0.1")])
def test_a_stop_in_the_middle_of_a_view_change_saves_too(tmp_path: Path, message: Any) -> None:
    async def scene() -> None:
        office = Office(tmp_path)
        await office.installed(1, "r0.1", "r1.1")
        office.coordinator.roster.peers["r1.1"].status = "gone"
        office.coordinator.change = Change(
            upto=ViewId(epoch=1, n=1), view=("r0.1", "r1.1"), old={}, cause="r1.1 was killed", waiting=set()
        )
        assert office.keeper.before(message, lambda message: None)
        assert office.number() % 2 == 1
        office.coordinator.roster.peers["r0.1"].status = "gone"
        assert not office.keeper.before(message, lambda message: None), "there is nobody to wait for"
        await office.close()

    asyncio.run(scene())


@pytest.mark.parametrize("auto", [True, False])
def test_deaths_ask_for_spares_where_that_is_left_to_outlast(tmp_path: Path, auto: bool) -> None:
    async def scene() -> None:
        office = Office(tmp_path, RunConfig(replicas=2, spares="auto" if auto else 0))
        events: list[ev.AnyEvent] = [
            ev.RunStarted(at_s=0.0, run_id="", command=[], num_replicas=2, num_spares=0, signature={}, config={}),
            ev.ViewFormed(at_s=0.0, epoch=1, n=1, step=0, roll_call_s=0.1),
        ]
        died = ev.ReplicaExited(at_s=9.0, replica="r0.1", cause="signal", detail="", noticed_by="agent a0", step=3)
        record, num = RunRecord(), 0
        for event in [*events, *[died] * 99]:
            office.keeper.heard(event)
            record.take(event)
            await asyncio.sleep(0)
            num += isinstance(event, ev.ReplicaExited)
            if record.spares(0.0).spares:
                break
        if auto:
            assert 1 < num < 99, "as many deaths as make it worth while"
            reason = f"{num} deaths so far, and a place is filled again after 30 s"
            assert office.handled == [m.SparesWorth(number=1, reason=reason)]
        else:
            assert office.handled == []
        await office.close()

    asyncio.run(scene())


def listens(office: Office, event: m.SaveAwaited) -> None:
    """As the machine does."""
    office.handled.append(event)
    office.coordinator.shortage.saving = event.waits


@pytest.mark.parametrize("on_vacancy", ["shrink", "wait"])
def test_who_waits_for_lost_replicas_hears_that_a_stop_waits_for_its_save(tmp_path: Path, on_vacancy: Any) -> None:
    """And that all are to leave, whoever may come; of a run that never waits nothing is said."""
    vacancies = VacancyPolicy(kind=on_vacancy)

    async def scene() -> None:
        office = Office(tmp_path)
        c, engine = office.coordinator, CheckpointEngine(str(office.place), run="mine")
        c.settings = dataclasses.replace(c.settings, vacancies=vacancies)
        office.handle = lambda event: listens(office, event)
        await office.installed(1, "r0.1")
        c.roster.peers["r2.1"] = Peer(name="r2.1", agent="a0", status="spawning")
        c.roster.mark("r2.1", "fresh")
        waits, over = ([m.SaveAwaited(waits=w)] if on_vacancy == "wait" else [] for w in (True, False))
        went = list[Any]()
        assert office.keeper.before(m.Leaving(member="r0.1"), went.append)
        assert (office.handled, went) == (waits, [])
        await published(office, engine, 4, asked=office.number())
        assert (office.handled, went) == (waits + over, [m.Departing(members=("r0.1",))])
        await office.installed(2, "r2.1")
        assert office.keeper.before(m.Stop(reason="terminated"), went.append)
        assert office.handled == waits + over + waits
        engine.close()
        await office.close()

    asyncio.run(scene())


def test_who_is_to_leave_is_all_that_are_left_after_a_death(tmp_path: Path) -> None:
    async def scene() -> None:
        office = Office(tmp_path)
        c = office.coordinator
        c.settings = dataclasses.replace(c.settings, min_replicas=2)
        office.handle = lambda event: listens(office, event)
        await office.installed(1, "r0.1", "r1.1")
        assert office.keeper.before(m.Leaving(member="r0.1"), lambda message: None)
        assert office.handled == []
        await office.installed(2, "r0.1")
        await asyncio.sleep(0)
        assert office.handled == [m.SaveAwaited(waits=True)]
        await office.close()

    asyncio.run(scene())


def test_what_is_saved_in_a_view_is_known_in_a_store_that_was_used_before(tmp_path: Path) -> None:
    """Saves have higher epochs there than the run's own: it was 0 then."""

    async def scene() -> None:
        office = Office(tmp_path)
        assert office.journal.put(office.coordinator.epoch, wire.SAVE_EPOCHS, b"7")
        assert office.keeper.saved_in(ViewId(1, 1)) == 0
        office.keeper._story.saved(SaveId(epoch=8, n=1, step=4), 0, "c", "due")
        assert office.keeper.saved_in(ViewId(1, 1)) == 4, "before it has opened the place itself, too"
        await office.installed(1, "r0.1")
        assert [office.keeper.saved_in(view) for view in (ViewId(1, 1), ViewId(1, 2), ViewId(2, 1))] == [4, 0, 0]
        await office.close()

    asyncio.run(scene())


def test_a_run_that_is_asked_to_stop_is_no_member_s_departure(tmp_path: Path) -> None:
    """Whoever is signalled beside it, and in whatever order that is heard: the save says what it was made for."""

    async def scene() -> None:
        office = Office(tmp_path)
        await office.installed(1, "r0.1")
        for message in (m.Leaving(member="r0.1"), m.Stop(epoch=1, reason="", exit_code=143), m.Leaving(member="r0.1")):
            office.keeper.before(message, lambda message: None)
        assert office.asked() == ["r0.1 was asked to leave", *["the run was asked to stop"] * 2]
        await office.close()

    asyncio.run(scene())
