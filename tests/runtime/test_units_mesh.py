"""Who leaves a view before a peer's connection for it has been heard is not taken for dead by that peer."""

from __future__ import annotations

import errno
import os
import resource
import secrets
import select
import socket
import sys
import threading
import typing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.runtime.conftest import readable

from outlast.core.phases import Phase
from outlast.core.protocol import Header, RollEntry, View, ViewId
from outlast.core.protocol.step.effects import Act, AskAll, ChannelName, Course
from outlast.errors import ViewAbandoned
from outlast.runtime.settings.fault_points import Probe
from outlast.runtime.transport import calls as calls_of_members
from outlast.runtime.transport import connections
from outlast.runtime.transport import peer_messages as messages
from outlast.runtime.transport.calls import Call
from outlast.runtime.transport.connections import Connection, Listener, PeersLost
from outlast.runtime.transport.door import ROOM
from outlast.runtime.transport.handshake import PeerClaim
from outlast.runtime.transport.mesh import Mesh, _decoder
from outlast.runtime.transport.peer_messages import Final, HeaderSaid, Hi, Roll
from outlast.runtime.transport.regions import Region
from outlast.runtime.view.courses import carry_out

MEMBERS = ("r0.1", "r1.1")


class Side:
    """One member in this process."""

    def __init__(self, name: str, run_id: str, secret: bytes) -> None:
        self.listener = Listener(run_id, name, secret)
        self.addresses: dict[str, str] = {}
        self.meshes: list[Mesh] = []

    def mesh(self, n: int, abandoned: Callable[[], bool] = lambda: False, region: Region | None = None) -> Mesh:
        self.meshes.append(
            Mesh(
                self.listener, View(id=ViewId(1, n), members=MEMBERS), self.addresses, region,
                wake_fd=os.eventfd(0, os.EFD_NONBLOCK), abandoned=abandoned, patience=lambda phase: 30.0,
                on_stall=lambda *_: None, probe=Probe(self.listener.me, None),
            )
        )  # fmt: skip
        return self.meshes[-1]


@pytest.fixture
def sides() -> Any:
    run_id, secret = secrets.token_hex(4), secrets.token_bytes(16)
    made = [Side(name, run_id, secret) for name in MEMBERS]
    for side in made:
        side.addresses.update({other.listener.me: other.listener.address for other in made})
    yield made
    for side in made:
        for mesh in side.meshes:
            mesh.close()
        side.listener.close()


def hung_up(sock: socket.socket, patience_s: float) -> bool:
    """Whether the other end lets go of this one in time."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(1000 * patience_s))


def test_every_message_of_a_view_can_be_read() -> None:
    """One that a sender has and the readers do not know would end the connection, and look like a broken one."""
    kinds = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    sent = {kind for kind in kinds if kind.__module__ == messages.__name__ and kind.__struct_config__.tag is not None}
    assert {kind.__name__ for kind in sent} >= {"HeaderSaid", "SettingsSeen", "Parts"}
    assert sent == set(typing.get_args(messages.Frame))


class Follower(threading.Thread):
    """r1.1 forms view 2, which fails, and then view 3."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.side, self.failure = side, ViewAbandoned("it was called")
        self.start()

    def run(self) -> None:
        mesh = self.side.mesh(2)
        try:
            mesh.form()
            mesh.collect(Roll, -1, 0, Phase.ROLL_CALL)
        except ViewAbandoned as failure:
            self.failure = failure
        mesh.close()
        self.side.mesh(3).form()

    def ended(self) -> ViewAbandoned:
        self.join(30)
        assert not self.is_alive()
        return self.failure


def test_a_view_left_before_the_peer_was_heard(sides: list[Side]) -> None:
    first, second = sides
    view2 = first.mesh(2, abandoned=lambda: True)
    follower = Follower(second)
    assert readable(first.listener.mesh.fd, 30)
    with pytest.raises(ViewAbandoned):
        view2.form()
    view2.close()
    first.mesh(3).form()
    failure = follower.ended()
    assert not isinstance(failure, PeersLost), failure
    assert "r0.1 left the view" in str(failure)


def test_a_view_that_was_never_entered(sides: list[Side]) -> None:
    first, second = sides
    follower = Follower(second)
    first.mesh(3).form()
    failure = follower.ended()
    assert not isinstance(failure, PeersLost), failure
    assert "r0.1 left the view" in str(failure)


def test_who_comes_early_and_silently_is_heard_later(sides: list[Side]) -> None:
    """A peer has proved itself for view 3 and is interrupted before it has said a word, while view 2 forms."""
    first, second = sides
    claim = PeerClaim("mesh", "r1.1", (1, 3), first.listener.run)
    call = Call(first.listener.address, first.listener.secret, "r0.1", claim)
    while not call.proved():
        assert readable(call.sock.fileno(), 20)
    view2, follower = first.mesh(2), second.mesh(2)
    thread = threading.Thread(target=follower.form)
    thread.start()
    view2.form()
    thread.join(30)
    view2.close()
    hi = Connection(call.sock, "r0.1", _decoder)
    hi.send(Hi())
    last = first.mesh(3)
    thread = threading.Thread(target=last.form, daemon=True)  # had the peer been hung up on, it would wait for ever
    thread.start()
    thread.join(30)
    hi.close()
    assert not thread.is_alive()


