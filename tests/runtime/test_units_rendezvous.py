"""Members of a c10d group find each other without a server, and once they have, nobody else reaches their sockets."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo

from outlast.runtime.exchange import _rendezvous, c10d_plane
from outlast.runtime.exchange._rendezvous import LOOPBACK, ViewStore
from outlast.runtime.exchange.c10d_plane import open_store
from outlast.runtime.transport.endpoints import listen_on
from outlast.runtime.transport.peer_messages import Key


class Line:
    """A mesh of two without sockets."""

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.peer = self
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK)

    def broadcast(self, key: Key) -> None:
        self.peer.keys.append(key)


def listening() -> set[int]:
    """This process's TCP ports."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    tables = [Path(f"/proc/self/net/{name}") for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


def made(index: int, store: ViewStore, host: str) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=30)
    return ProcessGroupGloo(PrefixStore("v", store), index, 2, options)


def there(host: str) -> bool:
    """Whether this machine has the address."""
    try:
        listen_on(host).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", [LOOPBACK, "::1"])
def test_a_group_forms_over_the_mesh_and_is_shut_to_others(host: str) -> None:
    if not there(host):
        pytest.skip(f"{host} is no address of this machine")
    lines = [Line(), Line()]
    lines[0].peer, lines[1].peer = lines[1], lines[0]
    stores = [ViewStore(line, 30.0) for line in lines]  # type: ignore[arg-type]
    before, groups = listening(), {}
    threads = [
        threading.Thread(target=lambda i=i, s=s: groups.update({i: made(i, s, host)}))  # type: ignore[misc]
        for i, s in enumerate(stores)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for store, thread in zip(stores, threads, strict=True):
            store.exchange()
            thread.join(0.001)
    ports = listening() - before
    assert len(ports) == 2
    bystander = listen_on(host)
    assert _rendezvous.shut(stores[0].said) == 2  # one process has both ends here
    for port in ports:
        with pytest.raises(TimeoutError):
            socket.create_connection((host, port), timeout=0.2)
    socket.create_connection(bystander.getsockname()[:2], timeout=30).close()
    bystander.close()
    tensors = [torch.ones(3), torch.full((3,), 2.0)]
    works = [groups[index].allreduce([tensor]) for index, tensor in enumerate(tensors)]
    for work in works:
        work.wait()
    assert tensors[0].tolist() == tensors[1].tolist() == [3.0] * 3


def test_a_view_that_ends_keeps_nobody_waiting_for_its_keys() -> None:
    store = ViewStore(SimpleNamespace(keys=[], wake_fd=os.eventfd(0, os.EFD_NONBLOCK)), 3600.0)  # type: ignore[arg-type]
    failed: list[str] = []

    def wait() -> None:
        try:
            store.get("a key of somebody who never comes")
        except RuntimeError as error:
            failed.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    store.give_up()
    thread.join(30)
    assert failed == ["the group's members did not all come"]


def test_nobody_reaches_torchs_own_store_before_torch_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then whoever looks from outside would take it for one of the run's ports, by the callers that may wait."""
    given: list[tuple[str, int, int]] = []

    def store(host: str, port: int, *, master_listen_fd: int, **_: Any) -> None:
        with socket.socket(fileno=master_listen_fd) as sock:
            given.append((*sock.getsockname(), sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)))

    monkeypatch.setattr(c10d_plane, "TCPStore", store)
    _, address = open_store()
    host, _, port = address.rpartition(":")
    assert given == [(host, int(port), 0)]


def test_torchs_own_store_listens_at_one_address_only() -> None:
    store, address = open_store()
    port = int(address.rpartition(":")[2])
    store.set("key", "value")
    socket.create_connection((LOOPBACK, port), timeout=30).close()
    for host in ("127.0.0.2", "::1"):
        with pytest.raises(OSError, match=r"refused|assign|unreachable"):
            socket.create_connection((host, port), timeout=30)
    assert store.get("key") == b"value"
