"""A stranger: somebody on this host without a run's secret, who speaks to every socket on which the run listens.

Role: the fuzzer of tests and campaigns. It knows what anybody may see (the kernel's lists of sockets) and what a
recording of another connection would give it: a greeting that was genuine once. It sends junk, silence, floods, half
greetings, announcements of more than there is, replays, requests and descriptors, in an order that its seed fixes,
until it is told to stop. It must never be able to do more than be counted, nor be told anything of the run's secret.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

from outlast.prove._listeners import Listening, listeners
from outlast.runtime.transport.handshake import Caller, PeerClaim

__all__ = ["Stranger"]

_HELD = 300  # connections that it keeps open and says nothing more on
_LOOK_S = 0.2  # between two looks at who listens: most listeners live much longer


def _secret_of(run_dir: Path) -> bytes:
    """As the environment of the run's processes has it; empty while there are none."""
    wanted = f"OUTLAST_RUN_DIR={run_dir.resolve()}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            rows = (entry / "environ").read_bytes().split(b"\0")
            if wanted in rows:
                found = dict(row.decode(errors="replace").partition("=")[::2] for row in rows)
                return bytes.fromhex(found["OUTLAST_SECRET"])
    return b""


class Stranger:
    """Knocks at a run's sockets without belonging to it. `with Stranger(run_dir, launcher, seed) as stranger: …`;
    `launcher`: the process whose tree the run is; `pause_s`: the mean time between two attacks.

    `counts` says what it has done, `reached` to whom, `struck` to which kinds of listeners, `sent_bytes` how much the
    other ends took, `longest_reply` the most bytes that each kind has said to one caller, `told_secret` which kinds
    said the secret among them."""

    def __init__(self, run_dir: Path, launcher: int, seed: int, *, pause_s: float = 0.005) -> None:
        self.counts: Counter[str] = Counter()
        self.reached: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self.sent_bytes = 0
        self.longest_reply: dict[str, int] = {}
        self.told_secret: set[str] = set()
        self._run_dir, self._launcher, self._pause_s, self._rng = run_dir, launcher, pause_s, random.Random(seed)
        self._secret = b""
        self._held: deque[tuple[socket.socket, str]] = deque()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stranger", daemon=True)
        self._ways: list[Callable[[socket.socket, Listening], None]] = [
            self.junk, self.few_bytes, self.silence, self.half, self.oversize, self.another_secret, self.replay,
            self.descriptors, self.blast, self.request,
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
            self._hang_up(*self._held.popleft())

    def _run(self) -> None:
        found: list[Listening] = []
        look_s = 0.0
        while not self._over.wait(self._rng.expovariate(1.0 / self._pause_s)):
            self._secret = self._secret or _secret_of(self._run_dir)
            if time.monotonic() >= look_s:
                found = listeners(self._launcher, self._run_dir) if self._secret else []
                look_s = time.monotonic() + _LOOK_S
            for door in found:
                self._visit(door)

    def _visit(self, door: Listening) -> None:
        flood = self._rng.random() < 0.02
        self.counts["flood"] += flood
        for _ in range(200 if flood else 1):
            way = self.silence if flood else self._rng.choice(self._ways)
            sock = socket.socket(door.family)
            sock.settimeout(0.2)
            try:
                sock.connect(door.address)
                self.reached[door.name] += 1
                self.struck[door.kind] += 1
                self.counts[way.__name__] += 1
                way(sock, door)
            except OSError:  # it hung up, or is gone
                pass
            self._hold(sock, door.kind)

    def _hold(self, sock: socket.socket, kind: str) -> None:
        """Most connections are left open: whoever is spoken to has to end them."""
        if self._rng.random() < 0.3:
            self._hang_up(sock, kind)
            return
        self._held.append((sock, kind))
        while len(self._held) > _HELD:
            self._hang_up(*self._held.popleft())

    def _hang_up(self, sock: socket.socket, kind: str) -> None:
        """After a look at what it was told."""
        said = b""
        with sock, contextlib.suppress(OSError):
            sock.setblocking(False)
            while more := sock.recv(1 << 16):
                said += more
        self.longest_reply[kind] = max(len(said), self.longest_reply.get(kind, 0))
        if self._secret and (self._secret in said or self._secret.hex().encode() in said.lower()):
            self.told_secret.add(kind)

    def _send(self, sock: socket.socket, data: bytes) -> None:
        self.sent_bytes += sock.send(data)

    # --- what it does --------------------------------------------------------------------------------------------
    def junk(self, sock: socket.socket, _: Listening) -> None:
        self._send(sock, self._rng.randbytes(self._rng.choice([1, 7, 50, 4096, 70_000])))

    def few_bytes(self, sock: socket.socket, _: Listening) -> None:
        """A frame of one byte that is no message."""
        self._send(sock, b"\0\0\0\1\xc1")

    def silence(self, sock: socket.socket, _: Listening) -> None:
        pass

    def half(self, sock: socket.socket, door: Listening) -> None:
        knock = Caller(secrets.token_bytes(32), door.name, self._claim()).knock
        self._send(sock, knock[: self._rng.randrange(len(knock))])

    def oversize(self, sock: socket.socket, _: Listening) -> None:
        self._send(
            sock, self._rng.choice([b"outlast3" + bytes(16) + b"\xff\xff", b"\xff" * 12, b"\x7f" + b"\xff" * 11])
        )

    def another_secret(self, sock: socket.socket, door: Listening) -> None:
        caller = Caller(secrets.token_bytes(32), door.name, self._claim())
        self._send(sock, caller.knock + secrets.token_bytes(32))

    def replay(self, sock: socket.socket, door: Listening) -> None:
        """A greeting that was genuine once, and the proof that went with it then."""
        self._send(sock, Caller(self._secret, door.name, self._claim()).knock)
        sock.recv(56)
        self._send(sock, secrets.token_bytes(32))

    def descriptors(self, sock: socket.socket, door: Listening) -> None:
        if door.family == socket.AF_UNIX:
            fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(self._rng.choice([1, 4, 200]))]
            try:
                socket.send_fds(sock, [self._rng.choice([b"outlast3", b"\0\0\0\1\xc1"])], fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def blast(self, sock: socket.socket, _: Listening) -> None:
        """As much as the other end takes."""
        data = self._rng.choice([b"outlast3", b"\x7f\xff\xff\xff"]) + bytes(1 << 20)
        while self._rng.random() < 0.75:
            self._send(sock, data)

    def request(self, sock: socket.socket, _: Listening) -> None:
        """A request of HTTP, whole or in part, for what is not there or not for everybody."""
        what = self._rng.choice(
            [b"GET /", b"GET /ready", b"GET /../../etc/passwd", b"POST /api/runs/run/ask/stop", b"PUT *"]
        )
        length = self._rng.choice([b"0", b"-1", b"99999999999999999999", b"7"])
        words = what + b" HTTP/1.1\r\nHost: elsewhere\r\nContent-Length: " + length + b"\r\n\r\n{}"
        self._send(sock, words[: self._rng.choice([len(words), self._rng.randrange(len(words))])])

    def _claim(self) -> PeerClaim:
        return self._rng.choice(
            [PeerClaim("mesh", "r0.1", (1, 2)), PeerClaim("feed", "r1.1", (1, 2)), PeerClaim("agent", "a0")]
        )
