"""A peer's late write over c10d, after the exchange was abandoned here, lands in no buffer in use (rule 14)."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outlast.config import RunConfig
from outlast.core.protocol import View, ViewId
from outlast.errors import ViewAbandoned
from outlast.runtime.exchange._c10d_transfers import Pending, Points
from outlast.runtime.exchange.c10d_plane import NetworkPlane
from outlast.runtime.exchange.plane import ExchangeTask
from outlast.runtime.exchange.slots import Memory
from outlast.runtime.settings.fault_points import Probe
from outlast.runtime.transport.connections import Listener
from outlast.runtime.transport.mesh import Mesh
from outlast.tensors import BLOCK, Layout

NUM, SLOT = 300_000, 2
VIEW = View(id=ViewId(1, 1), members=("r0.1", "r1.1"), start=True)
TASK = ExchangeTask(
    step=0, nodes=(((0, 1),), ((1, 2),)), slots=(SLOT,), num_leaves=2, scale=0.5, with_norms=False,
    on_scattered=lambda: None,
)  # fmt: skip


class Side:
    """One member in this process: its mesh, its plane, its memory filled with one value."""

    def __init__(self, name: str, run_id: str, secret: bytes, value: float, numel: int) -> None:
        self.listener = Listener(run_id, name, secret)
        self.layout = Layout([nn.Parameter(torch.zeros(numel))], 64 << 20)
        self.memory = Memory(self.layout, 4, shared=False)
        self.memory.flats(SLOT)[0].fill_(value)
        self.out = [torch.zeros(bucket.numel) for bucket in self.layout.buckets]

    def form(self, addresses: dict[str, str]) -> None:
        self.mesh = Mesh(
            self.listener, VIEW, addresses, None, wake_fd=os.eventfd(0, os.EFD_NONBLOCK), abandoned=lambda: False,
            patience=lambda phase: 30.0, on_stall=lambda *_: None, probe=Probe(self.listener.me, None),
        )  # fmt: skip
        self.mesh.form()
        env: Any = SimpleNamespace(config=RunConfig(group_timeout_s=60.0), address="")
        self.plane = NetworkPlane(
            self.mesh, self.layout, self.memory, self.out, lambda *_: None, env, None, ""
        )  # fmt: skip

    def offer(self) -> Pending:
        self.plane.begin(TASK)
        self.plane.offer(0)
        return self.plane._scattering[0]

    def leave(self) -> None:
        """As `Replica` does; what is left of the view is dropped on a thread."""
        self.plane.close()
        self.mesh.close()


def both(first: Callable[[], object], second: Callable[[], object]) -> None:
    thread = threading.Thread(target=first)
    thread.start()
    second()
    thread.join(30)
    assert not thread.is_alive()


def reduced(plane: NetworkPlane) -> None:
    plane._await_sums(0)
    plane._order.arrived()


@pytest.fixture
def sides(request: pytest.FixtureRequest) -> Any:
    run_id, secret, numel = secrets.token_hex(4), secrets.token_bytes(16), getattr(request, "param", NUM)
    early, late = Side("r0.1", run_id, secret, 1.0, numel), Side("r1.1", run_id, secret, 7.0, numel)
    addresses = {side.listener.me: side.listener.address for side in (early, late)}
    both(lambda: early.form(addresses), lambda: late.form(addresses))
    yield early, late
    for side in (early, late):
        side.leave()
        side.listener.close()


def dropped() -> None:
    for thread in [thread for thread in threading.enumerate() if thread.name == "outlast-drop"]:
        thread.join(30)
        assert not thread.is_alive()


def use_again(side: Side, like: Tensor) -> Callable[[], bool]:
    """Everything that the next view uses, filled: sums, outcome, what it may have allocated. Still as it was?"""
    side.memory.flats(SLOT)[0].fill_(5.0)
    side.out[0].fill_(4.0)
    refilled: list[Tensor] = [torch.full_like(like, 3.0) for _ in range(16)]

    def unchanged() -> bool:
        used = [(side.memory.flats(SLOT)[0], 5.0), (side.out[0], 4.0), *((tensor, 3.0) for tensor in refilled)]
        return all(bool((tensor == value).all()) for tensor, value in used)

    return unchanged


@pytest.fixture
def lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group whose connections nobody could end outlives its view, as one does whose destructor waits."""
    monkeypatch.setattr(Points, "_cut", lambda self: None)


