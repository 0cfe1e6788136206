"""Who saves and loads a state in `benchmarks.checkpoint`: outlast, its peers, and the bare machine.

Each has save() -> what was measured, in seconds by name; load() -> seconds; close(). Some have alone(), a save with
nothing beside it, and hidden(), one inside a long step.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import math
import mmap
import os
import pathlib
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["MAKERS", "Result", "gpt_state", "leaves"]

GIB = 1 << 30
Result = dict[str, float]


def gpt_state(gib: float, seed: int = 0) -> dict[str, Any]:
    """100 parameters of 16 layers, each with two fp32 moments: 300 tensors, 10 bytes a parameter."""
    generator = torch.Generator().manual_seed(seed)
    params = gib * GIB / 10
    width = int(math.sqrt(params / (16 * 12.2)) // 64 * 64)
    shapes = [(4 * width, width), (width, 4 * width), (3 * width, width), (width, width), (width,), (width,)]
    names = {f"h.{i}.{k}": shape for i in range(16) for k, shape in enumerate(shapes)}
    rest = int(params - sum(math.prod(s) for s in names.values())) // width // 4
    names |= {f"embed.{k}": (max(1, rest), width) for k in range(4)}
    make = {k: torch.randn(s, generator=generator) for k, s in names.items()}
    return {
        "model": {k: t.bfloat16() for k, t in make.items()},
        "optim": {k: {"exp_avg": t * 0.1, "exp_avg_sq": t * t} for k, t in make.items()},
    }


def leaves(tree: Any) -> Iterator[torch.Tensor]:
    for value in tree.values():
        yield from leaves(value) if isinstance(value, dict) else [value]


def flat(tree: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def sync_tree(path: pathlib.Path) -> None:
    """What a caller must do who wants the peer's files to survive a power cut."""
    for directory, _, files in os.walk(path):
        for name in [*files, "."]:
            fd = os.open(os.path.join(directory, name), os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def step_gaps(done: Callable[[], bool], window_s: float = 30.0) -> tuple[float, float]:
    """(largest, median) seconds of short steps of a training loop, run until `done`."""
    a, b = torch.randn(128, 256), torch.randn(256, 256)
    steps = []
    began = last = time.perf_counter()
    while not done() and last - began < window_s:
        torch.tanh(a @ b).sum().item()
        now = time.perf_counter()
        steps.append(now - last)
        last = now
    return (max(steps), statistics.median(steps)) if steps else (0.0, 0.0)


def beside_loop(work: Callable[[], float]) -> tuple[float, float]:
    """(what `work` returned, largest gap): `work` in a thread while a loop of short steps runs in this one."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pending = pool.submit(work)
        gap, _ = step_gaps(pending.done)
        return pending.result(), gap


class Outlast:
    def __init__(self, state: Any, where: pathlib.Path) -> None:
        from outlast.checkpoint import CheckpointEngine, Retention

        self.state, self.where = state, where
        self.engine = CheckpointEngine(str(where), retention=Retention(keep_last=1), incremental=False)
        self.engine.prepare(state)
        for step in range(3):  # fills both slots and the spare files
            handle = self.engine.save(step, state)
            assert handle is not None
            self.engine.commit(handle)
        self.step = 3

    def _begin(self) -> Any:
        self.step += 1
        handle = self.engine.save(self.step, self.state)
        assert handle is not None
        return handle

    def save(self) -> Result:
        """Blocked: the optimizer waits at once, nothing hides the copy. Durable: beside a training loop."""
        began = time.perf_counter()
        handle = self._begin()
        handle.wait_copied()
        blocked = time.perf_counter() - began
        gap, median = step_gaps(handle.durable.done)
        handle.durable.result()
        self.engine.commit(handle)
        return {"blocked_s": blocked, "durable_s": handle.durable_s, "gap_s": gap, "median_step_s": median}

    def alone(self) -> Result:
        """The trainer waits until the save is durable: nothing competes with the writing."""
        handle = self._begin()
        handle.wait_copied()
        handle.durable.result()
        self.engine.commit(handle)
        return {"durable_alone_s": handle.durable_s}

    def hidden(self) -> Result:
        """A step whose forward and backward are long enough to hide the copy: what does the save add to it?"""
        x = torch.randn(768, 768)

        def work(seconds: float) -> int:
            count, end = 0, time.perf_counter() + seconds
            while time.perf_counter() < end:
                x @ x
                count += 1
            return count

        work(0.1)
        rate = work(0.4)
        began = time.perf_counter()
        handle = self._begin()
        called = time.perf_counter() - began
        beside = work(0.4)
        began = time.perf_counter()
        handle.wait_copied()
        waited = time.perf_counter() - began
        handle.durable.result()
        self.engine.commit(handle)
        slowed = 0.4 * (rate - beside) / rate
        return {"call_s": called, "wait_s": waited, "added_s": called + waited, "slowed_compute_s": max(0.0, slowed)}

    def load(self) -> float:
        target = {"model": {k: torch.empty_like(v).fill_(0) for k, v in self.state["model"].items()},
                  "optim": {k: {n: torch.empty_like(t).fill_(0) for n, t in v.items()}
                            for k, v in self.state["optim"].items()}}  # fmt: skip
        began = time.perf_counter()
        loaded = self.engine.load(into=target)
        seconds = time.perf_counter() - began
        assert loaded is not None
        assert all(torch.equal(a, b) for a, b in zip(leaves(target), leaves(self.state), strict=True))
        return seconds

    def close(self) -> None:
        self.engine.close()


class TorchSave:
    def __init__(self, state: Any, where: pathlib.Path) -> None:
        self.state, self.where = state, where
        where.mkdir()

    def save(self) -> Result:
        began = time.perf_counter()
        self._write(self.where / "new")
        sync_tree(self.where)
        os.rename(self.where / "new", self.where / "state")
        seconds = time.perf_counter() - began
        return {"blocked_s": seconds, "durable_alone_s": seconds}

    def _write(self, path: pathlib.Path) -> None:
        torch.save(self.state, path)

    def load(self) -> float:
        began = time.perf_counter()
        found = torch.load(self.where / "state", weights_only=True)
        for a, b in zip(leaves(self.state), leaves(found), strict=True):
            a.copy_(b)
        return time.perf_counter() - began

    def close(self) -> None:
        pass


class Safetensors(TorchSave):
    def _write(self, path: pathlib.Path) -> None:
        from safetensors.torch import save_file

        save_file(flat(self.state), path)

    def load(self) -> float:
        from safetensors.torch import load_file

        began = time.perf_counter()
        found = load_file(self.where / "state")
        for name, tensor in flat(self.state).items():
            tensor.copy_(found[name])
        return time.perf_counter() - began


def waited(
    done: Callable[[], bool], wait: Callable[[], object], path: pathlib.Path, began: float, blocked: float
) -> Result:
    """The end of a save beside the loop of steps: durable once synced. Older generations are removed."""
    gap, median = step_gaps(done)
    wait()
    sync_tree(path)
    durable = time.perf_counter() - began
    for old in path.parent.glob("g*"):
        if old != path:
            shutil.rmtree(old, ignore_errors=True)
    return {"blocked_s": blocked, "durable_s": durable, "gap_s": gap, "median_step_s": median}


class Dcp:
    """`kind`: thread (the default), kept (one stager kept over saves), process."""

    def __init__(self, state: Any, where: pathlib.Path, kind: str) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.state, self.where, self.kind, self.count = state, where, kind, 0
        where.mkdir()
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        self.stager = DefaultStager(options) if kind == "kept" else None
        if not torch.distributed.is_initialized():  # the process variant asks for a group; the others may have it
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", "0")
            torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())

    def save(self) -> Result:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        path = self.where / f"g{self.count}"
        self.count += 1
        kind = AsyncCheckpointerType.PROCESS if self.kind == "process" else AsyncCheckpointerType.THREAD
        more: dict[str, Any] = {"async_stager": self.stager} if self.stager is not None else {}
        began = time.perf_counter()
        pending: Any = dcp.async_save(self.state, checkpoint_id=path, async_checkpointer_type=kind, **more)
        blocked = time.perf_counter() - began
        if hasattr(pending, "upload_completion"):
            pending.staging_completion.result()
            blocked = time.perf_counter() - began
            pending = pending.upload_completion
        return waited(pending.done, pending.result, path, began, blocked)

    def load(self) -> float:
        import torch.distributed.checkpoint as dcp

        began = time.perf_counter()
        dcp.load(self.state, checkpoint_id=self.where / f"g{self.count - 1}")
        return time.perf_counter() - began

    def close(self) -> None:
        pass


class TorchSnapshot:
    def __init__(self, state: Any, where: pathlib.Path) -> None:
        from torchsnapshot import StateDict

        self.app, self.where, self.count = {"state": StateDict(**state)}, where, 0
        where.mkdir()

    def save(self) -> Result:
        from torchsnapshot import Snapshot

        path = self.where / f"g{self.count}"
        self.count += 1
        began = time.perf_counter()
        pending = Snapshot.async_take(str(path), self.app)
        blocked = time.perf_counter() - began
        return waited(pending.done, pending.wait, path, began, blocked)

    def load(self) -> float:
        from torchsnapshot import Snapshot

        began = time.perf_counter()
        Snapshot(str(self.where / f"g{self.count - 1}")).restore(self.app)
        return time.perf_counter() - began

    def close(self) -> None:
        pass


class Limits:
    """What the machine can do with the same bytes: a warm copy, a bare direct write into a recycled file, a read."""

    def __init__(self, state: Any, where: pathlib.Path) -> None:
        where.mkdir()
        self.tensors = list(leaves(state))
        self.size = sum(t.nbytes for t in self.tensors)
        self.area = mmap.mmap(-1, -(-self.size // (2 << 20)) * (2 << 20))
        self.area.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.area))
        ctypes.memset(self.address, 1, len(self.area))
        self.path = where / "recycled"
        self._write()

    def _copy(self) -> float:
        began, at = time.perf_counter(), self.address
        for tensor in self.tensors:
            ctypes.memmove(at, tensor.data_ptr(), tensor.nbytes)
            at += tensor.nbytes
        return time.perf_counter() - began

    def _transfer(self, call: Callable[[int, int], object], block: int, in_flight: int) -> None:
        """`call(low, high)` for every block; a plain loop where one is in flight."""
        cuts = [(at, min(at + block, len(self.area))) for at in range(0, len(self.area), block)]
        if in_flight == 1:
            for low, high in cuts:
                call(low, high)
            return
        with concurrent.futures.ThreadPoolExecutor(in_flight) as pool:
            list(pool.map(lambda cut: call(*cut), cuts))

    def _write(self, in_flight: int = 1) -> float:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        view = memoryview(self.area)
        began = time.perf_counter()
        self._transfer(lambda low, high: os.pwrite(fd, view[low:high], low), 32 << 20, in_flight)
        os.fsync(fd)
        seconds = time.perf_counter() - began
        os.close(fd)
        return seconds

    def save(self) -> Result:
        # The second copy: the first also brings the source's pages back into reach.
        self._copy()
        copied, written, deep = self._copy(), self._write(), self._write(in_flight=2)
        beside, gap = beside_loop(self._write)
        undisturbed, _ = step_gaps(lambda: False, window_s=beside)
        return {
            "memcpy_s": copied, "write_s": written, "write_deep_s": deep, "write_beside_s": beside,
            "write_gap_s": gap, "undisturbed_gap_s": undisturbed, "load_deep_s": self._read(in_flight=4),
        }  # fmt: skip

    def load(self) -> float:
        return self._read()

    def _read(self, in_flight: int = 1) -> float:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        view = memoryview(self.area)
        began = time.perf_counter()
        self._transfer(lambda low, high: os.preadv(fd, [view[low:high]], low), 4 << 20, in_flight)
        seconds = time.perf_counter() - began
        os.close(fd)
        return seconds

    def close(self) -> None:
        pass


MAKERS: dict[str, Callable[[Any, pathlib.Path], Any]] = {
    "limits": Limits,
    "outlast": Outlast,
    "dcp-default": lambda s, p: Dcp(s, p, "thread"),
    "dcp-kept": lambda s, p: Dcp(s, p, "kept"),
    "dcp-process": lambda s, p: Dcp(s, p, "process"),
    "torchsnapshot": TorchSnapshot,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
}
