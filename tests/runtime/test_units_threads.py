"""What the link's thread, the training thread and a signal's handler do to each other at their worst moments."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.runtime.virtual_host import Calls, Puppet, VirtualRun

from outlast.config import RunConfig
from outlast.core.phases import Phase
from outlast.core.protocol import Compute, Member, View, ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.step import catching_up
from outlast.errors import WireRefusal
from outlast.runtime.host.agent import Agent
from outlast.runtime.joining import inflow as _inflow
from outlast.runtime.joining._feeds import Share
from outlast.runtime.joining.joiner import Spare
from outlast.runtime.loop.session import Training
from outlast.runtime.member import link as _link
from outlast.runtime.member._heartbeat import stalled
from outlast.runtime.member.link import MemberLink
from outlast.runtime.member.step import StepCourse
from outlast.runtime.training.frozen import OutcomeShare
from outlast.runtime.training.step_checks import Meta
from outlast.runtime.transport.connections import Arrivals
from outlast.runtime.transport.coordinator_place import CoordinatorPlace
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.transport.regions import Region
from outlast.runtime.transport.seal import FORGED

PATIENCE_S = 20.0


class Line:
    """The coordinator's end of a connection. It says nothing; what it is told is in `said`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.sock, self.far = socket.socketpair()
        self.said: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, message: Any) -> None:
        self.said.put(message)

    def receive(self, _: Any) -> Any:
        raise ConnectionError("it ended")

    def close(self) -> None:
        self.sock.close()
        self.far.close()


def made(member: Member, **calls: Any) -> MemberLink:
    known: dict[str, Any] = {"hello": lambda: "hello", "beat": lambda *_: "beat", "asked": lambda probe: None}
    return MemberLink(
        CoordinatorPlace(("", 0), None), b"", member, threading.RLock(), **(known | calls), heartbeat_s=3600.0,
        lease_s=3600.0,
    )  # fmt: skip


def asked_to_leave(link: MemberLink) -> None:
    """SIGTERM's handler."""
    replica = SimpleNamespace(member=link.member, link=link)
    Training._asked_to_leave(SimpleNamespace(_home=os.getpid(), replica=replica))  # type: ignore[arg-type]


def test_a_request_to_leave_that_comes_while_hello_is_said_is_not_lost() -> None:
    def hello() -> m.Hello:
        said = m.Hello(member="r1.1", agent="a0", epoch=0, leaving=link.member.leaving)
        before = set(threading.enumerate())
        asked_to_leave(link)
        for thread in set(threading.enumerate()) - before:
            thread.join()
        return said

    link, line = made(Member("r1.1", 8), hello=hello), Line()

    def converse() -> None:
        with contextlib.suppress(ConnectionError):
            link._converse(line)  # type: ignore[arg-type]

    talk = threading.Thread(target=converse, daemon=True)
    talk.start()
    assert line.said.get(timeout=PATIENCE_S) == m.Hello(member="r1.1", agent="a0", epoch=0, leaving=False)
    assert line.said.get(timeout=PATIENCE_S) == "beat", "the first one"
    assert line.said.get(timeout=PATIENCE_S) == "beat", "what was done until now is told before"
    assert line.said.get(timeout=PATIENCE_S) == m.Leaving(member="r1.1")
    link._over.set()
    line.far.close()
    talk.join(PATIENCE_S)


def test_a_request_to_leave_may_interrupt_the_start_of_a_thread() -> None:
    link, begin, done = made(Member("r1.1", 8)), threading.Event(), threading.Event()

    def handler() -> None:
        begin.wait()
        asked_to_leave(link)
        done.set()

    threading.Thread(target=handler, daemon=True).start()
    with threading._active_limbo_lock:  # type: ignore[attr-defined]  # as whoever is interrupted may hold it
        begin.set()
        assert done.wait(PATIENCE_S)
    assert link.member.leaving


