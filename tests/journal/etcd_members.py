"""Three real members of an etcd on loopback, for tests: each can be stopped, frozen and started again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ports import free_ports
from tests.runtime.certificates import by_tls, etcd_variables

from outlast.config import TlsFiles
from outlast.journal import Access, Unreachable, access_of
from outlast.journal._etcd import Etcd

__all__ = ["Members", "start_members"]

_SOON = ["--heartbeat-interval", "50", "--election-timeout", "400"]


class Members:
    """See the module. `files`: they speak TLS to each other and to clients, and want everybody's certificate."""

    def __init__(self, base: Path, files: TlsFiles | None = None) -> None:
        self.base, self._extra = base, by_tls(files) if files else []
        self.scheme = "https" if files else "http"
        self.environ = etcd_variables(files) if files else {}
        ports = free_ports(6)
        self.clients, self._peers = ports[:3], ports[3:]
        self.processes: list[subprocess.Popen[bytes] | None] = [None, None, None]
        for index in range(3):
            self.start(index)

    @property
    def record(self) -> str:
        scheme = "etcds" if self.scheme == "https" else "etcd"
        return f"{scheme}://" + ",".join(f"127.0.0.1:{port}" for port in self.clients)

    @property
    def access(self) -> Access:
        return access_of(self.record, self.environ)

    def start(self, index: int) -> None:
        client = f"{self.scheme}://127.0.0.1:{self.clients[index]}"
        peer = f"{self.scheme}://127.0.0.1:{self._peers[index]}"
        cluster = ",".join(f"m{i}={self.scheme}://127.0.0.1:{port}" for i, port in enumerate(self._peers))
        command = [
            "etcd", "--name", f"m{index}", "--data-dir", str(self.base / f"m{index}"), "--listen-client-urls", client,
            "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", cluster, *_SOON, *self._extra,
        ]  # fmt: skip
        with (self.base / f"m{index}.log").open("ab") as log:
            self.processes[index] = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ})

    def kill(self, index: int) -> None:
        process = self.processes[index]
        assert process is not None
        process.kill()
        process.wait()

    def signal(self, index: int, number: signal.Signals) -> None:
        process = self.processes[index]
        assert process is not None
        process.send_signal(number)
        if number == signal.SIGSTOP:  # until all its threads have: on a busy machine some answer for a while
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def ready(self) -> None:
        etcd = Etcd(self.access)
        for _ in range(30):
            with contextlib.suppress(Unreachable):
                etcd.range("/", 2.0)
                etcd.close()
                return
        raise AssertionError((self.base / "m0.log").read_text()[-2000:])

    def close(self) -> None:
        for index, process in enumerate(self.processes):
            if process is not None and process.poll() is None:
                self.signal(index, signal.SIGCONT)
                self.kill(index)


@contextlib.contextmanager
def start_members(base: Path, files: TlsFiles | None = None) -> Iterator[Members]:
    """Skips where etcd is not installed. `files`: of each member, and by default of who asks them."""
    if shutil.which("etcd") is None:
        pytest.skip("no etcd here: make cluster-env")
    base.mkdir(parents=True, exist_ok=True)
    members = Members(base, files)
    try:
        members.ready()
        yield members
    finally:
        members.close()
