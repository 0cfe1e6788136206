"""Plain restart: N ranks of peers/ddp.py; when one ends badly, kill all and start again, which reads the checkpoint.

What a batch system's requeue does, without the queue. Ends when all ranks end well.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys


def main() -> None:
    num_ranks, options = int(sys.argv[1]), sys.argv[2:]
    while not attempt(num_ranks, options):
        pass


def attempt(num_ranks: int, options: list[str]) -> bool:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    fixed = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks)}
    command = [sys.executable, "-m", "benchmarks.peers.ddp", *options]
    ranks = [subprocess.Popen(command, env={**fixed, "RANK": str(rank)}) for rank in range(num_ranks)]
    left = {process.pid for process in ranks}
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status:
            break
    for process in ranks:
        if process.pid in left:
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)
    return not left


if __name__ == "__main__":
    main()
