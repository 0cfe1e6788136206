"""What others reduce is computed again, over real Gloo groups, one member a thread: liars are named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from outlast.config import RunConfig
from outlast.core.protocol import Evidence, cover, plan_of
from outlast.core.protocol.slices import settled
from outlast.runtime.exchange.c10d_plane import NetworkPlane, open_store
from outlast.runtime.exchange.plane import ExchangeTask, Reduction
from outlast.runtime.exchange.second_reduction import Checks
from outlast.runtime.exchange.slots import Memory
from outlast.runtime.transport.peer_messages import Extra
from outlast.tensors import BLOCK, Layout, prepare_fold

from .test_units_row_network import PATIENCE_S, Room

LEAVES, MEMBERS = 6, ("r0", "r1", "r2")
Tamper = Callable[[int, torch.Tensor], None]


class Member:
    """What one member did in the step. `said`: its answer in the dispute about `accused`."""

    def __init__(self) -> None:
        self.out = torch.empty(0)
        self.found, self.num_asked = Reduction(), 0
        self.said: dict[tuple[int, str], tuple[int, int]] = {}


def exchange(
    share: float,
    tamper: dict[str, Tamper] | None = None,
    always: bool = False,
    nan: bool = False,
    relieved: tuple[str, ...] = (),
) -> tuple[dict[str, Member], list[tuple[int, str]]]:
    """One step of three members: what each found, and the slices that somebody accused. `nan`: sums have them;
    `relieved`: who reduces nothing."""
    layout = Layout([torch.zeros(4 * BLOCK), torch.zeros(5 * BLOCK + 7)], 16 * BLOCK)
    room, (store, address) = Room(MEMBERS, relieved), open_store()
    leaves = plan_of(MEMBERS, 0, LEAVES).leaves
    nodes = tuple(cover(leaves[name], LEAVES) for name in MEMBERS)
    done, reduced = {name: Member() for name in MEMBERS}, threading.Barrier(len(MEMBERS))

    def accused() -> list[tuple[int, str]]:
        return sorted({key for each in done.values() for key in each.found.false})

    def run(place: int, me: str) -> None:
        memory, out = Memory(layout, LEAVES + 2, shared=False), Memory(layout, 1, shared=False).flats(0)
        for slot, node in enumerate(nodes[place], 1):
            for bucket, flat in enumerate(memory.flats(slot)):
                flat.copy_(torch.randn(flat.shape, generator=torch.Generator().manual_seed(10 * node[0] + bucket)))
                if nan:
                    flat.view(torch.int32)[::5] = 0x7FC00000 if place else -0x400000  # inf - inf has the sign
        mesh = room.mesh(me)
        mesh.has_all = lambda kind, step, bucket: len(mesh.boxes[kind, step, bucket]) == len(mesh.peers)
        env: Any = SimpleNamespace(config=RunConfig())
        plane = NetworkPlane(mesh, layout, memory, out, lambda *_: None, env, store, address)
        checks = Checks(lambda: share, seed=3)
        if always:
            checks.always[0] = [(0, 1)]

        plane.begin(ExchangeTask(
            step=4, nodes=nodes, slots=tuple(range(1, len(nodes[place]) + 1)), num_leaves=LEAVES, scale=1.0 / LEAVES,
            with_norms=True, on_scattered=lambda: None, checks=checks,
            on_reduced=(tamper or {}).get(me),
        ))  # fmt: skip
        for bucket in range(len(layout.buckets)):
            plane.offer(bucket)
        mine = done[me]
        mine.found, mine.out = plane.finish(), torch.cat(out)
        mine.num_asked = sum(len(box) for key, box in mesh.boxes.items() if key[0] is Extra)
        reduced.wait(PATIENCE_S)
        if accused():
            mine.said = plane.look_again(accused())
        reduced.wait(PATIENCE_S)
        plane.close()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(MEMBERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return done, accused()


def verdicts(done: dict[str, Member], accused: list[tuple[int, str]]) -> set[tuple[str, str]]:
    headers: Any = [
        SimpleNamespace(member=name, audit=Evidence(false=tuple((*key, value) for key, value in m.found.false.items())))
        for name, m in done.items()
    ]
    said = {name: member.said for name, member in done.items()}
    return {(found.culprit, found.kind) for key in accused for found in settled(4, key, headers, said)}


def lie(bucket: int, target: torch.Tensor) -> None:
    target.neg_()


def test_who_lies_once_about_a_slice_is_named() -> None:
    struck: list[int] = []

    def once(bucket: int, target: torch.Tensor) -> None:
        if not struck:
            struck.append(bucket)
            target.neg_()

    clean, none = exchange(1.0)
    assert none == []
    done, accused = exchange(1.0, {"r1": once})
    assert accused == [(struck[0], "r1")]
    assert verdicts(done, accused) == {("r1", "transient")}
    again, _ = exchange(0.0)
    assert all(torch.equal(each.out, clean["r0"].out) for group in (clean, again) for each in group.values())
    assert not torch.equal(done["r0"].out, clean["r0"].out), "this step must not be applied"


def test_who_reduces_nothing_changes_no_bit_and_liars_are_named_all_the_same() -> None:
    clean, _ = exchange(1.0)
    for relieved in MEMBERS:
        spared, accused = exchange(1.0, relieved=(relieved,))
        assert accused == []
        assert all(torch.equal(member.out, clean["r0"].out) for member in spared.values())
        assert spared[relieved].found.norms == {}
    done, accused = exchange(1.0, {"r2": lie}, relieved=("r0",))
    assert {reducer for _, reducer in accused} >= {"r2"}
    assert verdicts(done, accused) == {("r2", "persistent")}


def test_who_goes_on_lying_is_named_also_where_it_accuses_others() -> None:
    done, accused = exchange(1.0, {"r2": lie})
    assert {reducer for _, reducer in accused} > {"r2"}
    assert verdicts(done, accused) == {("r2", "persistent")}


def test_nobody_is_asked_without_audits_and_what_is_critical_is_always_checked() -> None:
    done, accused = exchange(0.0, {"r0": lie})
    assert accused == []
    assert {member.num_asked for member in done.values()} == {0}
    done, accused = exchange(0.0, {"r0": lie}, always=True)
    assert (0, "r0") in accused
    assert verdicts(done, [(0, "r0")]) == {("r0", "persistent")}


def test_nobody_is_accused_where_nans_of_several_kinds_meet() -> None:
    """Who reduces does so in one compiled pass, who checks in several. It is the guards that are to see the step."""
    prepare_fold()
    done, accused = exchange(1.0, nan=True)
    assert accused == []
    assert all(member.out.isnan().any() for member in done.values())
