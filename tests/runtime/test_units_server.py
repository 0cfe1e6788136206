"""The coordinator's process, in this one: its clock is a loop's that jumps, and its port a list of what was said."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tests.runtime import jumping_loop

from outlast.config import RunConfig, encoded
from outlast.core import events as ev
from outlast.core.protocol import Certificate, View, ViewId
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.journal import Journal
from outlast.runtime.coordinator._port import Port
from outlast.runtime.coordinator.server import Server
from outlast.runtime.settings.save_settings import SaveSettings
from outlast.runtime.transport.frames import Heartbeat, HeartbeatReply
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.transport.regions import Region
from outlast.runtime.transport.save_messages import COORDINATOR_RECORD

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    m.FromCoordinator | HeartbeatReply | hm.Briefing | hm.Turned
)


class Told(Port):
    """A port that nobody calls at. `said`: (when, to whom, what)."""

    def __init__(self, *_: Any, receive: Callable[[str, str, bytes], None], **__: Any) -> None:
        self.receive, self.door = receive, None
        self.said: list[tuple[float, str, Any]] = []
        self.hung_up: list[str] = []

    def turn(self) -> None:
        return

    def send(self, names: Iterable[str], data: bytes) -> None:
        now_s = asyncio.get_running_loop().time()
        self.said += [(now_s, name, _decoder.decode(data[4:])) for name in names]

    def hang_up(self, names: Iterable[str]) -> None:
        self.hung_up += names


class Office:
    """A coordinator of run "x" in the folder; another one there follows it."""

    def __init__(self, folder: Path, *, hosts: bool = False, **config: Any) -> None:
        new = not (folder / "journal.db").exists()
        self.journal = Journal.create(folder) if new else Journal.open_writer(folder)
        loop, told = asyncio.get_running_loop(), RunConfig(**{"replicas": 2, "start_s": 30.0, **config})
        self.progress = Progress(Region(Progress.SIZE), lambda: round(loop.time() * 1e9))
        environ = {"OUTLAST_RUN": "x"}
        if hosts:
            environ |= {
                "OUTLAST_COMMAND": '["python"]', "OUTLAST_FOLDER": "/", "OUTLAST_CONFIG": encoded(told),
                "OUTLAST_OWN_HOSTS": "head",
            }  # fmt: skip
        self.server = Server(self.journal, told, b"s", self.progress, 5000.0, environ=environ, open_port=Told)
        assert isinstance(self.server.port, Told)
        self.port = self.server.port

    def hear(self, role: str, name: str, *messages: Any) -> None:
        for message in messages:
            self.port.receive(role, name, msgspec.msgpack.encode(message))

    def forms(self, view: View | None = None) -> None:
        """Two replicas of an agent come, and are one view; `view`: they come back in it."""
        told: dict[str, Any] = {"view": view, "state": "member", "formed": True} if view is not None else {}
        self.hear("agent", "a0", m.AgentHello(agent="a0", pid=7))
        for name in ("r0.1", "r1.1"):
            self.hear("agent", "a0", m.Spawned(member=name, agent="a0", pid=8))
            self.hear("member", name, m.Hello(member=name, agent="a0", epoch=0, **told))

    def to(self, name: str, *kinds: type) -> list[Any]:
        return [said for _, to, said in self.port.said if to == name and isinstance(said, kinds)]

    def events(self, *kinds: type) -> list[Any]:
        self.journal.flush(10.0)
        return [entry.event for entry in self.journal.events() if isinstance(entry.event, kinds)]

    def close(self) -> None:
        for timer in self.server._timers.values():
            timer.cancel()
        self.server.finished.cancel()
        self.journal.close()


def played(scene: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await scene()

    jumping_loop.run(whole())


def test_a_heartbeat_is_answered_with_its_own_time_and_the_view_only_when_it_is_on_the_disk(tmp_path: Path) -> None:
    async def scene() -> None:
        office, known = Office(tmp_path), list[bytes | None]()
        whole = office.port.send

        def send(names: Iterable[str], data: bytes) -> None:
            if isinstance(_decoder.decode(data[4:]), m.Install):
                known.append(office.journal.get(COORDINATOR_RECORD))
            whole(names, data)

        office.port.send = send  # type: ignore[method-assign]
        office.forms()
        [install] = office.to("r0.1", m.Install)
        assert install.view.members == ("r0.1", "r1.1")
        assert known
        for data in known:
            record = msgspec.msgpack.decode(data or b"", type=m.FleetRecord)
            assert install.view in (record.view, record.planned)
        office.hear("member", "r0.1", Heartbeat(sender="r0.1", sent_s=17.25))
        assert office.to("r0.1", HeartbeatReply) == [HeartbeatReply(epoch=1, sent_s=17.25)]
        assert office.to("r1.1", HeartbeatReply) == []
        office.close()

    played(scene)


def test_over_a_shared_record_a_heartbeat_is_answered_once_the_turn_was_confirmed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the lease over the record has not run out says nothing on a host that stood still with its clock."""

    async def scene() -> None:
        office, loop = Office(tmp_path), asyncio.get_running_loop()
        office.forms()
        confirmed_s = loop.time()
        monkeypatch.setattr(Journal, "confirmed_s", property(lambda _: confirmed_s))
        await asyncio.sleep(1.0)
        office.hear("member", "r0.1", Heartbeat(sender="r0.1", sent_s=17.25))
        await asyncio.sleep(1.0)
        assert office.to("r0.1", HeartbeatReply) == []
        confirmed_s = loop.time()
        await asyncio.sleep(0.3)
        assert office.to("r0.1", HeartbeatReply) == [HeartbeatReply(epoch=1, sent_s=17.25)]
        office.hear("member", "r0.1", Heartbeat(sender="r0.1", sent_s=18.25))
        assert [reply.sent_s for reply in office.to("r0.1", HeartbeatReply)] == [17.25, 17.25]  # it is there
        office.journal.claim("another")
        confirmed_s = loop.time()
        await asyncio.sleep(0.6)
        office.hear("member", "r0.1", Heartbeat(sender="r0.1", sent_s=19.25))
        assert 19.25 not in [reply.sent_s for reply in office.to("r0.1", HeartbeatReply)]
        assert office.server.finished.done()
        office.close()

    played(scene)


