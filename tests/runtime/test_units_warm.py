"""Memory that is touched before it is needed, and goes back when its user is gone."""

from __future__ import annotations

import gc
import os
import resource
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outlast.runtime.exchange.slots import OUTCOME, Memory
from outlast.runtime.training import run_facts
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.frozen import Frozen, raw
from outlast.runtime.training.warm_memory import Warm, at_low_priority, populate, touch
from outlast.runtime.transport.regions import Region
from outlast.tensors import BLOCK, Layout


class User:
    """Whoever borrows."""


def prepared(warm: Warm, sizes: list[int]) -> Warm:
    """`prepare`, and its background thread has ended."""
    warm.prepare(sizes)
    settled()
    return warm


def settled() -> None:
    for thread in threading.enumerate():
        if thread.name == "outlast-touch":
            thread.join(30)


def test_the_secrets_of_the_run_and_of_its_record_are_not_left_to_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("USER", "PASSWORD", "CA", "CERT", "KEY")
    for name in ("OUTLAST_SECRET", *(f"OUTLAST_ETCD_{kind}" for kind in kinds)):
        monkeypatch.setenv(name, "x")
    monkeypatch.setattr(run_facts.ctypes, "CDLL", lambda name: SimpleNamespace(prctl=lambda *said: 0))
    monkeypatch.setattr(run_facts, "outlast_full_disks", lambda: None)
    env: Any = SimpleNamespace(coordinator=("127.0.0.1", 1), config=SimpleNamespace(threads=0))
    run_facts.prepare_process(env)
    left = {name for name in os.environ if name == "OUTLAST_SECRET" or name.startswith("OUTLAST_ETCD_")}
    assert left == {"OUTLAST_ETCD_CA", "OUTLAST_ETCD_CERT"}


def test_what_was_prepared_is_lent_and_comes_back() -> None:
    warm, user = prepared(Warm(), [1000, 5000]), User()
    assert warm.held_bytes == 6000
    first = warm.lend(4000, user)
    assert len(first) == 4000
    assert warm.held_bytes == 1000
    address = first.data_ptr()
    del first, user
    gc.collect()
    assert warm.held_bytes == 6000
    assert warm.lend(4500, User()).data_ptr() == address


def test_no_more_is_kept_than_was_asked_for() -> None:
    warm, user = prepared(Warm(), [1000]), User()
    assert len(warm.lend(9000, user)) == 9000
    del user
    assert warm.held_bytes == 1000
    assert prepared(warm, []).held_bytes == 0
    user = User()
    warm.lend(500, user)
    del user
    assert warm.held_bytes == 0


def test_memory_that_is_lent_is_replaced_if_it_is_wanted_still() -> None:
    warm, user = prepared(Warm(), [1000]), User()
    lent = warm.lend(1000, user)
    prepared(warm, [1000])
    other = warm.lend(1000, User())
    assert lent.data_ptr() != other.data_ptr()


def test_copies_are_bytes_and_keep_their_memory_while_they_are_held() -> None:
    warm = prepared(Warm(), [4096])
    tensors = [torch.arange(100, dtype=torch.float32), torch.arange(3, dtype=torch.int64)]
    lent = warm.copies(tensors)
    assert [part.tolist() for part in lent] == [raw(tensor).tolist() for tensor in tensors]
    settled()
    assert warm.held_bytes == 4096  # another one
    del lent
    assert warm.held_bytes == 4096


def test_who_copies_faster_than_copies_come_back_finds_touched_memory() -> None:
    warm, tensors, lent = prepared(Warm(), [1 << 20, 1200, 1200]), [torch.ones(250)], []
    for _ in range(5):
        lent.append(warm.copies(tensors))
        settled()
        assert any(len(memory) == 1200 for memory in warm._free)
    lent.clear()
    assert warm.held_bytes == (1 << 20) + 2400
    assert prepared(warm, []).held_bytes == 0
    warm.copies(tensors)
    settled()
    assert warm.held_bytes == 0  # nobody is expected


