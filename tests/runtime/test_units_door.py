"""What a listening socket gives to whom: nothing to strangers, whatever they send, and not much of its own memory."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from tests.runtime.conftest import copies, readable

from outlast.errors import WireRefusal
from outlast.runtime.transport import door as _door
from outlast.runtime.transport.calls import Call, reach
from outlast.runtime.transport.connections import MAX_PEER_FRAME, Connection, PeersLost, decoded
from outlast.runtime.transport.door import ROOM, Door
from outlast.runtime.transport.handshake import Caller, Doorkeeper, PeerClaim
from outlast.runtime.transport.mesh import _decoder
from outlast.runtime.transport.peer_messages import Final

SECRET, OTHER = b"s" * 32, b"o" * 32
CLAIM = PeerClaim("mesh", "r1.1", (1, 2))


class Entry:
    """A door in this process."""

    def __init__(self) -> None:
        self.address = f"outlast/doors/{os.getpid()}/{os.urandom(4).hex()}"
        sock = socket.socket(socket.AF_UNIX)
        sock.bind("\0" + self.address)
        sock.listen(1024)
        self.let_in: list[tuple[socket.socket, PeerClaim]] = []
        self.refused: Counter[str] = Counter()
        self.door = Door(sock, SECRET, "r0.1", lambda sock, claim, _: self.let_in.append((sock, claim)), self._refuse)

    def _refuse(self, reason: str, who: str) -> None:
        assert who == f"uid {os.getuid()}, pid {os.getpid()}" or reason == "another user's process"
        self.refused[reason] += 1

    def until(self, test: Callable[[], object]) -> None:
        while not test():
            assert readable(self.door.fileno(), 20), "nothing happens any more"
            self.door.turn()

    def connect(self, data: bytes = b"") -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\0" + self.address)
        sock.sendall(data)
        return sock


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Entry]:
    monkeypatch.setattr(_door, "PROVE_S", 3600.0)  # whatever else this machine does
    made = Entry()
    yield made
    made.door.close()
    for sock, _ in made.let_in:
        sock.close()


def left(sock: socket.socket) -> bool:
    """Whether the other end is closed, in all processes."""
    poll = select.poll()
    poll.register(sock, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def knocked(keeper: Doorkeeper, caller: Caller) -> bytes:
    """The caller's proof."""
    return caller.prove(keeper.hear(caller.knock))


def test_who_knows_the_secret_is_believed_and_learns_that_the_other_does() -> None:
    caller, keeper = Caller(SECRET, "r0.1", CLAIM), Doorkeeper(SECRET, "r0.1")
    proof = knocked(keeper, caller)
    assert keeper.claim is None
    assert keeper.hear(proof[:5]) == keeper.hear(proof[5:]) == b""
    assert keeper.claim == CLAIM
    assert keeper.most == 0


def test_another_secret_another_listener_and_a_changed_claim_prove_nothing() -> None:
    knock = Caller(SECRET, "r0.1", CLAIM).knock
    for bad in (
        Caller(OTHER, "r0.1", CLAIM).knock, Caller(SECRET, "r2.1", CLAIM).knock, knock.replace(b"r1.1", b"r1.2"),
    ):  # fmt: skip
        with pytest.raises(WireRefusal, match="wrongly signed greeting"):
            Doorkeeper(SECRET, "r0.1").hear(bad)
    impostor = Doorkeeper(OTHER, "r0.1")
    impostor._signed = lambda *_: True  # type: ignore[method-assign]
    with pytest.raises(WireRefusal, match="does not know this run's secret"):
        knocked(impostor, Caller(SECRET, "r0.1", CLAIM))


def test_a_recording_is_worthless_and_so_is_what_was_said_to_somebody_else() -> None:
    caller, first = Caller(SECRET, "r0.1", CLAIM), Doorkeeper(SECRET, "r0.1")
    proof = knocked(first, caller)
    for said in (proof, first.hear(b"")[-32:] + bytes(32), caller.knock[-32:]):
        again = Doorkeeper(SECRET, "r0.1")
        reply = again.hear(caller.knock)
        with pytest.raises(WireRefusal, match="a replay"):
            again.hear(said[:32])
        reflected = Doorkeeper(SECRET, "r0.1")
        reflected.hear(caller.knock)
        with pytest.raises(WireRefusal, match="a replay"):  # nor are its own words a proof to it
            reflected.hear(reply[-32:])


@pytest.mark.parametrize("cut", [1, 7, 8, 25, 26, 27, 60])
def test_a_greeting_in_pieces_is_heard_and_one_that_is_none_is_refused_at_its_first_byte(cut: int) -> None:
    keeper, caller = Doorkeeper(SECRET, "r0.1"), Caller(SECRET, "r0.1", CLAIM)
    assert keeper.hear(caller.knock[:cut]) == b""
    assert keeper.hear(caller.knock[cut:])
    with pytest.raises(WireRefusal, match="no greeting"):
        Doorkeeper(SECRET, "r0.1").hear(b"\xc1")
    with pytest.raises(WireRefusal, match="no greeting"):
        Doorkeeper(SECRET, "r0.1").hear(b"outlast3" + bytes(16) + b"\xff\xff")