def test_one_that_was_followed_as_it_ends_the_run_tells_nobody_that_it_is_over(tmp_path: Path) -> None:
    """It would end members and agents that have not heard of the next one, and be taken for the run's end."""

    async def scene() -> None:
        office = Office(tmp_path)
        office.forms()
        office.journal.claim("another")
        office.server.handle(m.Stop(reason="asked", exit_code=4))
        assert office.to("r0.1", m.Close) == []
        assert office.to("a0", m.Stop) == []
        assert office.events(ev.RunFinished) == []
        assert await office.server.finished == 0
        office.close()

    played(scene)


def test_one_that_was_followed_answers_nobody_any_more(tmp_path: Path) -> None:
    """It would prolong a lease that its successor takes for ended."""

    async def scene() -> None:
        office = Office(tmp_path)
        office.forms()
        office.journal.claim("another")
        office.hear("member", "r0.1", Heartbeat(sender="r0.1", sent_s=17.25))
        assert office.to("r0.1", HeartbeatReply) == []
        assert office.server.finished.done()
        assert office.events(ev.RunFinished) == []
        office.close()

    played(scene)


def test_it_gives_signs_of_life_whether_or_not_somebody_speaks(tmp_path: Path) -> None:
    async def scene() -> None:
        office, seen = Office(tmp_path), set[float]()
        for _ in range(50):
            await asyncio.sleep(0.1)
            seen.add(office.progress.read()[3])
        assert len(seen) >= 49
        office.close()

    played(scene)


@pytest.mark.parametrize(
    ("after_s", "facts", "begins_s"),
    [(1.0, {}, 6.0), (12.0, {}, 24.0), (1.0, {"aggregation": "krum"}, 30.0)],
    ids=["soon", "as long as the first took", "their number matters"],
)
def test_who_comes_too_late_is_waited_for_as_long_as_the_start_may_take(
    tmp_path: Path, after_s: float, facts: dict[str, str], begins_s: float
) -> None:
    async def scene() -> None:
        office, loop = Office(tmp_path, start_s=30.0), asyncio.get_running_loop()
        began_s = loop.time()
        office.hear("agent", "a0", m.AgentHello(agent="a0", pid=7))
        await asyncio.sleep(after_s)
        office.hear("member", "r0.1", m.Hello(member="r0.1", agent="a0", epoch=0, facts=facts))
        await asyncio.sleep(60.0)
        [(at_s, _, install)] = [row for row in office.port.said if isinstance(row[2], m.Install)]
        assert (at_s - began_s, install.view.members) == (pytest.approx(begins_s), ("r0.1",))
        office.close()

    played(scene)


def test_a_run_to_which_nobody_comes_has_an_end(tmp_path: Path) -> None:
    async def scene() -> None:
        office = Office(tmp_path, start_s=30.0)
        office.hear("agent", "a0", m.AgentHello(agent="a0", pid=7))
        assert await office.server.finished == 3
        assert asyncio.get_running_loop().time() == pytest.approx(jumping_loop.BEGAN_S + 30.0)
        [end] = office.events(ev.RunFinished)
        assert "no replica was ready after 30 s" in end.detail
        office.close()

    played(scene)


