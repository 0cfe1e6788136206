"""The exchange over torch.distributed: Gloo on CPUs, NCCL on GPUs (the latter has not been run on a GPU yet).

The same steps as through shared memory: all-to-all of slices, reduce, all-gather; one group a view, under its own store
prefix, with the store of the view's first member. The training thread never waits inside a collective: it waits on the
mesh, which also hears deaths and notices. What an abandoned collective may still write is kept alive until its group is
gone (protocol, 14). Bytes: (1+k)/2 of ring all-reduce's for k partial sums a member.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    AllToAllOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from outlast.core.phases import Phase
from outlast.core.protocol import Node, schedule
from outlast.errors import ViewAbandoned
from outlast.runtime._environment import Environment
from outlast.runtime._gradients import OUTCOME, Memory
from outlast.runtime._mesh import Hand, Mesh, Ready
from outlast.runtime._plane import Enter, Reduction, Task
from outlast.tensors import BLOCK, Bucket, Layout, block_norms, fingerprint_blocks, reduce_slice

__all__ = ["NetworkPlane", "open_store"]


def open_store() -> tuple[Any, str]:
    """This member's own store, on loopback, and its address: (store, host:port)."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    return store, f"127.0.0.1:{store.port}"


def _even(bucket: Bucket, num_members: int) -> tuple[tuple[int, int], ...]:
    """Slices of one length but for the last ones, so that padded slices, gathered, lie where they belong."""
    longest = -(-bucket.num_blocks // num_members) * BLOCK
    edges = [min(longest * i, bucket.numel) for i in range(num_members + 1)]
    return tuple(itertools.pairwise(edges))


class _Pending:
    """Work under way, and the buffers that it may write."""

    def __init__(self, work: Any, buffer: Tensor, wake_fd: int) -> None:
        self.work, self.buffer = work, buffer
        self.done = threading.Event()
        self._wake_fd = wake_fd
        if buffer.device.type == "cpu":
            work.get_future().add_done_callback(self._finished)
        else:  # a future of NCCL's is done when the kernel is queued, not when it has run
            threading.Thread(target=self._wait, name="outlast-collective", daemon=True).start()

    def _finished(self, _: Any = None) -> None:
        self.done.set()
        os.eventfd_write(self._wake_fd, 1)

    def _wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError:
            pass  # said by result()
        finally:
            self._finished()

    def result(self) -> Tensor:
        """The buffer, complete. ViewAbandoned if the collective failed: some member left or died."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise ViewAbandoned(f"a collective failed: {str(error).splitlines()[0]}") from error
        return self.buffer


class NetworkPlane:
    """See the module. `store`: this member's own (it may be the view's), `address`: the view's."""

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
        self.ranges = [_even(bucket, len(self.members)) for bucket in layout.buckets]
        self._wake_fd = mesh.wake_fd
        self._group: Any = None
        self._scattering: list[_Pending] = []
        self._gathering: list[_Pending] = []
        self._task: Task | None = None
        self._found = Reduction()
        self._form(env, store, address)

    def _form(self, env: Environment, store: Any, address: str) -> None:
        """Build the group on a thread: it blocks until all are there."""
        if len(self.members) == 1:
            return
        ready, trouble = threading.Event(), []

        def build() -> None:
            try:
                self._group = self._make_group(env, store, address)
            except RuntimeError as error:
                trouble.append(error)
            finally:
                ready.set()
                os.eventfd_write(self._wake_fd, 1)

        threading.Thread(target=build, name="outlast-group", daemon=True).start()
        self.mesh.until(ready.is_set, self.mesh.peers, Phase.CONNECT)
        if trouble:
            raise ViewAbandoned(f"the group did not form: {str(trouble[0]).splitlines()[0]}")

    def _make_group(self, env: Environment, own: Any, address: str) -> Any:
        timeout = timedelta(seconds=env.config.group_timeout_s)
        host, _, port = address.rpartition(":")
        store = own
        if self.index != 0:
            store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
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
    def begin(self, task: Task) -> None:
        """A new step."""
        self.mesh.forget(task.step)
        self._task, self._found = task, Reduction(norms={})
        self._scattering, self._gathering = [], []
        self._schedule = list(schedule(tuple(node for nodes in task.nodes for node in nodes), task.num_leaves))

    def offer(self, bucket: int) -> None:
        """Start the bucket's all-to-all; never waits."""
        task = self._now()
        self.enter(Phase.SCATTER, bucket)
        self.mesh.broadcast(Ready(task.step, bucket, task.slots))
        if self._group is None:
            return
        ranges = self.ranges[bucket]
        sums = [self.mine.flats(slot)[bucket] for slot in task.slots]
        lengths = [hi - lo for lo, hi in ranges]
        none = self.mine.flats(OUTCOME)[bucket][:0]  # who holds nothing in the step being recovered sends nothing
        packed = sums[0] if len(sums) == 1 else torch.cat([none, *(s[lo:hi] for lo, hi in ranges for s in sums)])
        mine = lengths[self.index]
        received = packed.new_empty(sum(len(nodes) for nodes in task.nodes) * mine)
        outs = [len(nodes) * mine for nodes in task.nodes]
        work = self._group.alltoall_base(received, packed, outs, [n * len(sums) for n in lengths], AllToAllOptions())
        self._scattering.append(_Pending(work, received, self._wake_fd))

    def finish(self) -> Reduction:
        """Wait, reduce and gather, bucket by bucket. Raises ViewAbandoned when the view ends first."""
        task = self._now()
        for bucket in range(len(self.layout.buckets)):
            self.enter(Phase.SCATTERED, bucket)
            parts = self._own(bucket) if self._group is None else self._received(bucket)
            if bucket == 0:
                task.on_scattered()
            self._reduce(bucket, parts)
        for bucket in range(len(self.layout.buckets)):
            self.enter(Phase.GATHERED, bucket)
            self._gathered(bucket)
        return self._found

    def _wait(self, pending: _Pending, bucket: int, phase: Phase) -> Tensor:
        offered = self.mesh.boxes[Ready, self._now().step, bucket]
        late = [name for name in self.mesh.peers if name not in offered] or self.mesh.peers
        self.mesh.until(pending.done.is_set, late, phase)
        return pending.result()

    def _own(self, bucket: int) -> dict[Node, Tensor]:
        task = self._now()
        return {n: self.mine.flats(s)[bucket] for n, s in zip(task.nodes[0], task.slots, strict=True)}

    def _received(self, bucket: int) -> dict[Node, Tensor]:
        task = self._now()
        data = self._wait(self._scattering[bucket], bucket, Phase.SCATTERED)
        lo, hi = self.ranges[bucket][self.index]
        pieces = iter(torch.split(data, hi - lo)) if hi > lo else None
        nodes = [node for nodes in task.nodes for node in nodes]
        return {node: next(pieces) if pieces is not None else data[:0] for node in nodes}

    def _reduce(self, bucket: int, parts: dict[Node, Tensor]) -> None:
        task = self._now()
        self.enter(Phase.REDUCE, bucket)
        lo, hi = self.ranges[bucket][self.index]
        longest = self.ranges[bucket][0][1]
        whole = self.mine.flats(OUTCOME)[bucket]
        padded = whole.new_zeros(longest)
        target = padded[: hi - lo]
        if hi > lo:
            reduce_slice(parts, self._schedule, (0, task.num_leaves), task.scale, target)
            if task.on_reduced is not None:
                task.on_reduced(bucket, target)
            first = self.layout.buckets[bucket].first_block + lo // BLOCK
            self._found.fingerprint += fingerprint_blocks(target, BLOCK, first)
            if task.with_norms:
                self._found.norms.update(enumerate(block_norms(target), first))
        self.enter(Phase.GATHER, bucket)
        if self._group is None:
            self.out[bucket].copy_(target)
            return
        everything = whole.new_empty(longest * len(self.members))
        work = self._group._allgather_base(everything, padded)
        self._gathering.append(_Pending(work, everything, self._wake_fd))

    def _gathered(self, bucket: int) -> None:
        if self._group is None:
            return
        self._take_out(bucket, self._wait(self._gathering[bucket], bucket, Phase.GATHERED))

    def _take_out(self, bucket: int, everything: Tensor) -> None:
        """A gathered bucket, complete, is the outcome as it lies: the slices are one behind the other."""
        self.out[bucket] = everything[: self.layout.buckets[bucket].numel]

    # --- hand-over -----------------------------------------------------------------------------------------------
    def give(self, step: int, meta: bytes, to: Sequence[str]) -> None:
        """Send the step's outcome to each member that is behind."""
        for name in to:
            self.mesh.send(name, Hand(step, meta))
            for bucket, flat in enumerate(self.out):
                self._await(self._group.send([flat], self.members.index(name), bucket), flat, Phase.HAND_OVER_SEND)

    def take(self, step: int, donor: str) -> bytes:
        """Receive a step's outcome into `out`; returns its meta."""
        message = self.mesh.collect(Hand, step, 0, Phase.HAND_OVER_RECEIVE, [donor])[donor]
        for bucket, flat in enumerate(self.out):
            buffer = torch.empty_like(flat)
            work = self._group.recv([buffer], self.members.index(donor), bucket)
            flat.copy_(self._await(work, buffer, Phase.HAND_OVER_RECEIVE))
        return bytes(message.meta)

    def _await(self, work: Any, buffer: Tensor, phase: Phase) -> Tensor:
        """Point-to-point work has no future: a thread waits for it."""
        done = threading.Event()
        trouble: list[RuntimeError] = []

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                trouble.append(error)
            finally:
                done.set()
                os.eventfd_write(self._wake_fd, 1)

        threading.Thread(target=wait, name="outlast-hand-over", daemon=True).start()
        self.mesh.until(done.is_set, self.mesh.peers, phase)
        if trouble:
            raise ViewAbandoned(f"a hand-over failed: {str(trouble[0]).splitlines()[0]}")
        return buffer

    def close(self) -> None:
        """Drop the group on a thread (its destructor joins threads that may be stuck), its buffers with it."""
        group, self._group = self._group, None
        held: list[Any] = [self._scattering, self._gathering, self._task]
        self._scattering, self._gathering = [], []
        if group is not None:
            # not a daemon: a group that is torn down while the interpreter exits ends the process with an abort
            threading.Thread(target=_drop, args=(group, held), name="outlast-drop").start()

    def _now(self) -> Task:
        assert self._task is not None
        return self._task


def _drop(group: Any, held: list[Any]) -> None:
    abort: Callable[[], None] | None = getattr(group, "abort", None)
    if isinstance(group, getattr(dist, "ProcessGroupNCCL", ())) and abort is not None:
        abort()
    del group
    held.clear()
