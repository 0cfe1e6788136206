"""A peer's late write over c10d, after the exchange was abandoned here, lands in no buffer in use (rule 14)."""

from __future__ import annotations

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
from outlast.runtime._c10d import NetworkPlane, open_store
from outlast.runtime._gradients import Memory
from outlast.runtime._mesh import Listener, Mesh
from outlast.runtime._plane import Task
from outlast.runtime._probe import Probe
from outlast.tensors import Layout

NUM, SLOT = 300_000, 2
VIEW = View(id=ViewId(1, 1), members=("r0.1", "r1.1"), start=True)
TASK = Task(
    step=0, nodes=(((0, 1),), ((1, 2),)), slots=(SLOT,), num_leaves=2, scale=0.5, with_norms=False,
    on_scattered=lambda: None,
)  # fmt: skip


class Side:
    """One member in this process: its mesh, its plane, its memory filled with one value."""

    def __init__(self, name: str, run_id: str, secret: bytes, value: float) -> None:
        self.listener = Listener(run_id, name, secret)
        self.layout = Layout([nn.Parameter(torch.zeros(NUM))], 64 << 20)
        self.memory = Memory(self.layout, 4, shared=False)
        self.memory.flats(SLOT)[0].fill_(value)
        self.out = [torch.zeros(bucket.numel) for bucket in self.layout.buckets]

    def form(self, addresses: dict[str, str], store: Any, address: str) -> None:
        self.mesh = Mesh(
            self.listener, VIEW, addresses, None, wake_fd=os.eventfd(0, os.EFD_NONBLOCK), abandoned=lambda: False,
            patience=lambda phase: 30.0, on_stall=lambda *_: None, probe=Probe(self.listener.me, None),
        )  # fmt: skip
        self.mesh.form()
        env: Any = SimpleNamespace(config=RunConfig(group_timeout_s=3.0))
        self.plane = NetworkPlane(
            self.mesh, self.layout, self.memory, self.out, lambda *_: None, env, store, address
        )  # fmt: skip

    def offer(self) -> Any:
        self.plane.begin(TASK)
        self.plane.offer(0)
        return self.plane._scattering[0]


def both(first: Callable[[], None], second: Callable[[], None]) -> None:
    thread = threading.Thread(target=first)
    thread.start()
    second()
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def sides() -> Any:
    run_id, secret = secrets.token_hex(4), secrets.token_bytes(16)
    early, late = Side("r0.1", run_id, secret, 1.0), Side("r1.1", run_id, secret, 7.0)
    addresses = {side.listener.me: side.listener.address for side in (early, late)}
    store, address = open_store()
    other, _ = open_store()
    both(lambda: early.form(addresses, store, address), lambda: late.form(addresses, other, address))
    yield early, late
    for side in (early, late):
        side.plane.close()
        side.mesh.close()
        side.listener.close()


def test_a_late_write_changes_nothing_that_is_in_use(sides: tuple[Side, Side]) -> None:
    """The group outlives the view for a while, as one does whose destructor waits; its peer exchanges only then."""
    early, late = sides
    shape, lingering = early.offer().buffer.shape, early.plane._group
    early.plane.close()
    early.mesh.close()
    for thread in [thread for thread in threading.enumerate() if thread.name == "outlast-drop"]:
        thread.join(30)
    early.memory.flats(SLOT)[0].fill_(5.0)  # the next view's sums
    early.out[0].fill_(4.0)
    refilled: list[Tensor] = [torch.full(shape, 3.0) for _ in range(16)]
    pending = late.offer()
    assert pending.done.wait(30)
    sent = pending.result().chunk(2)[0]
    # What it got may be of either step, and counts for nothing: no header of a side that left the view follows.
    assert bool(((sent == 1.0) | (sent == 5.0)).all()), "it exchanged with the abandoned side"
    del lingering
    assert all(bool((tensor == 3.0).all()) for tensor in refilled)
    assert bool((early.memory.flats(SLOT)[0] == 5.0).all())
    assert bool((early.out[0] == 4.0).all())
    assert bool((late.memory.flats(SLOT)[0] == 7.0).all()), "sums are only ever inputs"
