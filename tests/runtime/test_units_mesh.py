"""Who leaves a view before a peer's connection for it has been heard is not taken for dead by that peer."""

from __future__ import annotations

import os
import secrets
import threading
import typing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.runtime.conftest import readable

from outlast.core.phases import Phase
from outlast.core.protocol import RollEntry, View, ViewId
from outlast.core.protocol.step.verdict import Act, AskAll, ChannelName, Course
from outlast.errors import ViewAbandoned
from outlast.runtime.settings.fault_points import Probe
from outlast.runtime.transport import mesh as connections_of_a_view
from outlast.runtime.transport import peer_messages as messages
from outlast.runtime.transport.connections import Call, Connection, Listener, PeersLost
from outlast.runtime.transport.handshake import PeerClaim
from outlast.runtime.transport.mesh import Mesh, _decoder, _Hi
from outlast.runtime.transport.peer_messages import Roll
from outlast.runtime.view.courses import carry_out

MEMBERS = ("r0.1", "r1.1")


class Side:
    """One member in this process."""

    def __init__(self, name: str, run_id: str, secret: bytes) -> None:
        self.listener = Listener(run_id, name, secret)
        self.addresses: dict[str, str] = {}
        self.meshes: list[Mesh] = []

    def mesh(self, n: int, abandoned: Callable[[], bool] = lambda: False) -> Mesh:
        self.meshes.append(
            Mesh(
                self.listener, View(id=ViewId(1, n), members=MEMBERS), self.addresses, None,
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


def test_every_message_of_a_view_can_be_read() -> None:
    """One that a sender has and the readers do not know would end the connection, and look like a broken one."""
    values = [value for module in (connections_of_a_view, messages) for value in vars(module).values()]
    kinds = [value for value in values if isinstance(value, type) and issubclass(value, msgspec.Struct)]
    homes = {connections_of_a_view.__name__, messages.__name__}
    sent = {kind for kind in kinds if kind.__module__ in homes and kind.__struct_config__.tag is not None}
    assert {kind.__name__ for kind in sent} >= {"HeaderSaid", "SettingsSeen", "Parts"}
    assert sent == set(typing.get_args(connections_of_a_view._Frame))


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
    hi.send(_Hi())
    last = first.mesh(3)
    thread = threading.Thread(target=last.form, daemon=True)  # had the peer been hung up on, it would wait for ever
    thread.start()
    thread.join(30)
    hi.close()
    assert not thread.is_alive()


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
    "closer look": (),
}


def test_all_that_a_course_may_ask_is_said_and_heard(sides: list[Side]) -> None:
    """Each word by its own message or channel; a round that is repeated is not taken for the one before."""
    assert set(WORDS) == set(typing.get_args(ChannelName))

    def course() -> Course[list[dict[str, dict[str, Any]]]]:
        heard = []
        for name, mine in WORDS.items():
            heard.append((yield AskAll(-1 if name == "roll" else 4, {name: mine}, roll=True)))
        heard.append((yield AskAll(4, {"orders": 3}, turn=1)))
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
        assert found[name] == [*expected, {"orders": dict.fromkeys(MEMBERS, 3)}]
        assert found[f"{name} did"] == "rest"
