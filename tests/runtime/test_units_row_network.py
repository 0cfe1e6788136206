"""Robust rules over real Gloo groups, one member a thread: the bits of one process, and the bytes that are sent."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outlast.config import RunConfig
from outlast.core.phases import Phase
from outlast.core.protocol import View, ViewId, cover, plan_of
from outlast.runtime.exchange.c10d_plane import open_store
from outlast.runtime.exchange.c10d_row_plane import NetworkRowPlane
from outlast.runtime.exchange.plane import ExchangeTask
from outlast.runtime.exchange.robust_rows import Robust
from outlast.runtime.exchange.rule_settings import row_settings
from outlast.runtime.exchange.slots import Memory
from outlast.runtime.training.samples import Samples
from outlast.tensors import BLOCK, Layout

ROWS, NUMEL, PATIENCE_S = 4, 32 * BLOCK, 60.0


class Room:
    """What a mesh does, between threads: everybody's messages in everybody's boxes."""

    def __init__(self, members: tuple[str, ...], relieved: tuple[str, ...] = ()) -> None:
        self.members, self.relieved, self.changed = members, relieved, threading.Condition()
        self.boxes: dict[str, Any] = {name: defaultdict(dict) for name in members}

    def mesh(self, me: str) -> Any:
        peers, boxes = [name for name in self.members if name != me], self.boxes[me]
        view = View(id=ViewId(1, 1), members=self.members, relieved=self.relieved)

        def broadcast(message: Any) -> None:
            with self.changed:
                for name in peers:
                    self.boxes[name][type(message), message.step, message.bucket][me] = message
                self.changed.notify_all()

        def collect(kind: type, step: int, bucket: int, phase: Phase) -> Any:
            with self.changed:
                assert self.changed.wait_for(lambda: len(boxes[kind, step, bucket]) == len(peers), PATIENCE_S)
                return boxes[kind, step, bucket]

        def until(done: Callable[[], bool], suspects: list[str], phase: Phase) -> None:
            while not done():
                os.read(wake_fd, 8)

        wake_fd = os.eventfd(0)
        return SimpleNamespace(
            me=me, view=view, peers=peers, boxes=boxes, wake_fd=wake_fd, broadcast=broadcast, collect=collect,
            until=until, forget=lambda step: None,
        )  # fmt: skip


def aggregate(
    num: int, rule: dict[str, Any], relieved: tuple[str, ...] = ()
) -> tuple[list[torch.Tensor], list[int], set[tuple[int, str]]]:
    """One step of `num` members: the aggregate of each, what each sent, and who was accused."""
    members = tuple(f"r{i}" for i in range(num))
    settings = row_settings(RunConfig(replicas=ROWS), ["w", "v"], ROWS, rows=ROWS, **rule)
    assert settings is not None
    params = [torch.zeros(NUMEL // 2), torch.zeros(NUMEL // 2)]
    layout = Layout(params, 4 * NUMEL // 2)
    samples = Samples(list(range(ROWS)), global_batch_size=ROWS, microbatches=ROWS, seed=0)
    room, (store, address) = Room(members, relieved), open_store()
    leaves = plan_of(members, 0, ROWS, ROWS).leaves
    nodes = tuple(cover(leaves[name], ROWS, ROWS) for name in members)
    found: dict[str, Any] = {}

    def run(place: int, me: str) -> None:
        memory, out = Memory(layout, ROWS + 2, shared=False), Memory(layout, 1, shared=False).flats(0)
        for slot, (leaf, _) in enumerate(nodes[place], 1):
            for bucket, flat in enumerate(memory.flats(slot)):
                flat.copy_(torch.randn(flat.shape, generator=torch.Generator().manual_seed(10 * leaf + bucket)))
        robust = Robust(settings, layout, samples, 0)
        env: Any = SimpleNamespace(config=RunConfig(), address="")
        plane = NetworkRowPlane(robust, room.mesh(me), layout, memory, out, lambda *_: None, env, store, address)
        if rule.get("check_reducers") and me == "r1":
            plane.tamper = lambda bucket, target: target.neg_() if bucket == 1 else None
        task = ExchangeTask(
            step=0, nodes=nodes, slots=tuple(range(1, len(nodes[place]) + 1)), num_leaves=ROWS, scale=1.0,
            with_norms=True, on_scattered=lambda: None,
        )  # fmt: skip
        plane.begin(task)
        for bucket in range(len(layout.buckets)):
            plane.offer(bucket)
        plane.finish()
        found[me] = (torch.cat(out), plane.sent_bytes, robust.accused)
        plane.close()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    outs, sent, accused = zip(*(found[name] for name in members), strict=True)
    assert all(torch.equal(outs[0], other) for other in outs)
    return list(outs), list(sent), set().union(*accused)


@pytest.mark.parametrize("name", ["trimmed_mean", "median", "krum_all_honest", "geometric_median"])
def test_the_bytes_are_a_ring_all_reduce_s(name: str) -> None:
    rule = {"aggregation": name, "f": 1}
    outs, sent, _ = aggregate(ROWS, rule)
    ring = 2 * (ROWS - 1) / ROWS * NUMEL * 4
    assert max(sent) <= 1.05 * ring
    assert torch.equal(outs[0], aggregate(2, rule)[0][0])


@pytest.mark.parametrize("name", ["trimmed_mean", "krum_all_honest"])
def test_who_reduces_nothing_sends_less_and_changes_no_bit(name: str) -> None:
    """Its rows and the aggregate cross its link once each way, and no more."""
    rule = {"aggregation": name, "f": 1}
    outs, sent, _ = aggregate(ROWS, rule, relieved=("r2",))
    usual, usually_sent, _ = aggregate(ROWS, rule)
    assert torch.equal(outs[0], usual[0])
    assert sent[2] == pytest.approx(NUMEL * 4, rel=0.01)
    assert sent[2] < 0.7 * usually_sent[2]


def test_after_shrinking_k_subtrees_cost_half_of_one_and_k() -> None:
    """Two members own two rows each: (1 + 2) / 2 of ring all-reduce."""
    _, sent, _ = aggregate(2, {"aggregation": "median", "f": 1})
    ring = 2 * 1 / 2 * NUMEL * 4
    assert max(sent) == pytest.approx(1.5 * ring, rel=0.01)


def test_a_false_slice_is_found_by_the_member_that_got_its_rows_too() -> None:
    _, sent, accused = aggregate(ROWS, {"aggregation": "trimmed_mean", "f": 1, "check_reducers": 1.0})
    assert accused == {(1, "r1")}
    ring = 2 * (ROWS - 1) / ROWS * NUMEL * 4
    assert max(sent) <= 2.05 * ring  # every slice twice, gathered once
