"""Slices over real Gloo groups, one member a thread: what arrives where, either way of sending, and in whose memory."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from outlast.errors import ViewAbandoned
from outlast.runtime.exchange._c10d_transfers import Collectives, Pending, Points
from outlast.runtime.exchange.c10d_plane import open_store

MEMBERS, TAGS, PATIENCE_S = 3, 4, 30.0
LENGTHS = [0, 5, 3]  # of the members' slices: one has none
NODES = [2, 1, 0]  # partial sums of each: one has none
RANGES = [(0, 0), (0, 5), (5, 8)]

Make = Callable[[Any, int], Points | Collectives]


def points(group: Any, index: int) -> Points:
    return Points(group, index, MEMBERS, os.eventfd(0), TAGS)


def collectives(group: Any, index: int) -> Collectives:
    return Collectives(torch.device("cpu"), group, index, MEMBERS, os.eventfd(0), TAGS)


def everywhere(make: Make, work: Callable[[Any, int], Any]) -> list[Any]:
    """`work(wires, index)` at each member, with the same group; what each returned."""
    store, address = open_store()
    found: dict[int, Any] = {}
    connected = threading.Barrier(MEMBERS)  # or the first to end would break the connections that others still make

    def run(index: int) -> None:
        own = store if index == 0 else TCPStore("127.0.0.1", int(address.rpartition(":")[2]), is_master=False)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        wires = make(ProcessGroupGloo(PrefixStore("g", own), index, MEMBERS, options), index)
        try:
            connected.wait(PATIENCE_S)
            found[index] = work(wires, index)
        finally:
            wires.close()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(MEMBERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return [found[index] for index in range(MEMBERS)]


def came(pending: Pending) -> list[list[Tensor]]:
    assert pending.done.wait(PATIENCE_S)
    return pending.result()


def sums(member: int, node: int, bucket: int) -> Tensor:
    return torch.arange(8.0) + 100 * member + 10 * node + 1000 * bucket


def scatter(wires: Any, index: int, bucket: int) -> Pending:
    mine = [sums(index, node, bucket) for node in range(NODES[index])]
    pieces = [[flat[lo:hi] for flat in mine] for lo, hi in RANGES]
    sizes = [[LENGTHS[index]] * num for num in NODES]
    pending: Pending = wires.scatter(bucket, pieces, sizes, torch.float32)
    return pending


@pytest.mark.parametrize("make", [points, collectives])
def test_everybody_gets_its_pieces_of_every_sum_and_then_all_slices(make: Make) -> None:
    def work(wires: Any, index: int) -> list[Tensor]:
        wires.begin()
        arriving = [scatter(wires, index, bucket) for bucket in range(2)]
        wholes = [torch.full((8,), -1.0) for _ in arriving]
        lo, hi = RANGES[index]
        gathering = []
        for bucket, (pending, whole) in enumerate(zip(arriving, wholes, strict=True)):
            rows = came(pending)
            for member, row in enumerate(rows):
                assert [part.tolist() for part in row] == [
                    sums(member, node, bucket)[lo:hi].tolist() for node in range(NODES[member])
                ]
            whole[lo:hi] = sum((part for row in rows for part in row), torch.zeros(hi - lo))
            gathering.append(wires.gather(bucket, whole, RANGES))
            wires.release(pending)
        for pending in gathering:
            came(pending)
        return wholes

    for wholes in everywhere(make, work):
        for bucket, whole in enumerate(wholes):
            assert whole.tolist() == (sums(0, 0, bucket) + sums(0, 1, bucket) + sums(1, 0, bucket)).tolist()


def test_more_is_received_only_once_what_came_before_is_read_and_into_its_memory() -> None:
    def bounded(group: Any, index: int) -> Points:
        return Points(group, index, MEMBERS, os.eventfd(0), TAGS, ahead_bytes=1)

    def work(wires: Any, index: int) -> list[int]:
        wires.begin()
        arriving = [scatter(wires, index, bucket) for bucket in range(TAGS)]
        taken = [pending.storage is not None for pending in arriving]
        assert taken == [True, True, LENGTHS[index] == 0, LENGTHS[index] == 0]  # nothing takes no memory
        places = []
        for pending in arriving:
            came(pending)
            assert pending.storage is not None
            places.append(pending.storage.data_ptr())
            wires.release(pending)
        for bucket in range(TAGS):  # also waits until the peers have taken what was sent
            came(wires.gather(bucket, torch.zeros(8), RANGES))
        return places

    for index, places in enumerate(everywhere(bounded, work)):
        assert LENGTHS[index] == 0 or len(set(places)) == 2


def test_a_tensor_is_handed_over() -> None:
    def work(wires: Any, index: int) -> float:
        tensor = torch.full((1000,), float(index))
        if index:
            came(wires.receive(tensor, 0, 3))
        else:
            for to in (1, 2):
                came(wires.send(tensor, to, 3))
        return float(tensor.sum())

    assert everywhere(points, work) == [0.0, 0.0, 0.0]


def test_a_group_is_dropped_also_when_no_thread_can_begin_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 that is so in everything that `atexit` calls."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "outlast-drop":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    def work(wires: Any, index: int) -> Any:
        came(scatter(wires, index, 0))
        came(wires.gather(0, torch.zeros(8), RANGES))
        return wires

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for wires in everywhere(points, work):
        assert wires._group is None
        assert not any(thread.is_alive() for thread in wires._threads)


def test_a_thread_of_a_group_that_does_not_begin_is_not_waited_for(stillborn: set[str]) -> None:
    wires = Points(None, 0, 1, os.eventfd(0), TAGS)
    stillborn |= {"outlast-wires", "outlast-drop"}
    wires.close()
    assert not any(thread.is_alive() for thread in wires._threads)
    with pytest.raises(RuntimeError, match="did not begin"):
        Points(None, 0, 1, os.eventfd(0), TAGS)


def lost(wires: Any, peer: int) -> None:
    """Wait until this side knows that the connection ended."""
    with pytest.raises(RuntimeError):
        wires._group.recv([torch.empty(1)], peer, 99).wait()


def test_what_cannot_even_be_started_is_told_like_what_fails_and_its_buffer_is_kept() -> None:
    """Receives from those that live have begun then, and write."""
    gone, seen = threading.Event(), threading.Barrier(MEMBERS - 1)

    def work(wires: Any, index: int) -> tuple[bool, bool] | None:
        wires.begin()
        if index == MEMBERS - 1:
            wires.receive(torch.empty(1), 0, 0)
            wires.close()
            gone.set()
            return None
        assert gone.wait(PATIENCE_S)
        lost(wires, MEMBERS - 1)
        seen.wait(PATIENCE_S)
        arriving, gathering = scatter(wires, index, 0), wires.gather(0, torch.zeros(8), RANGES)
        for pending in (gathering, wires.send(torch.zeros(1), MEMBERS - 1, 0)):
            with pytest.raises(ViewAbandoned, match="a transfer failed"):
                came(pending)
        seen.wait(PATIENCE_S)
        return arriving in wires._under_way, gathering in wires._under_way

    assert everywhere(points, work)[:-1] == [(True, True)] * (MEMBERS - 1)


def test_a_waiting_thread_outlives_whatever_a_wait_raises() -> None:
    wires = Points(None, 0, 1, os.eventfd(0), TAGS)

    class Broken:
        def wait(self) -> None:
            raise MemoryError("no room")

    class Fine:
        def wait(self) -> None:
            pass

    broken, fine = Pending(), Pending()
    for pending, work in ((broken, Broken()), (fine, Fine())):
        pending.works.append(work)
        wires._lanes[0].put(pending)
    assert fine.done.wait(PATIENCE_S)
    with pytest.raises(ViewAbandoned, match="no room"):
        came(broken)
    wires.close()


def test_a_process_may_end_while_a_wait_that_nothing_wakes_goes_on() -> None:
    """Gloo forgets a send whose connection breaks at the wrong moment: its wait lasts as long as the group may."""
    woken, began = threading.Event(), threading.Event()

    class Forgotten:
        def wait(self) -> None:
            began.set()
            woken.wait(PATIENCE_S)

    class Group:
        pass

    group = Group()
    wires, gone = Points(group, 0, 1, os.eventfd(0), TAGS), weakref.ref(group)
    pending = wires._keep(Pending())
    pending.works.append(Forgotten())
    wires._expect(pending, 0)
    assert began.wait(PATIENCE_S)
    watchers = wires._threads
    wires.close()
    del wires, group
    for thread in [t for t in threading.enumerate() if t.name == "outlast-drop"]:
        thread.join(PATIENCE_S)  # the interpreter waits for it as well
    assert [thread.daemon for thread in watchers if thread.is_alive()] == [True]
    assert gone() is not None, "it may still be written to"
    woken.set()
    for thread in watchers:
        thread.join(PATIENCE_S)
    assert gone() is None


def test_the_pool_holds_as_many_buffers_as_were_ever_under_way_together() -> None:
    wires = Points(None, 0, 1, os.eventfd(0), TAGS)
    for size in range(100, 10_100, 100):  # each larger than all before it
        both = Pending(), Pending()
        for pending in both:
            assert len(wires._take(pending, size)) == size
            pending.done.set()
        for pending in both:
            wires.release(pending)
    assert [len(spare) for spare in wires._pool] == [10_000, 10_000]
    wires.close()


def test_all_may_send_more_than_sockets_hold_before_anybody_receives() -> None:
    number, sent = 1 << 21, threading.Barrier(MEMBERS)

    def work(wires: Any, index: int) -> None:
        theirs = [i for i in range(MEMBERS) if i != index]
        mine = torch.full((number,), float(index))
        sends = [wires.send(mine, to, 0) for to in theirs]
        sent.wait(PATIENCE_S)
        taken = [torch.empty(number) for _ in theirs]
        receives = [wires.receive(into, source, 0) for source, into in zip(theirs, taken, strict=True)]
        for pending in receives:
            came(pending)
        for source, into in zip(theirs, taken, strict=True):
            assert bool((into == source).all())
        for pending in sends:
            came(pending)

    everywhere(points, work)


def held() -> tuple[int, int]:
    """Threads of any kind, and sockets."""
    kinds = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kinds.append(os.readlink(f"/proc/self/fd/{number}").partition(":")[0])
    return len(os.listdir("/proc/self/task")), kinds.count("socket")


@pytest.mark.parametrize("ends", ["complete", "offered", "in the middle"])
def test_groups_that_are_gone_leave_neither_threads_nor_sockets(ends: str) -> None:
    def work(wires: Any, index: int) -> None:
        wires.begin()
        if ends == "in the middle" and index == 0:
            return
        pending = scatter(wires, index, 0)
        if ends == "complete":
            came(pending)
            came(wires.gather(0, torch.zeros(8), RANGES))

    seen = []
    for _ in range(6):
        everywhere(points, work)
        for thread in [thread for thread in threading.enumerate() if thread.name == "outlast-drop"]:
            thread.join(PATIENCE_S)
        seen.append(held())
    assert seen[-1][0] < seen[0][0] + MEMBERS, "a store's own thread may still be ending"
    assert seen[-1][1] <= seen[0][1] + 1