def faults_of(flats: list[torch.Tensor]) -> int:
    """Of this thread, which alone writes: others of this process have their own."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for flat in flats:
        flat.numpy().fill(0)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14),
    reason="the kernel faults pages in as they are written",
)
def test_where_a_joiner_is_expected_the_slices_of_the_larger_view_are_there_before_it() -> None:
    layout = Layout([torch.zeros(20 * BLOCK)], bucket_bytes=8 << 20)
    memory = Memory(layout, 2)
    state = SimpleNamespace(size_bytes=lambda: 1000)
    engine: Any = SimpleNamespace(layout=layout, memory=memory, state=state, warm=Warm())
    Engine.expect_joiners(engine, 1, 2)
    settled()
    halves = [[flat[slice(*bucket.slices(3)[index])] for bucket, flat in
               zip(layout.buckets, memory.flats(OUTCOME), strict=True)] for index in (0, 1)]  # fmt: skip
    assert faults_of(halves[1]) < 20
    assert faults_of(halves[0]) > 100  # not mine: nobody faulted it in
    assert engine.warm.held_bytes > 0
    Engine.expect_joiners(engine, 0, 0)
    settled()
    assert engine.warm.held_bytes == 0


@pytest.mark.parametrize("size", [1, 3 << 20])
def test_populated_memory_keeps_what_it_holds_and_faults_no_more(size: int) -> None:
    region = Region(4 << 20)
    whole = torch.frombuffer(region.map, dtype=torch.uint8)
    part = whole[5000 : 5000 + size]
    part[0] = 7
    populate([part])
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    part[::4096] += 1
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    region.close()
    assert part[0] == 8
    assert int(whole.sum()) == 7 + -(-size // 4096)
    if size > 1 and tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 14):
        assert faults < 100  # of 768 pages


def test_a_share_is_frozen_in_prepared_memory() -> None:
    warm, state = prepared(Warm(), [1 << 16]), [torch.arange(4096, dtype=torch.float32), torch.ones(2, 3).t()]
    total = sum(raw(tensor).numel() for tensor in state)
    frozen = Frozen(state, 100, total - 5, {1}, warm)
    assert warm.held_bytes == 0
    frozen.wait()
    before = torch.cat([raw(tensor) for tensor in state])[100 : total - 5].clone()
    state[0].zero_()
    assert torch.equal(frozen.ready(), before)
    del frozen
    assert warm.held_bytes == 1 << 16


def test_a_share_that_no_thread_is_to_be_had_for_is_copied_by_who_waits_for_it(refuse: set[str]) -> None:
    """The step that is about to write the state, or where none is made the thread that sends it."""
    refuse.add("outlast-freeze")
    warm, state = Warm(), [torch.arange(4096, dtype=torch.float32)]
    before, total = raw(state[0]).clone(), 4 * 4096
    sent, stepped = Frozen(state, 0, total, set(), warm), Frozen(state, 5, total, set(), warm)
    assert torch.equal(sent.ready(), before)
    stepped.wait()
    state[0].zero_()
    assert torch.equal(stepped.ready(), before[5:])


def test_without_a_thread_memory_is_touched_when_it_is_needed(refuse: set[str]) -> None:
    refuse.add("outlast-touch")
    warm = Warm()
    warm.prepare([4096])
    lent = warm.copies([torch.ones(1024)])
    assert warm.held_bytes == 0
    assert len(lent[0]) == 4096
    refuse.clear()
    second = warm.copies([torch.ones(1024)])
    settled()
    assert len(second[0]) == warm.held_bytes == 4096, "the next who borrows has it touched"


def test_touched_memory_is_zero_up_to_its_ends_and_nothing_beyond() -> None:
    whole = torch.full((5 << 20,), 7, dtype=torch.uint8)
    touch(whole[3 : (4 << 20) + 5])
    assert not whole[3 : (4 << 20) + 5].any()
    assert whole[:3].tolist() == [7, 7, 7]
    assert bool((whole[(4 << 20) + 5 :] == 7).all())


def test_work_at_low_priority_is_waited_for_and_raises_here() -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    level = at_low_priority(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    assert level == max(mine, 10)
    with pytest.raises(ZeroDivisionError):
        at_low_priority(lambda: 1 // 0)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


def test_without_a_thread_work_at_low_priority_is_done_at_the_callers(refuse: set[str]) -> None:
    refuse.add("outlast-gently")
    assert at_low_priority(threading.get_ident) == threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        at_low_priority(lambda: 1 // 0)