def test_timers_fire_in_order_each_as_it_was_set_last(tmp_path: Path) -> None:
    async def scene() -> None:
        office, loop, fired = Office(tmp_path), asyncio.get_running_loop(), list[tuple[str, float]]()
        began_s = loop.time()
        office.server.handle = lambda event: fired.append((event.name, loop.time() - began_s))  # type: ignore[method-assign]
        for name, after_s in (("b", 2.0), ("a", 1.0), ("c", 0.5), ("d", 1.5), ("c", 3.0), ("d", float("inf"))):
            office.server._set_timer(m.SetTimer(name=name, after_s=after_s))
        await asyncio.sleep(10.0)
        assert [name for name, _ in fired] == ["a", "b", "c"]
        assert [at_s for _, at_s in fired] == [pytest.approx(s) for s in (1.0, 2.0, 3.0)]
        office.server._set_timer(m.SetTimer(name="start", after_s=float("inf")))
        office.close()

    played(scene)


def test_a_host_that_falls_silent_is_hung_up_on_and_lost_whole(tmp_path: Path) -> None:
    """Others wait for nobody there: then it has its whole patience; its own word counts until then."""
    here = hm.HostHere(agent="h1:aa", host="h1", place="there", pid=7, address="10.0.0.2", slots=2, sent_s=0.0)

    async def scene() -> None:
        office, loop = Office(tmp_path, hosts=True, endpoint="10.0.0.1:1", nnodes="1:2"), asyncio.get_running_loop()
        patience_s = RunConfig().host_silence_s
        office.hear("agent", "h1:aa", here, m.AgentHello(agent="h1:aa", pid=7))
        assert office.to("h1:aa", hm.Briefing)[0].run_id == "x"
        office.hear("agent", "a0", msgspec.structs.replace(here, agent="a0", host="head", place="here"))
        office.hear("member", "r0.1", m.Hello(member="r0.1", agent="h1:aa", epoch=0))

        async def beats(seconds: float, *names: str) -> None:
            for _ in range(round(10 * seconds)):
                await asyncio.sleep(0.1)
                for name in names:
                    office.hear("agent", name, Heartbeat(sender=name, sent_s=loop.time()))

        await beats(3 * patience_s, "h1:aa", "a0")
        assert office.port.hung_up == []
        await beats(patience_s - 0.5, "a0")
        assert office.port.hung_up == []
        await beats(1.0, "a0")
        assert office.port.hung_up == ["h1:aa", "r0.1"]
        [lost] = office.events(ev.AgentLost)
        assert lost.agent == "h1:aa"
        office.hear("agent", "h1:aa", m.AgentHello(agent="h1:aa", pid=7))
        assert [event.agent for event in office.events(ev.AgentStarted)] == ["h1:aa", "h1:aa"], "it is news again"
        office.close()

    played(scene)


def test_what_is_said_again_is_written_once_by_this_one_and_by_the_next(tmp_path: Path) -> None:
    async def scene() -> None:
        view: View | None = None
        for epoch in (1, 2):
            office = Office(tmp_path)
            assert office.server.epoch == epoch
            for _ in range(2):
                office.forms(view)
                view = office.server.coordinator.view
                certified = Certificate(step=5 * epoch, share=1.0, audited=2)
                office.hear("member", "r0.1", Heartbeat(sender="r0.1", sent_s=1.0, certified=certified))
            assert len(office.events(ev.AgentStarted)) == 1
            assert [event.replica for event in office.events(ev.ReplicaStarted)] == ["r0.1", "r1.1"]
            assert [event.step for event in office.events(ev.StateCertified)] == [5, 10][:epoch]
            office.close()

    played(scene)


def test_a_machine_that_raises_ends_this_coordinator(tmp_path: Path) -> None:
    async def scene() -> None:
        office = Office(tmp_path)
        office.server.unsound(None)
        assert not office.server.finished.done()
        office.server.unsound(ValueError("a bug"))
        office.server.unsound(KeyError("another"))
        with pytest.raises(ValueError, match="a bug"):
            await office.server.finished
        office.close()

    played(scene)


