"""Who leaves a view before a peer's connection for it has been heard is not taken for dead by that peer."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from outlast.core.phases import Phase
from outlast.core.protocol import View, ViewId
from outlast.errors import ViewAbandoned
from outlast.runtime._mesh import Listener, Mesh, PeersLost, Roll, _encoder, _Hi
from outlast.runtime._probe import Probe

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


def test_a_view_left_before_the_peer_said_who_it_is(sides: list[Side]) -> None:
    first, second = sides
    view2 = first.mesh(2, abandoned=lambda: bool(view2._strangers))
    follower = Follower(second)
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
    """A peer connects for view 3 and is interrupted before its greeting, while view 2 forms."""
    first, second = sides
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect("\0" + first.listener.address)
    view2, follower = first.mesh(2), second.mesh(2)
    thread = threading.Thread(target=follower.form)
    thread.start()
    view2.form()
    thread.join(30)
    view2.close()
    view3 = ViewId(1, 3)
    body = _encoder.encode(_Hi("r1.1", view3, second.listener.token(view3, "r1.1", "r0.1")))
    sock.sendall(len(body).to_bytes(4, "big") + body)
    last = first.mesh(3)
    thread = threading.Thread(target=last.form, daemon=True)  # had the peer been hung up on, it would wait for ever
    thread.start()
    thread.join(30)
    sock.close()
    assert not thread.is_alive()
