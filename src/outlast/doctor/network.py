"""What lies between two hosts: round trips, how fast bytes come through either way, and how far the clocks are apart.

Role: `outlast doctor --answer ADDRESS:PORT` on one host, `--reach` of it on others. Every wait has a deadline. Who
answers keeps nothing, sends no more than it was asked for, to a limit, and says nothing of its host but the time.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator

from outlast.checkpoint.threads import begin
from outlast.doctor._finding import Finding
from outlast.errors import ConfigError, EnvironmentFault
from outlast.runtime.transport.endpoints import listen_on, read_host_port

__all__ = ["Answering", "look_at_host"]

_HELLO = b"outlast doctor 1"
_ASK = struct.Struct(">cQ")  # T: the time; U: so many bytes follow; D: send so many bytes
_TIME = struct.Struct(">d")
_PIECE = bytes(1 << 16)
_MOST_BYTES = 256 << 20
_CONNECT_S, _ANSWER_S, _BULK_S = 5.0, 5.0, 30.0
_MOST_CALLERS = 16
_AGAIN_S, _CALLER_S = 0.1, 120.0  # a caller has that long for all that it asks
_ROUND_TRIPS = 50
_SMALL_BYTES = 1 << 20
_SLOW_BYTES_S = 12.5e6  # 100 Mbit/s: a step's gradients would take longer than the step
_FAR_S = 0.01  # a round trip; the learned deadlines bear it, the exchange is slow
_APART_S = 1.0
_UNEVEN = 4.0


class Answering:
    """Listens at `address` and answers, a thread a caller, until `close`. EnvironmentFault where it cannot listen."""

    def __init__(self, address: str) -> None:
        host, port = read_host_port(address, "the address to answer at")
        try:
            self._listening = listen_on(host, port)
        except OSError as error:
            raise EnvironmentFault(
                f"nobody can listen at {address}: {error.strerror}", remedy="an address of this host, and a free port"
            ) from error
        self._listening.setblocking(True)
        self.address = "{}:{}".format(*self._listening.getsockname()[:2])
        self.num_callers = 0
        self._closed = threading.Event()
        self._callers = threading.BoundedSemaphore(_MOST_CALLERS)
        self._thread = threading.Thread(target=self._listen, name="outlast-answering", daemon=True)
        begin(self._thread)

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(_ANSWER_S)

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                if self._closed.wait(_AGAIN_S):  # else a caller that is gone already, or no descriptor just now
                    return
                continue
            if not self._callers.acquire(blocking=False):
                sock.close()
                continue
            self.num_callers += 1
            try:
                begin(threading.Thread(target=self._answer, args=(sock,), name="outlast-answer", daemon=True))
            except (RuntimeError, MemoryError):  # this caller is let go; there may be a thread for the next
                self._callers.release()
                sock.close()

    def _answer(self, sock: socket.socket) -> None:
        try:
            with sock, contextlib.suppress(OSError, ConnectionError):
                sock.settimeout(_ANSWER_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if _exactly(sock, len(_HELLO), time.monotonic() + _ANSWER_S) != _HELLO:
                    return
                sock.sendall(_HELLO)
                sock.settimeout(_BULK_S)
                until_s = time.monotonic() + _CALLER_S
                while time.monotonic() < until_s and self._one(sock):
                    pass
        finally:
            self._callers.release()

    def _one(self, sock: socket.socket) -> bool:
        kind, size = _ASK.unpack(_exactly(sock, _ASK.size))
        if kind == b"U" and size <= _MOST_BYTES:
            _swallow(sock, size)
        elif kind == b"D" and size <= _MOST_BYTES:
            _pour(sock, size)
            return True
        elif kind != b"T":
            return False
        sock.sendall(_TIME.pack(time.time()))
        return True


def look_at_host(address: str, num_bytes: int = 32 << 20, clock: Callable[[], float] = time.time) -> list[Finding]:
    """What lies between this host and the one that answers at `address`. `num_bytes`: sent in either direction."""
    if not 0 < num_bytes <= _MOST_BYTES:
        raise ConfigError(f"{num_bytes} bytes to send", remedy=f"1 to {_MOST_BYTES}")
    host, port = read_host_port(address, "the host to reach")
    name = f"network to {address}"
    try:
        sock = socket.create_connection((host, port), _CONNECT_S)
    except OSError as error:
        return [_unreached(name, address, error)]
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock.settimeout(_ANSWER_S)
            sock.sendall(_HELLO)
            if _exactly(sock, len(_HELLO)) != _HELLO:
                raise ConnectionError("another service answers there")
            found = list(_round_trips(sock, name, clock))
        except OSError as error:
            told = str(error) or "no answer"
            what = f"somebody takes calls at {address}, and does not answer as outlast doctor does: {told}"
            return [Finding(check=name, level="error", what=what, remedy=f"there: outlast doctor --answer {address}")]
        return found + list(_throughput(sock, name, num_bytes))


def _unreached(name: str, address: str, error: OSError) -> Finding:
    refused = isinstance(error, ConnectionRefusedError)
    remedy = f"start there: outlast doctor --answer {address}"
    if not refused:
        remedy = "a route to it, and a firewall that lets this port and the run's ports through; then " + remedy
    why = "nobody listens there" if refused else str(error.strerror or error)
    return Finding(check=name, level="error", what=f"{address} cannot be reached: {why}", remedy=remedy)


def _round_trips(sock: socket.socket, name: str, clock: Callable[[], float]) -> Iterator[Finding]:
    took: list[float] = []
    apart: list[tuple[float, float]] = []  # (round trip, their clock less ours)
    for _ in range(_ROUND_TRIPS):
        before_s, begin = clock(), time.perf_counter()
        sock.sendall(_ASK.pack(b"T", 0))
        (theirs_s,) = _TIME.unpack(_exactly(sock, _TIME.size))
        took.append(time.perf_counter() - begin)
        apart.append((took[-1], theirs_s - before_s - took[-1] / 2))
    usual_s, worst_s = statistics.median(took), max(took)
    figures: dict[str, float | int | str] = {"round_trip_s": usual_s, "worst_s": worst_s}
    far = usual_s > _FAR_S
    yield Finding(
        check=name,
        level="warning" if far else "ok",
        what=f"a round trip takes {usual_s * 1e3:.3g} ms, the worst of {_ROUND_TRIPS} {worst_s * 1e3:.3g} ms",
        remedy="put the hosts of one run close to each other: each step waits for several round trips" if far else "",
        figures=figures,
    )
    error_s, offset_s = min(apart)
    off = abs(offset_s) - error_s / 2 > _APART_S
    yield Finding(
        check=f"clock of {name.removeprefix('network to ')}",
        level="warning" if off else "ok",
        what=f"{offset_s:+.3f} s beside this one's, to {error_s / 2 * 1e3:.2g} ms",
        remedy="chrony or systemd-timesyncd on both: journals and saves are dated by them" if off else "",
        figures={"offset_s": offset_s, "error_s": error_s / 2},
    )


def _throughput(sock: socket.socket, name: str, num_bytes: int) -> Iterator[Finding]:
    """Small first: where round trips work and a million bytes do not, large packets are lost on the way."""
    rates: dict[str, float] = {}
    sock.settimeout(_BULK_S)
    for way, kind in (("to it", b"U"), ("from it", b"D")):
        for size in (min(_SMALL_BYTES, num_bytes), num_bytes):
            try:
                rates[way] = size / _transfer(sock, kind, size)
            except OSError as error:
                yield Finding(
                    check=name,
                    level="error",
                    what=f"small messages come through, {size:,} bytes {way} do not ({error or 'it stalled'})",
                    remedy="packets of full size are lost on the way: the same MTU on both hosts and all switches "
                    "between them; ping -M do -s 8972 (or 1472) finds where",
                )
                return
    slow, uneven = min(rates.values()) < _SLOW_BYTES_S, max(rates.values()) > _UNEVEN * min(rates.values())
    told = ", ".join(f"{rate * 8 / 1e9:.3g} Gbit/s {way}" for way, rate in rates.items())
    remedy = ""
    if slow or uneven:
        remedy = "see ethtool's speed and errors at both ends: a cable, a port that fell back, a duplex that differs"
    yield Finding(
        check=name,
        level="warning" if slow or uneven else "ok",
        what=f"one connection carries {told}",
        remedy=remedy,
        figures={"bytes_s_to": rates["to it"], "bytes_s_from": rates["from it"]},
    )


def _transfer(sock: socket.socket, kind: bytes, size: int) -> float:
    """Seconds for so many bytes, the last one acknowledged."""
    begin = time.perf_counter()
    sock.sendall(_ASK.pack(kind, size))
    if kind == b"U":
        _pour(sock, size)
        _exactly(sock, _TIME.size)
    else:
        _swallow(sock, size)
    return max(1e-9, time.perf_counter() - begin)


def _exactly(sock: socket.socket, size: int, until_s: float = float("inf")) -> bytes:
    data = b""
    while len(data) < size:
        if time.monotonic() > until_s:
            raise TimeoutError("it says too little in its time")
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError("the connection ended")
        data += piece
    return data


def _swallow(sock: socket.socket, size: int) -> None:
    room = bytearray(len(_PIECE))
    while size > 0:
        got = sock.recv_into(room, min(size, len(room)))
        if not got:
            raise ConnectionError("the connection ended")
        size -= got


def _pour(sock: socket.socket, size: int) -> None:
    while size > 0:
        piece = _PIECE[: min(size, len(_PIECE))]
        sock.sendall(piece)
        size -= len(piece)
