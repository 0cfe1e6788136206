"""A stranger: somebody on this host without a run's secret, who speaks to every socket on which the run listens.

Role: the fuzzer of tests and campaigns. It knows what anybody may see (the kernel's lists of sockets) and what a
recording of another connection would give it: a greeting that was genuine once. It sends junk, silence, floods, half
greetings, announcements of more than there is, replays and descriptors, in an order that its seed fixes, until it is
told to stop. It must never be able to do more than be counted.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from outlast.runtime.transport.frames import COORDINATOR
from outlast.runtime.transport.handshake import Caller, PeerClaim

__all__ = ["StrangersDoor", "Stranger", "doors"]

_HELD = 300  # connections that it keeps open and says nothing more on


class StrangersDoor(NamedTuple):
    """A listening socket: an abstract unix address, or a port of the loopback interface. `name`: whose."""

    address: str | int
    name: str


class _Seen(NamedTuple):
    """What the environment of a run's processes says."""

    run: str
    port: int
    secret: bytes


def doors(run_dir: Path) -> list[StrangersDoor]:
    """Where the run listens now: the coordinator's port, and each member's socket."""
    seen = _look(run_dir)
    return _doors(seen) if seen is not None else []


def _doors(seen: _Seen) -> list[StrangersDoor]:
    prefix = f"@outlast/{seen.run}/"
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if prefix in line]
    own = dict.fromkeys(name for name in names if name.startswith(prefix))
    return [StrangersDoor(seen.port, COORDINATOR), *(StrangersDoor(name[1:], name.split("/")[2]) for name in own)]


def _look(run_dir: Path) -> _Seen | None:
    wanted = f"OUTLAST_RUN_DIR={run_dir.resolve()}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            rows = (entry / "environ").read_bytes().split(b"\0")
            if wanted in rows:
                found = dict(row.decode(errors="replace").partition("=")[::2] for row in rows)
                port = int(found["OUTLAST_COORDINATOR"].rpartition(":")[2])
                return _Seen(found["OUTLAST_RUN"], port, bytes.fromhex(found["OUTLAST_SECRET"]))
    return None


class Stranger:
    """Knocks at a run's sockets without belonging to it. `with Stranger(run_dir, seed) as stranger: …`; `counts` says
    what it has done, `reached` to whom, `sent_bytes` how much the other ends took. `pause_s`: the mean time between two
    attacks."""

    def __init__(self, run_dir: Path, seed: int, *, pause_s: float = 0.005) -> None:
        self.counts: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()
        self.sent_bytes = 0
        self._run_dir, self._pause_s, self._rng = run_dir, pause_s, random.Random(seed)
        self._seen: _Seen | None = None
        self._held: deque[socket.socket] = deque()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stranger", daemon=True)
        self._ways: list[Callable[[socket.socket, StrangersDoor], None]] = [
            self.junk, self.few_bytes, self.silence, self.half, self.oversize, self.another_secret, self.replay,
            self.descriptors, self.blast,
        ]  # fmt: skip

    def __enter__(self) -> Stranger:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Hang up everywhere."""
        self._over.set()
        self._thread.join()
        while self._held:
            self._held.popleft().close()

    def _run(self) -> None:
        while not self._over.wait(self._rng.expovariate(1.0 / self._pause_s)):
            self._seen = self._seen or _look(self._run_dir)
            for door in _doors(self._seen) if self._seen is not None else ():
                self._visit(door)

    def _visit(self, door: StrangersDoor) -> None:
        flood = self._rng.random() < 0.02
        self.counts["flood"] += flood
        for _ in range(200 if flood else 1):
            way = self.silence if flood else self._rng.choice(self._ways)
            sock = socket.socket(socket.AF_INET if isinstance(door.address, int) else socket.AF_UNIX)
            sock.settimeout(0.2)
            try:
                sock.connect(("127.0.0.1", door.address) if isinstance(door.address, int) else "\0" + door.address)
                self.reached[door.name] += 1
                self.counts[way.__name__] += 1
                way(sock, door)
            except OSError:  # it hung up, or is gone
                pass
            self._hold(sock)

    def _hold(self, sock: socket.socket) -> None:
        """Most connections are left open: whoever is spoken to has to end them."""
        if self._rng.random() < 0.3:
            sock.close()
            return
        self._held.append(sock)
        while len(self._held) > _HELD:
            self._held.popleft().close()

    def _send(self, sock: socket.socket, data: bytes) -> None:
        self.sent_bytes += sock.send(data)

    # --- what it does --------------------------------------------------------------------------------------------
    def junk(self, sock: socket.socket, _: StrangersDoor) -> None:
        self._send(sock, self._rng.randbytes(self._rng.choice([1, 7, 50, 4096, 70_000])))

    def few_bytes(self, sock: socket.socket, _: StrangersDoor) -> None:
        """A frame of one byte that is no message."""
        self._send(sock, b"\0\0\0\1\xc1")

    def silence(self, sock: socket.socket, _: StrangersDoor) -> None:
        pass

    def half(self, sock: socket.socket, door: StrangersDoor) -> None:
        knock = Caller(secrets.token_bytes(32), door.name, self._claim()).knock
        self._send(sock, knock[: self._rng.randrange(len(knock))])

    def oversize(self, sock: socket.socket, _: StrangersDoor) -> None:
        self._send(
            sock, self._rng.choice([b"outlast3" + bytes(16) + b"\xff\xff", b"\xff" * 12, b"\x7f" + b"\xff" * 11])
        )

    def another_secret(self, sock: socket.socket, door: StrangersDoor) -> None:
        caller = Caller(secrets.token_bytes(32), door.name, self._claim())
        self._send(sock, caller.knock + secrets.token_bytes(32))

    def replay(self, sock: socket.socket, door: StrangersDoor) -> None:
        """A greeting that was genuine once, and the proof that went with it then."""
        assert self._seen is not None
        self._send(sock, Caller(self._seen.secret, door.name, self._claim()).knock)
        sock.recv(56)
        self._send(sock, secrets.token_bytes(32))

    def descriptors(self, sock: socket.socket, door: StrangersDoor) -> None:
        if isinstance(door.address, str):
            fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(self._rng.choice([1, 4, 200]))]
            try:
                socket.send_fds(sock, [self._rng.choice([b"outlast3", b"\0\0\0\1\xc1"])], fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def blast(self, sock: socket.socket, _: StrangersDoor) -> None:
        """As much as the other end takes."""
        data = self._rng.choice([b"outlast3", b"\x7f\xff\xff\xff"]) + bytes(1 << 20)
        while self._rng.random() < 0.75:
            self._send(sock, data)

    def _claim(self) -> PeerClaim:
        return self._rng.choice(
            [PeerClaim("mesh", "r0.1", (1, 2)), PeerClaim("feed", "r1.1", (1, 2)), PeerClaim("agent", "a0")]
        )