def test_the_end_takes_the_connection_away_before_it_is_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator came back in the moment in which the training was over."""
    exits: list[int] = []
    link, real = made(Member("r1.1", 8)), _link.select.poll

    def poll() -> Any:
        link.close()
        return real()

    monkeypatch.setattr(_link, "Link", Line)
    monkeypatch.setattr(_link, "select", SimpleNamespace(poll=poll, POLLIN=_link.select.POLLIN))
    monkeypatch.setattr(_link, "os", SimpleNamespace(_exit=exits.append))
    link._run()
    assert exits == []


def test_a_stall_is_of_the_view_that_was_waited_in() -> None:
    old, new = View(id=ViewId(1, 1), members=("r0.1", "r1.1")), View(id=ViewId(1, 2), members=("r0.1", "r1.1"))
    said: list[Any] = []
    replica = SimpleNamespace(
        mesh=SimpleNamespace(view=old), member=SimpleNamespace(view=new), env=SimpleNamespace(me="r0.1"),
        tell_coordinator=said.extend,
    )  # fmt: skip
    stalled(replica, Phase.GATHERED, ("r1.1",), 1.0, 0.5)  # type: ignore[arg-type]
    assert [message.view for message in said] == [old.id]


def test_what_is_held_is_not_read_while_the_link_may_clear_it() -> None:
    """A member that is told to start again in the middle of its last backward."""
    lock = threading.RLock()

    class Held(set[tuple[int, int]]):
        def __iter__(self) -> Any:
            assert lock._is_owned()  # type: ignore[attr-defined]
            return super().__iter__()

    member = Member("r0.1", 4)
    member.told(m.Install(view=View(id=ViewId(1, 1), members=("r0.1",), start=True)))
    member.next()
    member.called([member.roll(0, 0)])
    member.held = Held({(0, 2)})
    replica = SimpleNamespace(lock=lock, member=member, plane=object(), env=SimpleNamespace(me="r0.1"))
    course: Any = SimpleNamespace(replica=replica)
    course._is_last = functools.partial(StepCourse._is_last, course)
    assert StepCourse._announcer(course, Compute(step=0, microbatch=2, orphan=False)) is None
    assert StepCourse._announcer(course, Compute(step=0, microbatch=3, orphan=False)) is None
    member.held.add((2, 3))
    assert StepCourse._announcer(course, Compute(step=0, microbatch=3, orphan=False)) is not None


def test_an_agent_that_reconnects_says_whom_it_has_started() -> None:
    """The coordinator that was told may have died before it had written that down."""
    calls, sign = Calls(), Region(Progress.SIZE)
    agent = Agent("a0", {
        "OUTLAST_COORDINATOR": "localhost:1", "OUTLAST_SECRET": "", "OUTLAST_RUN_DIR": "",
        "OUTLAST_CONFIG": msgspec.json.encode(RunConfig()).decode(), "OUTLAST_SIGN_FD": str(os.dup(sign.fd)),
    }, [], dial=calls.dial)  # fmt: skip
    rank: Any = SimpleNamespace(name="r0.1", child=SimpleNamespace(pid=8))
    agent.ranks = {"r0.1": rank}
    agent._connect()
    [said] = calls.heard
    assert said[-1] == m.Spawned(member="r0.1", agent="a0", pid=8)
    assert said[-2].members == ("r0.1",)


def test_what_a_child_that_was_struck_at_its_birth_wrote_stops_no_run(tmp_path: Path) -> None:
    """Between fork and exec it has the launcher's handlers, and the pipe that they write to."""

    def strange(run: VirtualRun, child: Puppet, _: int) -> None:
        fd = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
        run.host.after(1.0, lambda: os.write(fd, bytes([signal.SIGTERM])))
        run.host.after(30.0, lambda: run.finish(child))

    run = VirtualRun(tmp_path, strange)
    assert run.goes() == 0
    assert (run.coordinators[0].sent, run.calls.heard) == ([], [])


# --- a joiner ---------------------------------------------------------------------------------------------------------
FIRST, SECOND = (1, 1), (1, 2)


@pytest.fixture
def spare() -> Any:
    config = SimpleNamespace(replicas=2, ack_s=5.0)
    env: Any = SimpleNamespace(run_id=f"threads-{os.getpid()}", me="r2.1", secret=b"s", config=config)
    engine: Any = SimpleNamespace(
        incoming=[],
        device=None,
        thaw=lambda *_: None,
        layout=SimpleNamespace(device=SimpleNamespace(type="none")),
    )
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    said: list[Any] = []
    link: Any = SimpleNamespace(wake_fd=wake, send=said.extend, said=said)
    donors = Arrivals()
    made = Spare(env, engine, link, Member("r2.1", 8), threading.RLock(), lambda *_: None, donors)
    made.member.told(m.BeginServe(epoch=1, donors=("r0.1",), serve=FIRST))
    made.course.restart()
    yield made
    made.close()
    donors.close()
    os.close(wake)


def arrived(spare: Spare, step: int) -> None:
    spare.lanes.inflow.shares.append((spare.lanes.inflow.serving, Share(step, 0, 4, 4, b"plain"), memoryview(b"1234")))