def test_who_was_pushed_out_between_its_call_and_its_knock_calls_again(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crowd came while the caller waited for a processor: that is no sign of the peer's death."""
    first, second = sides
    crowd, knock = list[socket.socket](), Call._knock

    def late(call: Call, bound: bytes) -> None:
        if not crowd:
            for _ in range(ROOM + 1):
                crowd.append(socket.socket(socket.AF_UNIX))
                crowd[-1].connect("\0" + first.listener.address)
            assert hung_up(call.sock, 20)
        knock(call, bound)

    monkeypatch.setattr(Call, "_knock", late)
    thread = threading.Thread(target=first.mesh(1).form)
    thread.start()
    second.mesh(1).form()
    thread.join(30)
    assert not thread.is_alive()
    assert "too many connections that prove nothing" in first.listener.refused
    for idle in crowd:
        idle.close()


def test_who_has_not_answered_a_call_is_called_again_once_paths_are_probed(sides: list[Side]) -> None:
    """A connection on which nothing goes on, for whatever reason, is no broken path yet."""
    first, second = sides
    there, pinged = first.listener.address, list[bool]()
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind("\0" + secrets.token_hex(8))
        mute.listen()
        second.addresses["r0.1"] = mute.getsockname()[1:].decode()

        def probed() -> bool:
            if readable(mute.fileno(), 0.0) and not pinged:
                pinged.append(True)
                second.addresses["r0.1"] = there
                mesh.ping()
            return False

        mesh, other = second.mesh(1, abandoned=probed), first.mesh(1)
        threads = [threading.Thread(target=each.form, daemon=True) for each in (other, mesh)]
        for thread in threads:
            thread.start()
        assert readable(mute.fileno(), 20)
        os.eventfd_write(mesh.wake_fd, 1)
        for thread in threads:
            thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert pinged
    assert (mesh.answered, other.answered) == ({"r0.1"}, {"r1.1"}), "neither is missed, though no ping reached it"


def test_a_call_whose_socket_was_reset_under_it_is_made_again(sides: list[Side]) -> None:
    """Just when TLS takes it over, which closes it then."""
    near, far = socket.socketpair()
    mesh, fd = sides[1].mesh(1), near.fileno()

    def connected() -> None:
        near.close()
        raise ConnectionResetError

    mesh._calls[fd] = typing.cast(Call, SimpleNamespace(sock=near, peer="r0.1", connecting=True, connected=connected))
    mesh._poll.register(fd)
    with far:
        mesh._answered(fd)
    assert (mesh._calls, mesh._to_call) == ({}, ["r0.1"])


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL])
def test_a_want_at_this_end_is_no_death_at_the_other(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As when a crowd at this member's own door has just taken the last descriptor."""
    first, second = sides
    failed, there = list[str](), calls_of_members.caller_for

    def short(address: str) -> Any:
        if not failed:
            failed.append(address)
            raise OSError(number, os.strerror(number))
        return there(address)

    monkeypatch.setattr(calls_of_members, "caller_for", short)
    thread = threading.Thread(target=first.mesh(1).form)
    thread.start()
    second.mesh(1).form()
    thread.join(30)
    assert not thread.is_alive()
    assert failed == [first.listener.address]


def forms_with_regions(sides: list[Side]) -> None:
    """A view in which each member has memory to show; then both have the other's, and have spoken."""
    regions = [Region(4096) for _ in sides]
    for number, region in enumerate(regions):
        region.map[:1] = bytes([number + 1])

    def forms(side: Side, region: Region) -> None:
        mesh = side.mesh(1, region=region)
        mesh.form()
        mesh.everyone(Final(3), Phase.FINAL)

    thread = threading.Thread(target=forms, args=(sides[0], regions[0]))
    thread.start()
    forms(sides[1], regions[1])
    thread.join(30)
    assert not thread.is_alive()
    known = [side.listener.regions[peer].map[0] for side, peer in zip(sides, reversed(MEMBERS), strict=True)]
    assert known == [2, 1]


@pytest.mark.parametrize("number", [errno.ETOOMANYREFS, errno.ENOBUFS, errno.EAGAIN])
@pytest.mark.parametrize("times", [1, 5])
def test_a_region_that_the_kernel_does_not_pass_on_just_now_is_passed_on_later(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch, number: int, times: int
) -> None:
    """As where the user has too many descriptors under way. A view without it would end in a KeyError."""
    failed, sendmsg = list[int](), socket.socket.sendmsg

    def short(sock: socket.socket, *said: Any) -> int:
        if len(failed) < times:
            failed.append(sock.fileno())
            raise OSError(number, os.strerror(number))
        return sendmsg(sock, *said)

    monkeypatch.setattr(socket.socket, "sendmsg", short)
    forms_with_regions(sides)
    assert len(failed) == times


@pytest.mark.parametrize("times", [1, 5])
def test_a_region_for_which_there_was_no_descriptor_is_sent_again(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    cut, recvmsg = list[int](), socket.socket.recvmsg

    def short(sock: socket.socket, *room: Any) -> Any:
        data, ancillary, flags, address = recvmsg(sock, *room)
        if not ancillary or len(cut) >= times:
            return data, ancillary, flags, address
        [(_, _, body)] = ancillary
        cut.append(int.from_bytes(body[:4], sys.byteorder))
        os.close(cut[-1])
        return data, [], flags | socket.MSG_CTRUNC, address

    monkeypatch.setattr(socket.socket, "recvmsg", short)
    forms_with_regions(sides)
    assert len(cut) == times


def test_a_region_that_there_is_no_memory_to_map_is_sent_again(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = list[int]()

    def short(size: int, fd: int) -> Region:
        if not failed:
            failed.append(fd)
            os.close(fd)
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return Region(size, fd=fd)

    monkeypatch.setattr(connections, "Region", short)
    forms_with_regions(sides)
    assert failed


def test_a_process_at_its_limit_of_descriptors_knows_that_it_was_sent_one(sides: list[Side]) -> None:
    """What the kernel says then. A second try finds room, and what was already waiting goes before it."""
    listener, region = sides[0].listener, Region(4096)
    near, far = socket.socketpair(socket.AF_UNIX)
    sender, receiver = Connection(near, "r0.1", _decoder), Connection(far, "r1.1", _decoder)
    sender.send(Hi(), region.fd)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(next_fd := os.dup(near.fileno()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd, limits[1]))
    try:
        heard = list(receiver.read())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert heard == [Hi()]
    assert receiver.fds == []
    assert not listener.keep_region(receiver)
    sender.pending += framed(Final(3))
    assert sender.send(Hi(), region.fd)
    assert list(receiver.read()) == [Final(3), Hi()]
    assert listener.keep_region(receiver)
    assert "r1.1" in listener.regions
    sender.close()
    receiver.close()


def framed(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


def test_that_others_wait_is_said_again_and_again_beside_the_deadline(sides: list[Side]) -> None:
    """Also where both fall due at once: no wait is without an end."""
    mesh, said = sides[0].mesh(1), list[str]()
    mesh._patience, mesh._awaited_s = lambda phase: 0.003, lambda phase: 0.002
    mesh._on_stall, mesh._on_awaited = lambda *_: said.append("stalled"), lambda missing: said.append(*missing)
    mesh.until(lambda: said.count("stalled") > 3 and said.count("r1.1") > 3, ["r1.1"], Phase.FINAL)
    mesh.close()


WORDS: dict[ChannelName, Any] = {
    "roll": RollEntry(member="", view=ViewId(1, 2), committed=3, held=(), keeps_output=False, fingerprint=7, outcome=9),
    "orders": 2,
    "parts": (("weight", 5),),
    "slices": {(0, "r0.1"): (1, 2)},
    "vote": "r1.1",
    "prints": b"packed",
    "header": HeaderSaid(Header(member="", step=4, view=ViewId(1, 2), heard=1), (b"a buffer",)),
    "final": 4,
    "closer look": (),
    "states": 1 << 60,
}


def test_all_that_a_course_may_ask_is_said_and_heard(sides: list[Side]) -> None:
    """Each word by its own message or channel; a round that is repeated is not taken for the one before."""
    assert set(WORDS) == set(typing.get_args(ChannelName))

    def course() -> Course[list[dict[str, dict[str, Any]]]]:
        heard = []
        for name, mine in WORDS.items():
            heard.append((yield AskAll(-1 if name == "roll" else 4, {name: mine}, roll=True)))
        heard.append((yield AskAll(4, {"orders": 3}, turn=1)))
        assert (yield AskAll(5, {"vote": "r0.1"}, half="say")) == {}
        heard.append((yield AskAll(6, {"vote": "r1.1"})))
        heard.append((yield AskAll(5, {"vote": "r0.1"}, half="hear")))
        yield Act(what="rest")
        return heard

    def carried(side: Side, into: dict[str, Any]) -> None:
        mesh = side.mesh(2)
        mesh.form()
        port: Any = SimpleNamespace(mesh=mesh)
        acts = {"rest": lambda act: into.update({f"{mesh.me} did": act.what})}
        into[mesh.me] = carry_out(port, course(), acts)

    found: dict[str, Any] = {}
    other = threading.Thread(target=carried, args=(sides[1], found))
    other.start()
    carried(sides[0], found)
    other.join(30)
    expected = [{name: dict.fromkeys(MEMBERS, mine)} for name, mine in WORDS.items()]
    for name in MEMBERS:
        votes = [{"vote": dict.fromkeys(MEMBERS, vote)} for vote in ("r1.1", "r0.1")]
        assert found[name] == [*expected, {"orders": dict.fromkeys(MEMBERS, 3)}, *votes]
        assert found[f"{name} did"] == "rest"
    for side, peer in zip(sides, reversed(MEMBERS), strict=True):
        assert side.meshes[-1].waits.told()[peer].exchanges == 1, "when the other's header came was measured"
