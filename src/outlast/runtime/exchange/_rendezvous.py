"""How members of a c10d group on processors find each other: over the mesh's proved connections, without a server.

torch's own store listens on a port, believes everybody who reaches it, and takes seconds to get over bytes that are no
message. Gloo asks a store for little (set, get, wait), while a group is made. It also listens on a port itself, for
whoever knows a small number; nobody has to reach that any more once the group is made, so the kernel is told to drop
what comes for it (`shut`). NCCL keeps torch's store: its own threads speak to it at times that nobody here knows.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

from outlast.runtime.transport.mesh import Mesh
from outlast.runtime.transport.peer_messages import Key

__all__ = ["LOOPBACK", "ViewStore", "shut"]

LOOPBACK = "127.0.0.1"
_SO_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # the kernel's packet filter: return 0, that is, keep nothing of it


class ViewStore(Store):
    """The keys of one view. torch calls it on the thread that makes the group; `exchange` is the training thread's."""

    def __init__(self, mesh: Mesh, timeout_s: float) -> None:
        super().__init__()
        self._mesh, self._timeout_s = mesh, timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._to_say: deque[Key] = deque()
        self._over = False

    def exchange(self) -> None:
        """Send what torch has set, and take in what peers have."""
        while self._to_say:
            self._mesh.broadcast(self._to_say.popleft())
        with self._changed:
            while self._mesh.keys:
                key = self._mesh.keys.pop()
                self._values[key.name] = key.value
            self._changed.notify_all()

    def give_up(self) -> None:
        """The view is over: nobody waits for keys any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @property
    def said(self) -> list[bytes]:
        """All values, mine among them."""
        return list(self._values.values())

    # --- what torch calls ----------------------------------------------------------------------------------------
    def set(self, key: str, value: bytes | str) -> None:
        body = value if isinstance(value, bytes) else value.encode()
        with self._changed:
            self._values[key] = body
        self._to_say.append(Key(key, body))
        os.eventfd_write(self._mesh.wake_fd, 1)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        allowed_s = self._timeout_s if timeout is None else timeout.total_seconds()
        with self._changed:
            there = self._changed.wait_for(lambda: self._over or self.check(keys), allowed_s)
        if self._over or not there:
            raise RuntimeError("the group's members did not all come")

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def clone(self) -> ViewStore:
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()


def shut(said: Sequence[bytes]) -> int:
    """Let nobody reach this process's sockets whose addresses were told in these values; how many there are."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    found += _shut(sock, said)
    return found


def _shut(sock: socket.socket, said: Sequence[bytes]) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or not sock.getsockopt(
        socket.SOL_SOCKET, socket.SO_ACCEPTCONN
    ):
        return False
    host, port = sock.getsockname()[:2]
    flow = bytes(4 if sock.family == socket.AF_INET6 else 0)
    number = socket.inet_pton(sock.family, host.partition("%")[0])
    told = struct.pack("=H", sock.family) + port.to_bytes(2, "big") + flow + number
    if not any(told in value for value in said):
        return False
    program = ctypes.create_string_buffer(_DROP)
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
    return True
