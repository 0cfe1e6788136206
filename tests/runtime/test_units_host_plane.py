"""The exchange in two levels, over real Gloo groups, one member a thread: one process's bits, the bytes of a ring."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from outlast.config import RunConfig
from outlast.core.protocol import View, ViewId, cover, schedule
from outlast.core.protocol.host_cuts import HostCuts, together
from outlast.runtime.exchange._c10d_transfers import Points
from outlast.runtime.exchange.host_plane import HostPlane
from outlast.runtime.exchange.plane import ExchangeTask
from outlast.runtime.exchange.slots import Memory
from outlast.runtime.transport.peer_messages import Key
from outlast.tensors import BLOCK, Layout, reduce_slice

PATIENCE_S = 20.0
LEAVES, BUCKETS = 8, 2
SIZE = 24 * BLOCK + 64  # of a bucket
Leaves = tuple[tuple[int, ...], ...]


class Talk:
    """What a mesh does, between threads."""

    def __init__(self, view: View, all_of_them: dict[str, Talk], me: str) -> None:
        self.view, self.me, self._all = view, me, all_of_them
        self.peers = [name for name in view.members if name != me]
        self.boxes: Any = defaultdict(dict)
        self.keys: list[Key] = []
        self.wake_fd = os.eventfd(0)

    def broadcast(self, message: Any) -> None:
        for name in self.peers:
            self.send(name, message)

    def send(self, name: str, message: Any) -> None:
        to = self._all[name]
        if isinstance(message, Key):
            to.keys.append(message)
        else:
            to.boxes[type(message), message.step, message.bucket][self.me] = message
        os.eventfd_write(to.wake_fd, 1)

    def until(self, done: Callable[[], bool], suspects: list[str], phase: Any) -> None:
        while not done():
            os.eventfd_read(self.wake_fd)

    def collect(self, kind: type, step: int, bucket: int, phase: Any, names: list[str] | None = None) -> None:
        self.until(lambda: self.has_all(kind, step, bucket, names), [], phase)

    def has_all(self, kind: type, step: int, bucket: int, names: list[str] | None = None) -> bool:
        return set(self.boxes[kind, step, bucket]) >= set(self.peers if names is None else names)

    def forget(self, step: int) -> None:
        """Nothing is in the way."""


class Counted(Points):
    """What each member sends to each other."""

    sent: ClassVar[dict[tuple[int, int], int]] = {}

    def _sender(self, tensor: Tensor, to: int) -> Any:
        key = self.index, to
        self.sent[key] = self.sent.get(key, 0) + len(tensor) * tensor.itemsize
        return super()._sender(tensor, to)


def leaf(number: int, bucket: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * number + bucket))


def subtree(lo: int, hi: int, bucket: int, size: int) -> Tensor:
    parts = {(i, i + 1): leaf(i, bucket, size) for i in range(lo, hi)}
    if hi - lo == 1:
        return parts[lo, hi]
    middle = lo + (1 << ((hi - lo - 1).bit_length() - 1))
    return subtree(lo, middle, bucket, size) + subtree(middle, hi, bucket, size)


def layout_of() -> Layout:
    return Layout([torch.zeros(SIZE) for _ in range(BUCKETS)], 4 * SIZE)


def expected() -> list[Tensor]:
    out = []
    for bucket in range(BUCKETS):
        parts = {(i, i + 1): leaf(i, bucket, SIZE) for i in range(LEAVES)}
        out.append(torch.empty(SIZE))
        reduce_slice(parts, schedule(tuple(parts), LEAVES), (0, LEAVES), 1.0 / LEAVES, out[-1])
    return out


def exchange(
    monkeypatch: pytest.MonkeyPatch, places: str, leaves: Leaves, relieved: tuple[str, ...] = (), steps: int = 2
) -> dict[tuple[int, int], int]:
    """Some steps of members at these places: what each sent to each in one of them. The bits are one process's."""
    monkeypatch.setattr("outlast.runtime.exchange.c10d_plane.Points", Counted)
    monkeypatch.setattr("outlast.runtime.exchange.c10d_plane.shut", lambda said: 0)  # one process has all listeners
    Counted.sent.clear()
    members, layout = tuple(f"r{i}" for i in range(len(places))), layout_of()
    talks: dict[str, Talk] = {}
    view = View(id=ViewId(1, 1), members=members, relieved=relieved)
    talks |= {name: Talk(view, talks, name) for name in members}
    nodes = tuple(cover(row, LEAVES) for row in leaves)
    memories = [Memory(layout, LEAVES + 2) for _ in members]
    done: dict[str, list[Tensor]] = {}
    norms: dict[str, dict[int, float]] = {}
    meet = threading.Barrier(len(members))

    def run(place: int, me: str) -> None:
        memory, out = memories[place], Memory(layout, 1, shared=False).flats(0)
        for slot, node in enumerate(nodes[place], 1):
            for bucket, flat in enumerate(memory.flats(slot)):
                flat.copy_(subtree(*node, bucket, flat.numel()))
        near = {name: memories[i] for i, name in enumerate(members) if places[i] == places[place] and name != me}
        env: Any = SimpleNamespace(config=RunConfig(group_timeout_s=20.0), address="")
        mesh: Any = talks[me]
        plane = HostPlane(mesh, layout, memory, near, out, lambda *_: None, env, places)
        for step in range(steps):
            if place == 0:
                Counted.sent.clear()
            meet.wait(PATIENCE_S)
            plane.begin(ExchangeTask(
                step=step, nodes=nodes, slots=tuple(range(1, len(nodes[place]) + 1)), num_leaves=LEAVES,
                scale=1.0 / LEAVES, with_norms=True, on_scattered=lambda: None,
            ))  # fmt: skip
            for bucket in range(BUCKETS):
                plane.offer(bucket)
            norms[me] = plane.finish().norms
            meet.wait(PATIENCE_S)
        done[me] = [flat.clone() for flat in out]
        plane.close()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    want = expected()
    assert set(done) == set(members)
    for out in done.values():
        assert all(torch.equal(one, other) for one, other in zip(out, want, strict=True))
    assert sorted(block for mine in norms.values() for block in mine) == list(range(layout.num_blocks))
    return dict(Counted.sent)


