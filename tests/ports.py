"""Ports of loopback for what a test starts itself, a while after they were chosen."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_LOWEST, _FEWEST = 10_000, 5_000


def free_ports(count: int) -> list[int]:
    """So many that nobody listens at. They are below those that the kernel deals out, where there is room: of these one
    is soon somebody's end of a connection, while a server that is to have it still starts."""
    dealt = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    among = range(_LOWEST, dealt) if dealt >= _LOWEST + _FEWEST else [0]
    draw, held = random.SystemRandom(), list[socket.socket]()  # other tests, at the same time, draw others
    with contextlib.ExitStack() as stack:
        while len(held) < count:
            with contextlib.suppress(OSError):
                held.append(stack.enter_context(socket.create_server(("127.0.0.1", draw.choice(among)))))
        return [int(sock.getsockname()[1]) for sock in held]