def test_served_anew_while_a_snapshot_is_loaded(spare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is loaded is of the serving that was called off: it makes nobody ready for the new one."""

    def loaded(plain: bytes, shares: Any) -> dict[str, Any]:
        if spare.lanes.inflow.serving == FIRST:
            spare.member.told(m.Rejoin(epoch=1, member="r2.1"))
            spare.member.told(m.BeginServe(epoch=1, donors=("r0.1",), serve=SECOND))
        return {}

    monkeypatch.setattr(_inflow, "_assembled", loaded)
    arrived(spare, 5)
    spare.course.advance()
    assert (spare.member.state, spare.lanes._link.said) == ("joining", [])
    spare.course.restart()
    arrived(spare, 9)
    spare.course.advance()
    assert spare.lanes._link.said == [m.Ready(member="r2.1", step=9, serve=SECOND)]


def test_nobody_is_caught_up_while_donors_have_more_for_it(spare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless steps are so short that something is always on its way."""
    monkeypatch.setattr(_inflow, "_assembled", lambda plain, shares: {})
    stream: Any = SimpleNamespace(
        serve=FIRST, ended=False, coming=True, flushed=None, sock=SimpleNamespace(close=lambda: None)
    )
    spare.lanes.inflow.streams.incoming = [stream]
    arrived(spare, 5)
    stream.coming = False
    monkeypatch.setattr(spare.lanes.inflow.streams, "wait", lambda _: setattr(stream, "coming", True) or [])
    spare.course.advance()
    assert (spare.lanes.inflow.loaded, spare.member.state, spare.lanes._link.said) == (True, "joining", []), (
        "it looked after it had loaded"
    )
    spare.course._replayed = catching_up._ENOUGH
    assert spare.course.near()
    spare.course._replayed, stream.coming = 0, False
    spare.course.advance()
    assert spare.lanes._link.said == [m.Ready(member="r2.1", step=5, serve=FIRST)]


def test_an_outcome_that_comes_before_its_serving_is_told_is_not_lost(
    spare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A donor's words travel by another connection than the coordinator's. Without it the joiner would wait for a step
    that nobody sends again."""
    meta = msgspec.msgpack.encode(Meta(step=9, loss=0.0, norm=None, used=b"", buffers=(), output=0))
    heads = [(SimpleNamespace(serve=SECOND), OutcomeShare(9, meta, (), False), memoryview(b""))]
    monkeypatch.setattr(spare.lanes.inflow.streams, "wait", lambda _: heads)
    spare.lanes.inflow.steps = {7: _inflow.Pieces()}
    spare.lanes.inflow.take_in(0.0)
    assert list(spare.lanes.inflow.steps) == [7]
    spare.member.told(m.Rejoin(epoch=1, member="r2.1"))
    spare.member.told(m.BeginServe(epoch=1, donors=("r0.1",), serve=SECOND))
    spare.course.restart()
    assert list(spare.lanes.inflow.steps) == [9]
    spare.course.restart()
    assert list(spare.lanes.inflow.steps) == []


def test_a_share_that_comes_before_its_serving_is_told_outlives_the_load_of_another(
    spare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both servings of a joiner that greeted twice were streamed before it was told of either: nobody sends again."""
    monkeypatch.setattr(_inflow, "_assembled", lambda plain, shares: {})
    arrived(spare, 5)
    spare.lanes.inflow.shares.append((SECOND, Share(9, 0, 4, 4, b"plain"), memoryview(b"1234")))
    spare.course.advance()
    assert spare.lanes._link.said == [m.Ready(member="r2.1", step=5, serve=FIRST)]
    spare.member.told(m.Rejoin(epoch=1, member="r2.1"))
    spare.member.told(m.BeginServe(epoch=1, donors=("r0.1",), serve=SECOND))
    spare.course.begin_turn()
    spare.course.advance()
    assert spare.lanes._link.said[-1] == m.Ready(member="r2.1", step=9, serve=SECOND)


def test_an_outcome_that_two_views_have_sent_in_part_is_not_whole() -> None:
    """Half of a bucket came twice: from two of four members that have died, and from one of the two that go on."""
    pieces: Any = _inflow.Pieces()
    empty = memoryview(b"")
    pieces.meta, pieces.lived = Meta(step=9, loss=0.0, norm=None, used=b"", buffers=(), output=0), SimpleNamespace()
    pieces.slices = {(0, 0, 2): empty, (0, 2, 4): empty, (0, 0, 4): empty}
    assert not pieces.covers([8])
    pieces.slices[0, 4, 8] = empty
    assert pieces.covers([8])


def test_a_view_that_is_told_before_a_joiner_asks_again_finds_all_it_has(spare: Any) -> None:
    spare.lanes.inflow.loaded, spare.lanes.inflow.steps = True, {7: _inflow.Pieces()}
    spare.member.state = "ready"
    spare.member.told(m.Install(view=View(id=ViewId(1, 3), members=("r0.1", "r2.1"))))
    spare.course.ask_again()
    assert (spare.lanes.inflow.loaded, list(spare.lanes.inflow.steps), spare.lanes._link.said) == (True, [7], [])


@pytest.mark.parametrize(("reason", "counted"), [(FORGED, 1), ("a frame of 99 bytes is over the limit", 0)])
def test_what_somebody_on_the_path_made_of_the_coordinator_s_words_is_counted(
    monkeypatch: pytest.MonkeyPatch, reason: str, counted: int
) -> None:
    told: list[str] = []
    link = made(Member("r1.1", 8), refused=told.append)

    def converse(_: Any) -> None:
        link._over.set()
        raise WireRefusal(reason)

    monkeypatch.setattr(_link, "Link", lambda *_, **__: Line())
    monkeypatch.setattr(link, "_converse", converse)
    link._talk()
    assert len(told) == counted