def test_a_door_reads_no_byte_and_keeps_no_descriptor_of_a_stranger(entry: Entry) -> None:
    knock = Caller(SECRET, "r0.1", CLAIM).knock
    socks = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    theirs = os.memfd_create("theirs")
    for index, sock in enumerate(socks):
        sock.connect("\0" + entry.address)
        socket.send_fds(sock, [[b"\0\0\0\1\xc1", knock, knock[:30]][index % 3]], [theirs] * 50)
    entry.until(lambda: entry.refused.total() == 7 and len(entry.door._knocked) == 7)
    assert [left(sock) for sock in socks] == [index % 3 == 0 for index in range(20)]
    assert copies(theirs) == 1
    for sock in socks:
        sock.shutdown(socket.SHUT_WR)
    entry.until(lambda: entry.refused.total() == 20)
    assert all(map(left, socks))
    assert copies(theirs) == 1
    os.close(theirs)
    for sock in socks:
        sock.close()
    assert not entry.let_in


def test_who_is_hung_up_on_has_been_counted(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[bool]()
    with entry.connect(b"no greeting") as sock:
        monkeypatch.setattr(entry.door, "_refused", lambda *_: seen.append(left(sock)))
        entry.until(lambda: left(sock))
    assert seen == [False]


def test_crowds_push_out_each_other_and_never_who_has_knocked(entry: Entry) -> None:
    idle = [entry.connect() for _ in range(ROOM)]
    call = Call(entry.address, SECRET, "r0.1", CLAIM)
    entry.until(lambda: entry.door._knocked)
    idle += [entry.connect() for _ in range(5 * ROOM)]
    entry.until(lambda: entry.refused["too many connections that prove nothing"] >= 5 * ROOM)
    assert len(entry.door._silent) <= ROOM
    assert call.proved()
    entry.until(lambda: entry.let_in)
    assert entry.let_in[0][1] == CLAIM
    call.sock.close()
    for sock in idle:
        sock.close()


def test_a_door_is_crowded_while_callers_wait_outside_and_for_a_moment_after_one_was_pushed_out(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not entry.door.crowded
    idle = [entry.connect() for _ in range(ROOM)]
    assert entry.door.crowded, "they wait to be let in"
    entry.until(lambda: len(entry.door._silent) == ROOM)
    assert not entry.door.crowded, "there was room for all"
    idle.append(entry.connect())
    entry.until(lambda: entry.refused["too many connections that prove nothing"])
    assert entry.door.crowded
    later_s = time.monotonic() + 3.0
    monkeypatch.setattr(_door.time, "monotonic", lambda: later_s)
    assert not entry.door.crowded, "who was pushed out has called again by now"
    for sock in idle:
        sock.close()


def test_who_proves_nothing_in_time_is_sent_away(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_door, "PROVE_S", 0.0)
    half = entry.connect(Caller(SECRET, "r0.1", CLAIM).knock[:-1])
    entry.until(lambda: entry.refused["a connection that proved nothing in time"])
    assert half.recv(1) == b""
    assert entry.door.patience_s == 3600.0
    half.close()


def test_who_has_proved_himself_while_the_door_slept_is_let_in(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller takes itself for let in once it has said its proof: what ends then is its peer."""
    caller, accept = Caller(SECRET, "r0.1", CLAIM), entry.door._accept
    with entry.connect(caller.knock) as sock:

        def stopped_after(most: int) -> None:
            accept(most)
            sock.sendall(caller.prove(sock.recv(caller.wanted)))
            until_s = entry.door._knocked[next(iter(entry.door._knocked))].until_s
            monkeypatch.setattr(_door.time, "monotonic", lambda: until_s + 1.0)

        monkeypatch.setattr(entry.door, "_accept", stopped_after)
        entry.door.turn()
    assert [claim for _, claim in entry.let_in] == [CLAIM]
    assert not entry.refused


def test_who_has_proved_himself_is_not_pushed_out_unheard(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    """More callers of the run at once than there is room for: the first one's proof came as the last one was let in."""
    callers = [Caller(SECRET, "r0.1", PeerClaim("mesh", f"r{n}.1", (1, 2))) for n in range(ROOM + 1)]
    socks = [entry.connect(caller.knock) for caller in callers[:ROOM]]
    entry.until(lambda: len(entry.door._knocked) == ROOM)
    accept = entry.door._accept

    def as_it_proves_itself(most: int) -> None:
        socks[0].sendall(callers[0].prove(socks[0].recv(Caller.wanted)))
        accept(most)

    monkeypatch.setattr(entry.door, "_accept", as_it_proves_itself)
    socks.append(entry.connect(callers[ROOM].knock))
    entry.door.turn()
    assert [claim.name for _, claim in entry.let_in] == ["r0.1"]
    assert not entry.refused
    for sock in socks:
        sock.close()


def test_who_has_another_secret_is_told_so_and_no_crowd_looks_like_that(entry: Entry) -> None:
    with contextlib.closing(Call(entry.address, OTHER, "r0.1", CLAIM).sock):
        pass
    wrong = Call(entry.address, OTHER, "r0.1", CLAIM)
    entry.until(lambda: entry.refused["a wrongly signed greeting: another run's secret, or another listener's"] == 2)
    with pytest.raises(WireRefusal, match="does not know this secret") as told:
        wrong.proved()
    assert told.value.remedy
    wrong.sock.close()
    idle = [entry.connect() for _ in range(ROOM + 1)]
    entry.until(lambda: entry.refused["too many connections that prove nothing"])
    assert idle[0].recv(1) == b""
    for sock in idle:
        sock.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_users_process_is_not_listened_to(entry: Entry) -> None:
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setuid(65534)
            entry.connect(Caller(SECRET, "r0.1", CLAIM).knock)
        os._exit(0)
    entry.until(lambda: entry.refused["another user's process"])
    os.waitpid(pid, 0)
    assert not entry.let_in


def test_no_descriptor_is_left_and_then_there_is_one(entry: Entry) -> None:
    import resource

    idle = entry.connect()
    entry.until(lambda: entry.door._silent)
    call = Call(entry.address, SECRET, "r0.1", CLAIM)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        entry.door.turn()
        assert entry.door._full
        assert entry.door.patience_s < 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    entry.door.turn()
    entry.until(lambda: call.proved())
    idle.close()
    call.sock.close()


class ShortOfWatches:
    """An epoll of a user who may watch no more descriptors just now."""

    def __init__(self, poll: Any, times: int) -> None:
        self._poll, self.times = poll, times

    def register(self, fd: int, events: int) -> None:
        self.times -= 1
        if self.times >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._poll.register(fd, events)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._poll, name)


def test_no_watch_is_left_and_then_there_is_one(entry: Entry) -> None:
    """The thread of a member's door, and the coordinator, outlive it; who was let go calls again."""
    idle = entry.connect()
    entry.until(lambda: entry.door._silent)
    poll: Any = ShortOfWatches(entry.door._poll, times=2)
    entry.door._poll = poll
    for _ in range(2):
        early = Call(entry.address, SECRET, "r0.1", CLAIM)
        entry.door.turn()
        assert entry.door.patience_s < 1
        with pytest.raises(ConnectionError):
            early.proved()
        early.sock.close()
        assert not readable(entry.door.fileno(), 0), "it would be looked at without an end"
        entry.door.turn()
    assert poll.times == 0
    call = Call(entry.address, SECRET, "r0.1", CLAIM)
    entry.until(lambda: call.proved())
    assert idle.recv(1) == b"", "who waited gave its watch back"
    idle.close()
    call.sock.close()


def test_a_donor_that_a_crowd_pushed_out_tries_again() -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0outlast/crowded/{os.getpid()}")
        listening.listen(8)
        address = str(listening.getsockname()[1:].decode())

        def answer() -> None:
            listening.accept()[0].close()
            sock, _ = listening.accept()
            keeper = Doorkeeper(SECRET, "r0.1")
            while keeper.claim is None:
                if answer := keeper.hear(sock.recv(keeper.most)):
                    sock.sendall(answer)
            sock.close()

        thread = threading.Thread(target=answer)
        thread.start()
        reach(address, SECRET, "r0.1", CLAIM, 20).close()
        thread.join(20)
        assert not thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        reach(address, SECRET, "r0.1", CLAIM, 20)


@pytest.mark.parametrize(
    "data",
    [b"\0\0\0\1\xc1", struct.pack(">I", MAX_PEER_FRAME + 1), b"\0\0\0\2\x81\xa1"],
    ids=["no message", "too long", "half a message"],
)
def test_a_proved_peer_that_cannot_be_understood_is_a_lost_peer(data: bytes) -> None:
    here, there = socket.socketpair()
    conn, peer = Connection(there, "r1.1", _decoder), Connection(here, "r0.1", _decoder)
    peer.send(Final(3))
    here.sendall(data + b"more")
    assert list(conn.read()) == [Final(3)]
    assert conn.ended
    conn.close()
    peer.close()


def test_what_a_frame_holds_inside_is_checked_too() -> None:
    assert decoded("r1.1", msgspec.msgpack.encode([1]), list[int]) == [1]
    with pytest.raises(PeersLost) as lost:
        decoded("r1.1", b"\xc1", list[int])
    assert lost.value.suspects == ("r1.1",)


def test_a_peer_has_one_region_and_other_descriptors_are_closed() -> None:
    here, there = socket.socketpair()
    conn: Any = Connection(there, "r1.1", _decoder)
    fds = [os.memfd_create("theirs") for _ in range(3)]
    for _ in range(4):
        socket.send_fds(here, [b"\0"], fds)
        list(conn.read())
    assert copies(*fds) == len(fds) + 1
    conn.close()
    here.close()
    for fd in fds:
        os.close(fd)