@pytest.mark.usefixtures("lingering")
def test_late_sums_change_nothing_that_is_in_use(sides: tuple[Side, Side]) -> None:
    early, late = sides
    buffer = early.offer().parts[1][0]
    early.leave()
    unchanged = use_again(early, buffer)
    pending = late.offer()
    assert pending.done.wait(30)
    sent = pending.result()[0][0]
    # What it got may be of either step, and counts for nothing: no header of a side that left the view follows.
    assert bool(((sent == 1.0) | (sent == 5.0)).all()), "it exchanged with the abandoned side"
    dropped()
    assert bool((buffer == 7.0).all()), "the late write came, into what the abandoned exchange held"
    assert unchanged()
    assert bool((late.memory.flats(SLOT)[0] == 7.0).all()), "sums are only ever inputs"


@pytest.mark.usefixtures("lingering")
def test_a_late_outcome_changes_nothing_that_is_in_use(sides: tuple[Side, Side]) -> None:
    """It is received where the optimizer reads it: who abandons it leaves the tensor to it."""
    early, late = sides
    both(lambda: early.offer().done.wait(30), lambda: late.offer().done.wait(30))
    reduced(early.plane)
    outcome = early.out[0]
    early.leave()
    unchanged = use_again(early, outcome)
    reduced(late.plane)
    assert late.plane._gathering[0].done.wait(30)
    dropped()
    lo, hi = early.plane.ranges[0][1]
    assert bool((outcome[lo:hi] == 4.0).all()), "the late write came: (1 + 7) / 2"
    assert outcome is not early.out[0]
    assert unchanged()


def test_who_leaves_ends_what_is_under_way_here_and_at_its_peers(sides: tuple[Side, Side]) -> None:
    """No wait of the group's timeout: nothing can write any more, and the threads of both sides are free."""
    early, late = sides
    both(lambda: early.offer().done.wait(30), lambda: late.offer().done.wait(30))
    reduced(early.plane)
    early.leave()
    dropped()

    def go_on() -> None:
        reduced(late.plane)
        assert late.plane._gathering[0].done.wait(30)
        late.plane._gathering[0].result()

    with pytest.raises(ViewAbandoned, match="a transfer failed"):
        go_on()


@pytest.mark.parametrize("sides", [BLOCK], indirect=True)
def test_who_receives_nothing_waits_until_all_have_entered_all_the_same(sides: tuple[Side, Side]) -> None:
    """The bucket is one block, and not this member's: what the last step left in `out` may be needed until then."""
    early, late = sides
    assert early.plane.ranges[0][0] == (0, 0)
    assert early.offer().done.is_set()
    assert not early.plane._arrived(0)
    late.offer()
    early.plane._all_entered(0)
    assert early.plane._arrived(0)


def lost(side: Side) -> None:
    """Wait until this side knows that the connection ended."""
    with pytest.raises(RuntimeError):
        side.plane._ends()._group.recv([torch.empty(1)], 1, 99).wait()


def announce(side: Side) -> None:
    """As `Training` does under the backward: what ends the view is left to `finish`."""
    with contextlib.suppress(ViewAbandoned):
        side.offer()


def test_who_died_after_its_offer_and_before_mine_ends_the_view_and_nothing_else(sides: tuple[Side, Side]) -> None:
    early, late = sides
    late.offer()
    late.plane.close()
    dropped()
    lost(early)
    announce(early)
    with pytest.raises(ViewAbandoned):
        early.plane.finish()


def test_who_died_before_it_took_my_slice_ends_the_view_and_nothing_else(sides: tuple[Side, Side]) -> None:
    early, late = sides
    both(lambda: early.offer().done.wait(30), lambda: late.offer().done.wait(30))
    outcome = early.out[0]
    late.plane._ends().receive(torch.empty(1), 0, 0)
    late.plane.close()
    dropped()
    lost(early)
    with contextlib.suppress(ViewAbandoned):
        reduced(early.plane)
    with pytest.raises(ViewAbandoned):
        early.plane.finish()
    early.leave()
    assert early.out[0] is not outcome, "receives that did begin may still write it"