def by_host(sent: dict[tuple[int, int], int], places: str) -> dict[str, int]:
    """Bytes that leave each host."""
    out = dict.fromkeys(places, 0)
    for (source, to), size in sent.items():
        assert places[source] != places[to]  # within a host nothing is sent
        out[places[source]] += size
    return out


WHOLE = 4 * SIZE * BUCKETS
EVEN: Leaves = ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize(
    ("places", "leaves"),
    [
        ("aabb", EVEN),
        ("aabbccdd", tuple((i,) for i in range(8))),
        ("aaab", ((0,), (1,), (2, 3), (4, 5, 6, 7))),  # hosts with different numbers of members
        ("abbbaa", ((0,), (4, 5), (6,), (7,), (1, 2), (3,))),  # not side by side in the view
        ("aab", ((0, 1), (2, 3), (4, 5, 6, 7))),  # one has died down to one, and sends the same
    ],
)
def test_a_host_sends_what_it_would_in_a_ring_of_hosts(
    monkeypatch: pytest.MonkeyPatch, places: str, leaves: Leaves
) -> None:
    sent = by_host(exchange(monkeypatch, places, leaves), places)
    ring = 2 * (len(sent) - 1) / len(sent) * WHOLE
    assert max(sent.values()) <= 1.05 * ring
    assert sum(sent.values()) == pytest.approx(len(sent) * ring, rel=1e-6)


def test_any_microbatches_anywhere_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a death: orphans lie all over, and somebody, or a whole host, has none."""
    exchange(monkeypatch, "aabb", ((0, 5), (3,), (1, 2, 7), (4, 6)))
    exchange(monkeypatch, "aabcc", ((0, 7), (), (), (1, 2, 3, 6), (4, 5)))
    exchange(monkeypatch, "aabb", ((), (), (0, 1, 2, 3), (4, 5, 6, 7)))


@pytest.mark.parametrize(("sizes", "most"), [((8,) * 31 + (7,), 2.0), ((8,) * 32, 1.1), ((3, 3), 1.1)])
def test_blocks_that_do_not_come_out_even_fall_to_every_member_in_time(sizes: tuple[int, ...], most: float) -> None:
    """250 buckets of 32 blocks: one for each of 32 hosts."""
    places = [f"h{host}" for host, size in enumerate(sizes) for _ in range(size)]
    bucket = Layout([torch.empty(32 * BLOCK, device="meta")], 1).buckets[0]
    cuts = HostCuts(together(places))
    num, idle, turns = cuts.num_fine, cuts.idle_fine, cuts.turns(250)
    edges = [cuts.hosts[host] for host in (0, len(sizes) - 1)]
    loads = dict.fromkeys((member for host in edges for member in host), 0)
    for turn in turns:
        fine = bucket.slices(num, idle, turn)
        for member in loads:
            lo, hi = cuts.owned(fine, member)
            loads[member] += hi - lo
    for host in edges:
        mean = sum(loads[member] for member in host) / len(host)
        assert max(loads[member] for member in host) <= most * mean


def test_a_host_behind_a_bad_link_reduces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    places, relieved = "aabbccdd", ("r6", "r7")
    sent = by_host(exchange(monkeypatch, places, tuple((i,) for i in range(8)), relieved), places)
    assert sent["d"] == WHOLE  # its sums, and nothing else
