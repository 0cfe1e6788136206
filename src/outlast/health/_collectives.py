"""Collectives whose answers are known: three ranks in this process, through Gloo and the loopback interface.

What they ask is the way of a gradient besides the kernels: from the device to the host, through sockets and the host's
reduction, and back. Inputs are small whole numbers, so every order of summation gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outlast.health._kernels import Case

__all__ = ["Unanswered", "collectives"]

_RANKS = 3
_TYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}
_WAIT_S = 20.0
_c10d: Any = dist  # what makes a group without a process of its own is there, and not declared


class Unanswered(Exception):
    """A collective came to no end: that says nothing of the device's arithmetic."""


def collectives(device: torch.device, size: int = 256, seed: int = 0) -> Iterator[Case]:
    """Questions to a device of this host; none without Gloo in torch, or with no loopback interface."""
    if not (dist.is_available() and dist.is_gloo_available()):
        return
    store = _c10d.HashStore()
    try:
        with ThreadPoolExecutor(_RANKS) as pool:  # each waits for the others
            groups = list(pool.map(lambda rank: _join(store, rank), range(_RANKS)))
    except RuntimeError:
        return
    draw = torch.Generator().manual_seed(seed)
    for name, dtype in _TYPES.items():
        rows = torch.randint(-2, 3, (_RANKS, _RANKS * size), generator=draw).to(dtype)
        yield from _of(groups, name, rows, rows.to(device))


def _join(store: Any, rank: int) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=_WAIT_S)
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return _c10d.ProcessGroupGloo(store, rank, _RANKS, options)


def _of(groups: Sequence[Any], name: str, rows: Tensor, here: Tensor) -> Iterator[Case]:
    """`rows` (ranks, ranks x size): what each rank has; `here`: the same on the device."""
    operations, total = float(rows.numel()), rows.sum(0)
    parts = rows.reshape(_RANKS, _RANKS, -1)

    def all_reduce() -> Tensor:
        out = here.clone()
        return _done([group.allreduce([row], dist.AllreduceOptions()) for group, row in _each(groups, out)], out)

    def broadcast() -> Tensor:
        out = here.clone()
        return _done([group.broadcast([row], dist.BroadcastOptions()) for group, row in _each(groups, out)], out)

    def all_gather() -> Tensor:
        out = here.new_empty(_RANKS, *here.shape)
        return _done(
            [group.allgather([list(mine)], [row]) for group, mine, row in zip(groups, out, here, strict=True)], out
        )

    def reduce_scatter() -> Tensor:
        out = torch.empty_like(here[:, : here.shape[1] // _RANKS])
        pieces = [list(row) for row in here.reshape(_RANKS, _RANKS, -1)]
        each = zip(groups, out, pieces, strict=True)
        return _done([group.reduce_scatter([mine], [piece]) for group, mine, piece in each], out)

    def all_to_all() -> Tensor:
        out = torch.empty_like(here)
        each = zip(groups, out, here, strict=True)
        return _done([group.alltoall_base(mine, row, [], []) for group, mine, row in each], out)

    known: list[tuple[str, Callable[[], Tensor], Tensor]] = [
        ("all-reduce", all_reduce, total.expand(_RANKS, -1)),
        ("broadcast", broadcast, rows[:1].expand(_RANKS, -1)),
        ("all-gather", all_gather, rows.expand(_RANKS, -1, -1)),
        ("reduce-scatter", reduce_scatter, total.reshape(_RANKS, -1)),
        ("all-to-all", all_to_all, parts.transpose(0, 1).reshape(_RANKS, -1)),
    ]
    for title, compute, expected in known:
        yield Case(f"{title} {name}", compute, operations, expected.contiguous())


def _each(groups: Sequence[Any], rows: Tensor) -> Iterator[tuple[Any, Tensor]]:
    return zip(groups, rows, strict=True)


def _done(works: Sequence[Any], out: Tensor) -> Tensor:
    for work in works:
        try:
            work.wait()
        except RuntimeError as error:
            raise Unanswered(str(error).partition("\n")[0]) from error
    return out