@pytest.mark.parametrize(("kept", "code"), [(True, 10), (False, 0)])
def test_a_run_whose_last_steps_are_in_no_checkpoint_ends_alike_for_all(tmp_path: Path, kept: bool, code: int) -> None:
    """For its agents, on hosts that may not reach the record, and for a coordinator that follows."""

    async def scene() -> None:
        office = Office(tmp_path)
        office.forms()
        if kept:
            office.server.keeper.place.settings = SaveSettings(
                target="/c", every=1, keep_last=9, keep_every=0, drain_to="", num_slots=2, min_s=1.0
            )
        view = office.server.coordinator.view
        assert view is not None
        for name in view.members:
            office.hear("member", name, m.Formed(member=name, view=view.id, step=0))
        for name in view.members:
            office.hear("member", name, m.Done(member=name, view=view.id, steps=7))
        for name in view.members:
            office.hear("agent", "a0", m.Exited(member=name, cause="finished", code=0, committed=7))
        assert await office.server.finished == code
        [stop] = office.to("a0", m.Stop)
        assert (stop.reason, stop.exit_code) == ("finished", code)
        record = msgspec.msgpack.decode(office.journal.get(COORDINATOR_RECORD) or b"", type=m.FleetRecord)
        assert (record.outcome, record.exit_code) == ("finished", code)
        [end] = office.events(ev.RunFinished)
        assert (end.exit_code, end.outcome) == (code, "finished")
        office.close()
        again = Office(tmp_path)
        again.hear("agent", "a0", m.AgentHello(agent="a0", pid=7))
        assert await again.server.finished == code
        again.close()

    played(scene)


def test_a_stop_is_told_to_everybody_and_written_with_its_code(tmp_path: Path) -> None:
    async def scene() -> None:
        office = Office(tmp_path)
        office.forms()
        await asyncio.sleep(60.0)
        office.hear("launcher", "launcher", m.Stop(reason="terminated", exit_code=143))
        assert await office.server.finished == 143
        assert office.to("a0", m.Stop)[0].epoch == 1
        [end] = office.events(ev.RunFinished)
        assert (end.exit_code, end.outcome, end.at_s) == (143, "stopped", 5000.0 + asyncio.get_running_loop().time())
        office.close()

    played(scene)


def test_a_host_that_cannot_come_in_for_a_crowd_is_given_longer_than_one_that_does_not_call(tmp_path: Path) -> None:
    here = hm.HostHere(agent="h1:aa", host="h1", place="there", pid=7, address="10.0.0.2", slots=2, sent_s=0.0)

    async def lost_after_s(folder: Path, crowded: bool) -> float:
        office = Office(folder, hosts=True, endpoint="10.0.0.1:1", nnodes="1:2")
        office.port.door = cast(Any, SimpleNamespace(crowded=crowded))
        office.hear("agent", "h1:aa", here, m.AgentHello(agent="h1:aa", pid=7))
        office.server.hosts.hung_up("h1:aa")
        began_s = asyncio.get_running_loop().time()
        while not office.events(ev.AgentLost):
            await asyncio.sleep(0.1)
        office.close()
        return asyncio.get_running_loop().time() - began_s

    async def scene() -> None:
        found = {}
        for crowded in (False, True):
            (tmp_path / str(crowded)).mkdir()
            found[crowded] = await lost_after_s(tmp_path / str(crowded), crowded)
        assert found[False] < 1.0 < RunConfig().host_silence_s - 1.0 < found[True]

    played(scene)


def test_an_end_that_was_decided_has_the_steps_that_are_saved(tmp_path: Path) -> None:
    """The coordinator that stopped the run with its save was killed before it wrote the end: fewer steps were told than
    the checkpoint has."""

    async def scene() -> None:
        with Journal.create(tmp_path) as journal:
            record = m.FleetRecord(
                view=View(id=ViewId(1, 1), members=("r0.1",)), placement={"r0.1": "a0"}, outcome="stopped",
                exit_code=143, detail="terminated",
            )  # fmt: skip
            epoch = journal.claim("coordinator")
            assert journal.put(epoch, COORDINATOR_RECORD, msgspec.msgpack.encode(record))
            journal.append(
                ev.CheckpointSaved(
                    at_s=5001.0, step=56, generation=0, view=[1, 1], num_writers=1, state_bytes=1, written_bytes=1,
                    blocked_s=0.0, copied_s=0.0, durable_s=0.0, reason="", url="",
                )
            )  # fmt: skip
        office = Office(tmp_path)
        office.server.handle(m.Timer(name="start"))
        assert await office.server.finished == 143
        assert office.journal.flush()
        (end,) = [entry.event for entry in office.journal.events(kinds=[ev.RunFinished])]
        assert isinstance(end, ev.RunFinished)
        assert (end.outcome, end.steps) == ("stopped", 56)
        office.close()

    played(scene)
