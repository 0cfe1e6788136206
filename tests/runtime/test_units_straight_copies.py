"""The outcome's way to a device without a device: which way it goes, its bits, and that no copy is left under way."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outlast.core.protocol import View, ViewId
from outlast.errors import ViewAbandoned
from outlast.runtime.exchange.plane import ExchangeTask, SharedPlane
from outlast.runtime.exchange.slots import OUTCOME, Memory
from outlast.runtime.training._staging import Staging
from outlast.runtime.training._straight_copies import StraightCopies
from outlast.runtime.training.engine import Engine
from outlast.runtime.transport.peer_messages import Reduced
from outlast.tensors import Layout

from .test_units_host_plane import BUCKETS, LEAVES, PATIENCE_S, SIZE, Talk, expected, layout_of, subtree

MEMBERS, NODES = ("r0", "r1", "r2"), (((0, 4),), ((4, 6),), ((6, 8),))
CPU = torch.device("cpu")


class Pages:
    """Locks all but those of a memory whose number is in `refuses`."""

    def __init__(self, *refuses: int) -> None:
        self.locked: set[int] = set()
        self.num_asked, self._refuses = 0, refuses

    def lock(self, address: int, size: int) -> bool:
        self.num_asked += 1
        if self.num_asked in self._refuses:
            return False
        self.locked.add(address)
        return True

    def unlock(self, address: int) -> None:
        self.locked.remove(address)


class Late(StraightCopies):
    """As a device does at worst, it reads when somebody waits for it, and not before."""

    def __init__(self, pages: Pages, plain: bool = True) -> None:
        self.under_way: list[Callable[[], object]] = []
        super().__init__(CPU, [plain] * BUCKETS, lambda: SimpleNamespace(synchronize=self.read), pages)

    def take(self, bucket: int, slices: Any, out: Tensor) -> bool:
        if not super().take(bucket, slices, out):
            return False
        there = self._there[bucket]
        for flat in (there, out):
            flat.fill_(float("nan"))
        for memory, lo, hi in slices:
            source = memory.flats(OUTCOME)[bucket][lo:hi]
            self.under_way.append(lambda into=there[lo:hi], source=source: into.copy_(source))
        self.under_way.append(lambda: out.copy_(there))
        return True

    def read(self) -> None:
        while self.under_way:
            self.under_way.pop(0)()


class Member:
    """One of them, and what it has at the end of each step."""

    def __init__(self, me: str, talks: dict[str, Talk], memories: dict[str, Memory], copies: Late) -> None:
        self.copies, self.out = copies, Memory(layout_of(), 1, shared=False).flats(0)
        self.num_taken: list[int] = []
        mesh: Any = talks[me]
        peers = {name: memory for name, memory in memories.items() if name != me}
        self.plane = SharedPlane(mesh, layout_of(), memories[me], peers, self.out, lambda *_: None, copies)
        self.place = MEMBERS.index(me)
        self.nodes = NODES if peers else (((0, LEAVES),),)

    def begin(self, step: int) -> None:
        self.plane.begin(
            ExchangeTask(
                step=step, nodes=self.nodes, slots=(1,), num_leaves=LEAVES, scale=1.0 / LEAVES, with_norms=True,
                on_scattered=lambda: None,
            )
        )  # fmt: skip
        for bucket in range(BUCKETS):
            self.plane.offer(bucket)


def members_of(*pages: Pages) -> list[Member]:
    talks: dict[str, Talk] = {}
    view = View(id=ViewId(1, 1), members=MEMBERS)
    talks |= {name: Talk(view, talks, name) for name in MEMBERS}
    memories = {name: Memory(layout_of(), LEAVES + 2) for name in MEMBERS}
    for name, (node,) in zip(MEMBERS, NODES, strict=True):
        for bucket, flat in enumerate(memories[name].flats(1)):
            flat.copy_(subtree(*node, bucket, flat.numel()))
    return [Member(name, talks, memories, Late(each)) for name, each in zip(MEMBERS, pages, strict=True)]


def together(members: list[Member], work: Callable[[Member], None]) -> None:
    over: list[Member] = []

    def run(member: Member) -> None:
        work(member)
        over.append(member)

    threads = [threading.Thread(target=run, args=(member,), daemon=True) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert len(over) == len(members)


def test_slices_go_straight_once_all_pages_are_locked_and_by_a_thread_where_some_cannot_be() -> None:
    """Members may go different ways: their outcomes have one process's bits."""
    pages, want = [Pages(), Pages(2), Pages()], expected()
    members, meet = members_of(*pages), threading.Barrier(3)

    def work(member: Member) -> None:
        for step in range(4):
            meet.wait(PATIENCE_S)
            member.begin(step)
            member.plane.finish()
            assert not member.copies.under_way
            member.num_taken.append(member.copies.num_taken)
            for bucket, (out, right) in enumerate(zip(member.out, want, strict=True)):
                there = member.copies.given(bucket)
                assert torch.equal(out, right)
                assert (there is not None) == (step >= 2 and member.place != 1)
                assert there is None or torch.equal(there, right)

    together(members, work)
    assert [member.num_taken for member in members] == [[0, 0, 2, 4], [0, 0, 0, 0], [0, 0, 2, 4]]
    assert [(len(each.locked), each.num_asked) for each in pages] == [(3, 3), (0, 2), (3, 3)]
    assert [member.copies.refused for member in members] == [False, True, False]


