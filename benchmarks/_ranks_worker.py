"""One rank of a sharded GPT, under outlast or as plain FSDP2 in HSDP; says when each step was committed.

It trains as far as its turn goes: the number of steps in a file that all ranks of the fleet read. So two fleets can be
up at once, and run in turn.
"""

from __future__ import annotations

import argparse
import mmap
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from outlast.examples.data import HelpText
from outlast.examples.models import GPT, next_byte_loss

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, MICROBATCHES, CLIP = 32, 8, 1.0
_LOOK_S = 0.01  # only before a block: its first step is not counted


class Turn:
    """See the module. `path`: eight bytes, the steps that may be done."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)

    def await_step(self, step: int) -> None:
        """Until this step may be done."""
        while int.from_bytes(self._map[:8], "little") <= step:
            time.sleep(_LOOK_S)


def shard(model: Any, mesh: Any) -> Any:
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def under_outlast(args: argparse.Namespace, turn: Turn, said: Callable[[int], None]) -> None:
    import outlast

    run = outlast.join()
    torch.manual_seed(args.seed)
    model = GPT(width=args.width)
    optimizer = shard(model, run.mesh())
    training = run.protect(
        model, optimizer, HelpText(), clip_norm=CLIP, global_batch_size=BATCH, microbatches=MICROBATCHES,
        seed=args.seed, drop_last=True,
    )  # fmt: skip
    for step in training.steps(until=args.steps):
        turn.await_step(step.number)
        for batch in step:
            step.backward(next_byte_loss(model, batch))
        said(step.number)


def plain(args: argparse.Namespace, turn: Turn, said: Callable[[int], None], *, each: bool) -> None:
    """HSDP: the ranks of a replica share its parameters, replicas their gradients. `each`: reduced over the ranks after
    each microbatch, as outlast does; else once a step, which no death may interrupt."""
    replicas, ranks = args.shape
    store = dist.FileStore(str(args.store), replicas * ranks)  # type: ignore[attr-defined]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=store, rank=args.rank, world_size=replicas * ranks)
    torch.manual_seed(args.seed)
    model = GPT(width=args.width)
    optimizer = shard(model, init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("replicate", "shard")))
    data, size = HelpText(), BATCH // MICROBATCHES
    sharded: Any = model  # FSDPModule, as `shard` leaves it
    share = MICROBATCHES // (replicas * ranks)
    for step in range(args.steps):
        turn.await_step(step)
        for index in range(share):
            last = index == share - 1
            sharded.set_requires_gradient_sync(each or last)
            sharded.set_requires_all_reduce(last)
            first = (step * BATCH + (args.rank * share + index) * size) % (len(data) - size)
            loss = next_byte_loss(model, torch.stack([data[first + i] for i in range(size)])) / share
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        said(step)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=["outlast", "hsdp", "hsdp-once"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--turn", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--shape", type=int, nargs=2, default=(2, 2))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with (args.out / f"{os.getpid()}").open("w", buffering=1) as file:

        def said(step: int) -> None:
            file.write(f"{step} {time.monotonic()}\n")

        turn = Turn(args.turn)
        if args.system == "outlast":
            under_outlast(args, turn, said)
        else:
            plain(args, turn, said, each=args.system == "hsdp")


if __name__ == "__main__":
    main()
