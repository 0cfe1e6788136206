"""What the page costs training: steps while nobody serves beside steps while readers follow, in one run.

The server is stopped (SIGSTOP) in every other window, so that both kinds of window have the same fleet, the same
journal and the same minute. Of the readers a quarter never reads what it is sent, and one a second vanishes without a
word and is replaced. What the server takes of the processors bounds what it can cost where these are full.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks._common import Bounds, Table, alone, environment, options, publish

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Readers", "main", "rate"]

_LIMIT = 0.005
_TICKS = os.sysconf("SC_CLK_TCK")
_START_S = 180.0


class Window(NamedTuple):
    """Steps a second, and the server's processor seconds a second."""

    kind: str
    rate: float
    server: float


class Readers:
    """So many streams; `churn` of them a second vanish and are replaced. A thread reads for those that read."""

    def __init__(self, port: int, name: str, count: int) -> None:
        self._port, self._name = port, name
        self._all = [self._reader() for _ in range(count)]
        self._over = threading.Event()
        self.num_bytes = self.num_vanished = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _reader(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self._port), 30.0)
        sock.sendall(f"GET /api/runs/{self._name}/stream HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        sock.setblocking(False)
        return sock

    def _read(self) -> None:
        next_s = time.monotonic() + 1.0
        while not self._over.is_set() and self._all:
            reading = self._all[len(self._all) // 4 :]
            for sock in select.select(reading, [], [], 0.2)[0]:
                with contextlib.suppress(OSError):
                    self.num_bytes += len(sock.recv(1 << 20))
            if time.monotonic() >= next_s:
                next_s += 1.0
                self._all.pop(0).close()  # with what it was sent unread: a reset
                self._all.append(self._reader())
                self.num_vanished += 1

    def close(self) -> None:
        """All of them go."""
        self._over.set()
        self._thread.join(30.0)
        for sock in self._all:
            sock.close()


def rate(commits: Sequence[tuple[float, int]], begin_s: float, end_s: float) -> float:
    """Steps a second between two moments, from (when, steps committed by then), straight between them."""

    def at(moment: float) -> float:
        before = [c for c in commits if c[0] <= moment]
        after = [c for c in commits if c[0] > moment]
        if not before or not after:
            raise ValueError("a window lies outside what was committed")
        (a, x), (b, y) = before[-1], after[0]
        return x + (y - x) * (moment - a) / (b - a)

    return (at(end_s) - at(begin_s)) / (end_s - begin_s)


def _commits(run_dir: Path) -> list[tuple[float, int]]:
    from outlast.core import events as ev
    from outlast.journal import Journal

    with Journal.open_reader(run_dir) as reader:
        found = [entry.event for entry in reader.events(kinds=[ev.ProgressMade])]
    return [(e.committed_at_s, e.committed) for e in found if isinstance(e, ev.ProgressMade) and e.committed >= 0]


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _wait_for_steps(run_dir: Path, process: subprocess.Popen[bytes]) -> None:
    until_s, turn = time.monotonic() + _START_S, threading.Event()
    while time.monotonic() < until_s:
        with contextlib.suppress(Exception):
            if len(_commits(run_dir)) > 3:
                return
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with {process.returncode}")
        turn.wait(0.5)
    raise RuntimeError(f"no step within {_START_S:g} s")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


def _measure(run_dir: Path, readers: int, pairs: int, window_s: float) -> tuple[list[Window], int, int]:
    port, name = _free_port(), run_dir.name
    command = [sys.executable, "-m", "outlast", "serve", str(run_dir), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=lambda: os.nice(19))
    assert server.stdout is not None
    server.stdout.readline()
    spans: list[tuple[str, float, float, float]] = []
    turn = threading.Event()
    time_out = time.monotonic() + 60
    while True:
        try:
            crowd = Readers(port, name, readers)
            break
        except OSError:
            if time.monotonic() > time_out:
                raise
            turn.wait(0.2)
    try:
        for number in range(2 * pairs):
            served = number % 2 == 1
            server.send_signal(signal.SIGCONT if served else signal.SIGSTOP)
            turn.wait(1.0)  # what waited meanwhile is caught up with before the window
            begin_s, before_s = time.time(), _processor_s(server.pid)
            turn.wait(window_s)
            spans.append(("served" if served else "alone", begin_s, time.time(), _processor_s(server.pid) - before_s))
        turn.wait(3.0)  # until the commits after the last window are written down
        server.send_signal(signal.SIGCONT)
    finally:
        crowd.close()
        server.send_signal(signal.SIGCONT)
        server.terminate()
        server.wait(30)
    commits = _commits(run_dir)
    windows = [Window(kind, rate(commits, a, b), spent / (b - a)) for kind, a, b, spent in spans]
    return windows, crowd.num_bytes, crowd.num_vanished


def main(argv: Sequence[str] | None = None) -> int:
    made = options(__doc__)
    made.add_argument("--readers", type=int, nargs="+", default=[1, 100], help="readers of each series")
    made.add_argument("--pairs", type=int, default=10, help="windows with and without a server, each so many")
    made.add_argument("--window", type=float, default=10.0, help="seconds of a window")
    made.add_argument("--replicas", type=int, default=2)
    args = made.parse_args(argv)
    machine, bounds, rows, data = environment(args), Bounds(), [], []
    with alone(args.lock), tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [
            sys.executable, "-m", "outlast", "run", "--replicas", str(args.replicas), "--run-dir", str(run_dir),
            "-m", "outlast.examples.gpt", "--steps", "1000000",
        ]  # fmt: skip
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_for_steps(run_dir, run)
            for readers in args.readers:
                windows, num_bytes, vanished = _measure(run_dir, readers, args.pairs, args.window)
                rows.append(_row(readers, windows, num_bytes, vanished, machine["cores"]))
                data.append({"readers": readers, "windows": [window._asdict() for window in windows]})
                share = statistics.fmean(w.server for w in windows if w.kind == "served") / machine["cores"]
                bounds.check(f"{readers} readers: what the server takes of the processors", share, _LIMIT, "of them")
        finally:
            run.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(30)
            run.kill()
            run.wait()
    table = Table(
        title=f"{args.replicas} replicas of the GPT example, windows of {args.window:g} s", rows=rows,
        columns=["readers", "steps/s alone", "steps/s served", "slower by, median of pairs (standard error)",
                 "server, of all processors", "sent MB", "vanished"],
        notes=["a quarter of the readers never reads; one a second vanishes with what it was sent unread"],
    )  # fmt: skip
    return publish("serving", args, machine, [table], bounds, data)


def _row(readers: int, windows: Sequence[Window], num_bytes: int, vanished: int, cores: int) -> list[str]:
    calm = [w for w in windows if w.kind == "alone"]
    served = [w for w in windows if w.kind == "served"]
    costs = [1 - b.rate / a.rate for a, b in zip(calm, served, strict=True)]
    error = statistics.stdev(costs) / len(costs) ** 0.5 if len(costs) > 1 else float("nan")
    return [
        str(readers), f"{statistics.median(w.rate for w in calm):.2f}",
        f"{statistics.median(w.rate for w in served):.2f}", f"{statistics.median(costs):+.2%} ({error:.2%})",
        f"{statistics.fmean(w.server for w in served) / cores:.2%}", f"{num_bytes / 1e6:.1f}", str(vanished),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