def test_who_is_alone_locks_no_pages() -> None:
    """It reduces to where its outcome is read; what the others of a larger view had is released, one a step."""
    pages, talks = Pages(), dict[str, Talk]()
    talks["r0"] = Talk(View(id=ViewId(2, 1), members=("r0",)), talks, "r0")
    memories = [Memory(layout_of(), LEAVES + 2) for _ in range(2)]
    for bucket, flat in enumerate(memories[0].flats(1)):
        flat.copy_(subtree(0, LEAVES, bucket, flat.numel()))
    copies = Late(pages)
    for _ in memories:
        copies.begin(memories)
    member = Member("r0", talks, {"r0": memories[0]}, copies)
    for step, left in enumerate((1, 0, 0)):
        member.begin(step)
        member.plane.finish()
        assert (len(pages.locked), pages.num_asked) == (left, 2)
        assert all(torch.equal(out, right) for out, right in zip(member.out, expected(), strict=True))


def abandon_at_the_second(member: Member) -> None:
    """The view ends as it waits for what others reduced of the second bucket."""
    mesh: Any = member.plane.mesh
    collect = mesh.collect

    def until_second(kind: Any, step: int, bucket: int, phase: Any) -> Any:
        if kind is Reduced and bucket:
            raise ViewAbandoned("somebody died")
        return collect(kind, step, bucket, phase)

    mesh.collect = until_second


def test_no_copy_outlives_an_exchange_that_is_abandoned_and_nothing_of_it_is_applied() -> None:
    members, meet = members_of(Pages(), Pages(), Pages()), threading.Barrier(3)

    def work(member: Member) -> None:
        for step in range(3):
            meet.wait(PATIENCE_S)
            member.begin(step)
            if step == 2 and member.place == 0:
                abandon_at_the_second(member)
                with pytest.raises(ViewAbandoned):
                    member.plane.finish()
            else:
                member.plane.finish()

    together(members, work)
    copies = members[0].copies
    assert (copies.num_taken, copies.under_way) == (1, [])
    for memory in members[0].plane.peers.values():
        for flat in memory.flats(OUTCOME):
            flat.fill_(7.0)  # a peer may write it again
    assert torch.equal(members[0].out[0], expected()[0])
    members[0].plane.close()
    assert copies.given(0) is None


def test_pages_are_released_one_memory_at_a_time_and_with_it() -> None:
    pages, memories = Pages(), [Memory(layout_of(), 2) for _ in range(3)]
    copies = Late(pages)
    for number in range(4):
        copies.begin(memories)
        assert len(pages.locked) == min(number + 1, 3)
    for number in (2, 1, 1):
        copies.begin(memories[:1])
        assert len(pages.locked) == number
    memories.clear()
    gc.collect()
    assert not pages.locked


def test_a_fork_releases_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, memory = Pages(), Memory(layout_of(), 2)
    copies = Late(pages)
    copies.begin([memory])
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del memory
    gc.collect()
    assert len(pages.locked) == 1


def test_memory_of_one_process_and_types_that_change_on_the_host_do_not_go_straight() -> None:
    private, shared = Memory(layout_of(), 2, shared=False), Memory(layout_of(), 2)
    copies, out = Late(Pages()), torch.empty(SIZE)
    copies.begin([private])
    assert copies.refused
    assert not copies.take(0, [(private, 0, SIZE)], out)
    mixed = Late(Pages(), plain=False)
    mixed.begin([shared])
    assert not mixed.take(0, [(shared, 0, SIZE)], out)


def test_what_is_there_is_applied_unless_the_host_has_changed_it() -> None:
    params = [nn.Parameter(torch.zeros(SIZE)) for _ in range(BUCKETS)]
    layout = Layout(params, 4 * SIZE)
    staging, memory = Staging(params, layout, CPU), Memory(layout, 2)
    staging.straight = copies = Late(Pages())
    out = staging.outcome()
    copies.begin([memory])
    engine: Any = SimpleNamespace(clip_norm=1.0, out=out, staging=staging)
    engine._differs = lambda: Engine._differs(engine)
    for norm, factor in ((0.5, 1.0), (2.0, 0.5)):
        for bucket, flat in enumerate(memory.flats(OUTCOME)):
            flat.fill_(1.0)
            assert copies.take(bucket, [(memory, 0, SIZE)], out[bucket])
        copies.settle()
        there = dict(copies._there)
        meta: Any = SimpleNamespace(overflow=False, ruling=None, norm=norm)
        Engine.clip(engine, meta)
        for bucket, flat in enumerate(staging.back(out)):
            assert torch.allclose(flat, torch.full((SIZE,), factor))
            assert (flat is there[bucket]) == (factor == 1.0)
    assert all(copies.given(bucket) is None for bucket in range(BUCKETS))
