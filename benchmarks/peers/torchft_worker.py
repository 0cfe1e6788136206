"""torchft 0.2.0: one replica group of one rank. --wrapper ddp uses its DDP, allreduce calls manager.allreduce itself.

The settings are the ones that recover fastest without failing: a synchronous start is not needed (every replica is
initialised from the same seed), and the group's timeout is the command line's, not the default of 60 s.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from benchmarks._probe import Probe
from benchmarks._workload import MODELS, build, loss_of, microbatch, samples, share
from benchmarks.peers import ddp


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    probe = Probe(args.rank)
    model, plain = build(args.model, args.seed)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=args.timeout_s)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout), min_replica_size=args.min_replicas, timeout=timeout,
        load_state_dict=lambda state: load(state, model, plain),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        replica_id=f"bench_{args.rank}", lighthouse_addr=args.lighthouse, rank=0, world_size=1, hostname="127.0.0.1",
        store_addr="127.0.0.1", store_port=store.port, init_sync=False,
    )  # fmt: skip
    optimizer = Optimizer(manager, plain)
    wrapped = DistributedDataParallel(manager, model) if args.wrapper == "ddp" else model
    dataset = samples(args.model)
    while manager.current_step() < args.steps:
        step = manager.current_step()
        optimizer.zero_grad()
        backward(wrapped, dataset, args, step, probe)
        if args.wrapper == "allreduce":
            average(manager, model)
        optimizer.step()
        if manager.current_step() > step:
            probe.commit(step)


def parse() -> Any:
    parser = ddp.parser(__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--min-replicas", type=int, default=2)
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--wrapper", choices=("ddp", "allreduce"), required=True)
    return parser.parse_args()


def load(state: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def backward(model: torch.nn.Module, dataset: Any, args: Any, step: int, probe: Probe) -> None:
    """This replica's share by its fixed rank: torchft tells the rank in the quorum only after it has formed."""
    mine = share(args.rank, args.world, args.microbatches)
    for number in mine:
        quiet = isinstance(model, DistributedDataParallel) and number != mine[-1]
        with probe.computing(), model.no_sync() if quiet else contextlib.nullcontext():  # type: ignore[operator]
            data = microbatch(dataset, MODELS[args.model].samples, step * args.microbatches + number)
            (loss_of(model, data) / len(mine)).backward()


def average(manager: Manager, model: torch.nn.Module) -> None:
    """One all-reduce over all gradients in one flat buffer: the cheapest way to call it."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


if __name__ == "__main__":
    main()
