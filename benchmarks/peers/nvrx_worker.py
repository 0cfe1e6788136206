"""nvidia-resiliency-ext 0.4.1, in-process restart: the training function is called again in the same process.

Its monitors are set to their shortest sensible periods, and the group's timeout to the command line's. Rank 0 holds
both stores, so its death ends the run: the harness hurts the others. Steps since the last checkpoint are redone.
"""

from __future__ import annotations

import argparse
import datetime
import os
from pathlib import Path

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from torch.nn.parallel import DistributedDataParallel

from benchmarks._probe import Probe
from benchmarks._workload import build, samples, share
from benchmarks.peers import ddp


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(args.port), "RANK": str(args.rank),
        "WORLD_SIZE": str(args.world), "LOCAL_RANK": str(args.rank),
    }  # fmt: skip
    probe, second = Probe(args.rank), datetime.timedelta(seconds=1)
    wrapper = inprocess.Wrapper(
        store_kwargs={"port": args.store_port, "timeout": 60 * second},
        abort=None,
        monitor_thread_interval=0.1 * second, monitor_process_interval=0.1 * second, heartbeat_interval=0.1 * second,
        progress_watchdog_interval=0.1 * second, heartbeat_timeout=5 * second, soft_timeout=args.timeout_s * second,
        hard_timeout=2 * args.timeout_s * second, last_call_wait=0.1 * second, termination_grace_time=0.1 * second,
    )  # fmt: skip
    wrapper(lambda: train(args, probe))()


def train(args: argparse.Namespace, probe: Probe) -> None:
    """One attempt, with the ranks that are left. Called again, from the checkpoint, after each fault."""
    timeout = datetime.timedelta(seconds=args.timeout_s)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", args.port, world, args.rank == 0, timeout, multi_tenant=True)
    attempt = dist.PrefixStore(f"of-{world}", store)
    dist.init_process_group("gloo", store=attempt, rank=rank, world_size=world, timeout=timeout)
    model, optimizer = build(args.model, args.seed)
    first = ddp.load(args.checkpoint, model, optimizer)
    wrapped, dataset = DistributedDataParallel(model), samples(args.model)
    for step in range(first, args.steps):
        ddp.train_step(wrapped, dataset, args, step, share(rank, world, args.microbatches), probe)
        optimizer.step()
        optimizer.zero_grad()
        probe.commit(step)
        if rank == 0 and (step + 1) % args.every == 0:
            ddp.save(args.checkpoint, step + 1, model, optimizer)


def parse() -> argparse.Namespace:
    options = ddp.parser(__doc__)
    options.add_argument("--rank", type=int, required=True)
    options.add_argument("--world", type=int, default=4)
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--store-port", type=int, required=True)
    options.add_argument("--checkpoint", type=Path, required=True)
    options.add_argument("--every", type=int, default=25)
    return options.parse_args()


if __name__ == "__main__":
    main()
