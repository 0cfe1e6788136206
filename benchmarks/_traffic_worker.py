"""The benchmark's MLP under outlast; after each step, what this process's sockets have sent so far, to a file."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

import torch

import outlast
from benchmarks._workload import MODELS, build, loss_of, samples

_INFO_BYTES, _SENT_AT = 216, 200  # of struct tcp_info, linux/tcp.h: tcpi_bytes_sent; since Linux 4.19


def over_tcp() -> int:
    """Bytes of payload that the kernel has sent through this process's TCP sockets, again where they were lost."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, struct.error):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as mine:
                    if mine.family in {socket.AF_INET, socket.AF_INET6} and mine.type == socket.SOCK_STREAM:
                        info = mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
                        total += struct.unpack_from("Q", info, _SENT_AT)[0]
    return total


def count_local() -> list[int]:
    """What is written to Unix sockets from now on: the kernel keeps no count of these."""
    sent, send = [0], socket.socket.send

    def counted(self: socket.socket, data: Any, *flags: int) -> int:
        num = send(self, data, *flags)
        if self.family == socket.AF_UNIX:
            sent[0] += num
        return num

    socket.socket.send = counted  # type: ignore[method-assign, assignment]
    return sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="3.2M")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-reducers", type=float, default=0.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    local = count_local()
    run = outlast.join()
    model, optimizer = build(args.model, args.seed)
    more = {"check_reducers": args.check_reducers} if args.check_reducers else {}
    training = run.protect(
        model, optimizer, samples(args.model), global_batch_size=MODELS[args.model].samples * args.microbatches,
        microbatches=args.microbatches, seed=args.seed, **more,
    )  # fmt: skip
    with (args.out / f"{os.getpid()}.jsonl").open("w") as out:
        for step in training.steps(until=args.steps):
            for batch in step:
                step.backward(loss_of(model, batch))
            out.write(json.dumps({"step": step.number, "tcp": over_tcp(), "local": local[0]}) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
