"""The exchange over torch.distributed: Gloo on CPUs, NCCL on GPUs (the latter has not been run on a GPU yet).

The same steps as through shared memory: all-to-all of slices, reduce, all-gather; one group a view. On CPUs its members
find each other over the mesh (`_rendezvous.py`), on GPUs in the store of the view's first member, under its own prefix.
The training thread never waits inside a transfer: it waits on the mesh, which also hears deaths and notices. What an
abandoned transfer may still write is kept alive until its group is gone, and nobody else uses it (protocol, 14). Bytes:
(1+k)/2 of ring all-reduce's for k partial sums a member; what a second member reduces once more (25) travels to it once
more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from outlast.checkpoint import threads
from outlast.core.phases import Phase
from outlast.core.protocol import Node, schedule
from outlast.core.protocol.step.exchange_order import ExchangeOrder
from outlast.errors import ViewAbandoned
from outlast.runtime.exchange._c10d_transfers import Collectives, Pending, Points
from outlast.runtime.exchange._rendezvous import LOOPBACK, ViewStore, shut
from outlast.runtime.exchange.plane import Enter, ExchangeTask, Reduction, print_of_slice, reduce_and_note
from outlast.runtime.exchange.slots import Memory
from outlast.runtime.host.environment import Environment
from outlast.runtime.transport.connections import decoded
from outlast.runtime.transport.endpoints import bound_to
from outlast.runtime.transport.mesh import Mesh
from outlast.runtime.transport.peer_messages import Extra, Hand, SumsReady
from outlast.runtime.view.rounds import WANTED
from outlast.tensors import Layout, reduce_slice

__all__ = ["LOOPBACK", "NetworkPlane", "open_store"]


def open_store(host: str = LOOPBACK) -> tuple[Any, str]:
    """This member's own store, and its address: (store, host:port). `host`: an address of this machine, the only one at
    which it listens; left to itself torch takes all there are."""
    # torch listens, not this: with a backlog of ours until then it would be taken for a port of the run.
    sock = bound_to(host)
    port = sock.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=sock.detach(),
    )
    return store, f"{host}:{port}"


class NetworkPlane:
    """Exchanges buckets over a process group. `store`: this member's own (it may be the view's), `address`: the view's;
    None: over the mesh."""

    AHEAD_BYTES: float = 16 << 20
    """Bytes of other members' sums that are received at the same time."""

    def __init__(
        self,
        mesh: Mesh,
        layout: Layout,
        mine: Memory,
        out: list[Tensor],
        enter: Enter,
        env: Environment,
        store: Any,
        address: str,
    ) -> None:
        self.mesh, self.layout, self.mine, self.out, self.enter = mesh, layout, mine, out, enter
        self.members = mesh.view.members
        self.index = self.members.index(mesh.me)
        idle = {index for index, name in enumerate(self.members) if name in mesh.view.relieved}
        self.ranges = [bucket.slices(len(self.members), idle) for bucket in layout.buckets]
        self._wires: Points | Collectives | None = None
        self._keys: ViewStore | None = None
        self._scattering: list[Pending] = []
        self._gathering: dict[int, Pending] = {}
        self._order = ExchangeOrder(len(layout.buckets), self)
        self._sums: dict[Node, Tensor] = {}  # of my slice of the bucket that is reduced next
        self._task: ExchangeTask | None = None
        self._found = Reduction()
        self._form(env, store, address)

    def _form(self, env: Environment, store: Any, address: str) -> None:
        """Build the group on a thread: it blocks until all are there."""
        if len(self.members) == 1:
            return
        ready, trouble, made = threading.Event(), [], []
        keys = ViewStore(self.mesh, env.config.group_timeout_s) if store is None else None
        self._keys = keys  # as long as the group, which may call it

        def build() -> None:
            try:
                if keys is None:
                    made.append(self._make_group(env, self._joined(env, store, address), address.rpartition(":")[0]))
                else:
                    made.append(self._make_group(env, keys, env.address or LOOPBACK))
                    shut(keys.said)
            except RuntimeError as error:
                trouble.append(error)
            finally:
                ready.set()
                os.eventfd_write(self.mesh.wake_fd, 1)

        threads.begin(threading.Thread(target=build, name="outlast-group", daemon=True))

        def done() -> bool:
            if keys is not None:
                keys.exchange()
            return ready.is_set()

        try:
            self.mesh.until(done, self.mesh.peers, Phase.CONNECT)
        finally:
            if keys is not None:
                keys.exchange()  # what I said last, peers may still wait for
                keys.give_up()
        if trouble:
            raise ViewAbandoned(f"the group did not form: {str(trouble[0]).splitlines()[0]}")
        self._wires = self._wired(made[0])

    def _wired(self, group: Any) -> Points | Collectives:
        about = group, self.index, len(self.members), self.mesh.wake_fd, len(self.layout.buckets)
        if self.layout.device.type == "cuda":
            return Collectives(self.layout.device, *about)
        return Points(*about, ahead_bytes=self.AHEAD_BYTES)

    def _joined(self, env: Environment, own: Any, address: str) -> Any:
        """The store of the view's first member."""
        host, _, port = address.rpartition(":")
        if self.index == 0:
            return own
        timeout = timedelta(seconds=env.config.group_timeout_s)
        return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)

    def _make_group(self, env: Environment, store: Any, host: str) -> Any:
        timeout = timedelta(seconds=env.config.group_timeout_s)
        prefixed = PrefixStore(f"view/{self.mesh.view.id}", store)
        if self.layout.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(prefixed, self.index, len(self.members), options)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timeout
        options._threads = 2
        return ProcessGroupGloo(prefixed, self.index, len(self.members), options)

    # --- a step --------------------------------------------------------------------------------------------------
    def begin(self, task: ExchangeTask) -> None:
        """A new step."""
        self.mesh.forget(task.step)
        if self._wires is not None:
            self._wires.begin()
        self._task, self._found = task, Reduction(norms={}, false={})
        self._order = ExchangeOrder(len(self.layout.buckets), self)
        self._scattering, self._gathering = [], {}
        self._schedule = list(schedule(tuple(node for nodes in task.nodes for node in nodes), task.num_leaves))

    def offer(self, bucket: int) -> None:
        """My sums of this bucket are final. Never waits; reduces earlier buckets whose sums have all arrived."""
        task = self._now()
        self.enter(Phase.SCATTER, bucket)
        self.mesh.broadcast(SumsReady(task.step, bucket, task.slots))
        if self._wires is not None:
            sums = [self.mine.flats(slot)[bucket] for slot in task.slots]
            pieces = [[flat[lo:hi] for flat in sums] for lo, hi in self.ranges[bucket]]
            lo, hi = self.ranges[bucket][self.index]
            sizes = [[hi - lo] * len(nodes) for nodes in task.nodes]
            dtype = self.layout.buckets[bucket].dtype
            self._scattering.append(self._wires.scatter(bucket, pieces, sizes, dtype))
        order = self._order
        while order.reduces_before(bucket) and self._arrived(order.bucket):
            self._await_sums(order.bucket)
            order.arrived()

    def _arrived(self, bucket: int) -> bool:
        """Everybody's sums of my slice are here; of the first bucket, that all have offered it (see `_all_entered`)."""
        here = self._wires is None or self._scattering[bucket].done.is_set()
        return here and (bucket > 0 or self.mesh.has_all(SumsReady, self._now().step, 0))

    def finish(self) -> Reduction:
        """Wait for the others, and do what follows. Raises ViewAbandoned when the view ends first."""
        order = self._order
        while order.awaits is not None:
            if order.awaits == "sums":
                self.enter(Phase.SCATTERED, order.bucket)
                self._await_sums(order.bucket)
            else:
                self.enter(Phase.GATHERED, order.bucket)
                self._gathered(order.bucket)
            order.arrived()
        return self._found

    def _await_sums(self, bucket: int) -> None:
        """Take everybody's sums of my slice."""
        self._sums = self._own(bucket) if self._wires is None else self._received(bucket)

    def _wait(self, pending: Pending, bucket: int, phase: Phase) -> list[list[Tensor]]:
        offered = self.mesh.boxes[SumsReady, self._now().step, bucket]
        late = [name for name in self.mesh.peers if name not in offered] or self.mesh.peers
        self.mesh.until(pending.done.is_set, late, phase)
        return pending.result()

    def _own(self, bucket: int) -> dict[Node, Tensor]:
        task = self._now()
        return {n: self.mine.flats(s)[bucket] for n, s in zip(task.nodes[0], task.slots, strict=True)}

    def _received(self, bucket: int) -> dict[Node, Tensor]:
        task = self._now()
        self._all_entered(bucket)
        rows = self._wait(self._scattering[bucket], bucket, Phase.SCATTERED)
        return {
            n: part for nodes, row in zip(task.nodes, rows, strict=True) for n, part in zip(nodes, row, strict=True)
        }

    def _all_entered(self, bucket: int) -> None:
        """Who holds no sums sends none, and to an empty slice nobody does: only that all have offered the first bucket
        proves that all have committed the last step, whose outcome is overwritten from here on (protocol, 10)."""
        if bucket == 0:
            self.mesh.collect(SumsReady, self._now().step, 0, Phase.SCATTERED)

    # --- the stages of the order (`core/protocol/step/exchange_order.py`) ----------------------------------------
    def scattered(self) -> None:
        self._now().on_scattered()

    def reduce(self, bucket: int) -> None:
        task, wires = self._now(), self._wires
        parts, self._sums = self._sums, {}
        self.enter(Phase.REDUCE, bucket)
        lo, hi = self.ranges[bucket][self.index]
        target = self.out[bucket][lo:hi]
        for begin, end, first in self.layout.buckets[bucket].stretches(lo, hi):
            piece = {node: part[begin - lo : end - lo] for node, part in parts.items()}
            out = target[begin - lo : end - lo]
            reduce_and_note(task, self._found, bucket, first, piece, self._schedule, out)
        self.enter(Phase.GATHER, bucket)
        if wires is not None:
            self._gathering[bucket] = wires.gather(bucket, self.out[bucket], self.ranges[bucket])
            wires.release(self._scattering[bucket])

    def choose(self) -> None:
        """A mean has no choice."""

    def gather(self, bucket: int) -> None:
        """It was received where it belongs."""

    def _gathered(self, bucket: int) -> None:
        if self._wires is not None:
            self._wait(self._gathering[bucket], bucket, Phase.GATHERED)

    # --- audits ------------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Do slices of others follow from the sums? Which ones is said only now, when all of them are reduced."""
        task = self._now()
        if task.checks is None or not task.checks.active or self._wires is None:
            return
        mine = list(task.checks.due(task.step, self.ranges, self.index))
        self.mesh.broadcast(Extra(task.step, WANTED, msgspec.msgpack.encode(mine)))
        box = self.mesh.collect(Extra, task.step, WANTED, Phase.GATHERED)
        said = {name: decoded(name, told.body, list[tuple[int, int]]) for name, told in box.items()}
        wanted = [mine if name == self.mesh.me else said[name] for name in self.members]
        for bucket, reducer, gathered, again in self._once_more(wanted):
            if gathered != again:
                self._found.false[bucket, self.members[reducer]] = again

    def look_again(self, slices: Sequence[tuple[int, str]]) -> dict[tuple[int, str], tuple[int, int]]:
        """Fingerprints of these slices (bucket, reducer): as I gathered them, and as I compute them now. A collective:
        every member asks for the same."""
        wanted = [[(bucket, self.members.index(name)) for bucket, name in slices]] * len(self.members)
        return {(b, self.members[r]): (gathered, again) for b, r, gathered, again in self._once_more(wanted)}

    def _once_more(self, wanted: Sequence[Sequence[tuple[int, int]]]) -> Iterator[tuple[int, int, int, int]]:
        """(bucket, reducer, fingerprint of what I gathered, and of what I compute) of the slices that I want.
        `wanted`: by each member, in view order. Everybody sends its sums of them, bucket by bucket."""
        task, wires = self._now(), self._ends()
        for bucket in sorted({bucket for slices in wanted for bucket, _ in slices}):
            self.enter(Phase.REDUCE, bucket)
            flats = [self.mine.flats(slot)[bucket] for slot in task.slots]
            ranges = [[self.ranges[b][r] for b, r in slices if b == bucket] for slices in wanted]
            pieces = [[flat[lo:hi] for lo, hi in row for flat in flats] for row in ranges]
            sizes = [[hi - lo for lo, hi in ranges[self.index] for _ in nodes] for nodes in task.nodes]
            pending = wires.scatter(bucket, pieces, sizes, self.layout.buckets[bucket].dtype)
            rows = [iter(row) for row in self._wait(pending, bucket, Phase.SCATTERED)]
            for reducer in [r for b, r in wanted[self.index] if b == bucket]:
                parts = {n: next(row) for nodes, row in zip(task.nodes, rows, strict=True) for n in nodes}
                yield bucket, reducer, *self._twice(bucket, reducer, parts)
            wires.release(pending)

    def _twice(self, bucket: int, reducer: int, parts: dict[Node, Tensor]) -> tuple[int, int]:
        task, (lo, hi) = self._now(), self.ranges[bucket][reducer]
        gathered = self.out[bucket][lo:hi]
        again = torch.empty_like(gathered)
        reduce_slice(parts, self._schedule, (0, task.num_leaves), task.scale, again)
        if task.on_reduced is not None:
            task.on_reduced(bucket, again)
        layout = self.layout.buckets[bucket]
        return print_of_slice(layout, gathered, lo), print_of_slice(layout, again, lo)

    # --- hand-over -----------------------------------------------------------------------------------------------
    def give(self, step: int, meta: bytes, to: Sequence[str]) -> None:
        """Send the step's outcome to each member that is behind."""
        for name in to:
            self.mesh.send(name, Hand(step, meta))
            for bucket, flat in enumerate(self.out):
                self._handed(self._ends().send(flat, self.members.index(name), bucket), Phase.HAND_OVER_SEND)

    def take(self, step: int, donor: str) -> bytes:
        """Receive a step's outcome into `out`; returns its meta."""
        message = self.mesh.collect(Hand, step, 0, Phase.HAND_OVER_RECEIVE, [donor])[donor]
        for bucket, flat in enumerate(self.out):
            buffer = torch.empty_like(flat)
            self._handed(self._ends().receive(buffer, self.members.index(donor), bucket), Phase.HAND_OVER_RECEIVE)
            flat.copy_(buffer)
        return bytes(message.meta)

    def _handed(self, pending: Pending, phase: Phase) -> None:
        self.mesh.until(pending.done.is_set, self.mesh.peers, phase)
        pending.result()

    def _ends(self) -> Points | Collectives:
        assert self._wires is not None
        return self._wires

    def close(self) -> None:
        """Drop the group, and with it every buffer that it may still write: the outcome gets others in their place."""
        wires, self._wires = self._wires, None
        for bucket, pending in self._gathering.items():
            if not pending.complete:
                self.out[bucket] = torch.empty_like(self.out[bucket])
        self._scattering, self._gathering = [], {}
        if wires is not None:
            wires.close()

    def _now(self) -> ExchangeTask:
        assert self._task is not None
        return self._task
