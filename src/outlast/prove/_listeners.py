"""Finds every socket on which a run listens, by the kernel's lists and the descriptors of the run's processes.

Role: no listener is named here, so a new one is found without a word in this file. In processes that run outlast's
code alone (launcher, coordinator, agents, the page's server) every listener is the run's. Those in which the training
script runs (replicas, their ranks, the process that they are forked from) have others as well: the script's own, and
torch's (its store, Gloo, NCCL), before which outlast cannot stand. There a unix socket is known by its name, a port
by the backlog that `listen_on` alone asks for; torch itself listens on the sockets of its stores, with another.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from outlast.prove._process_tree import of_run, output_of
from outlast.runtime.transport.endpoints import BACKLOG
from outlast.runtime.transport.frames import COORDINATOR

__all__ = ["Listening", "listeners"]

_PROC = Path("/proc")
_NET = {"tcp": socket.AF_INET, "tcp6": socket.AF_INET6}
_LISTEN, _ACCEPTS = "0A", 1 << 16  # the kernel's state of a TCP socket, and its flag of a unix one
_RANK = re.compile(r"(r\d+\.\d+)(?:\.rank\d+)?")
_OWN = "outlast/"  # with it each abstract name of the run begins

_SOCK_DIAG, _BY_FAMILY, _DUMP, _DONE, _ERROR = 4, 20, 0x301, 3, 2  # linux/sock_diag.h, linux/netlink.h
_TCP, _STATE_LISTEN, _MESSAGE = 6, 1 << 10, "=IHHII"


class Listening(NamedTuple):
    """A listening socket that can be reached from this process. `address`: what `connect` takes; `name`: who listens,
    as a caller's greeting would have it; `kind`: such as `tcp6 of the launcher`."""

    family: int
    address: str | tuple[str, int]
    name: str
    kind: str


class _Owner(NamedTuple):
    """A process of the run. `whose`: such as `a replica`; `script`: code that is not outlast's may run in it."""

    pid: int
    name: str
    whose: str
    script: bool


class _Entry(NamedTuple):
    """A row of one of the kernel's lists. `backlog`: callers that may wait; 0 where that cannot be seen."""

    net: str
    family: int
    address: str | tuple[str, int]
    backlog: int


def listeners(launcher: int, run_dir: Path) -> list[Listening]:
    """All that the run under this launcher listens on now; processes that lost their parent are known by `run_dir`."""
    here, entries = _network(os.getpid()), _entries()
    found: dict[int, Listening] = {}
    for owner in sorted(_owners(launcher, run_dir), key=lambda owner: owner.whose == "the launcher"):
        if _network(owner.pid) != here:  # a host of its own, as far as sockets go
            continue
        for inode in _sockets_of(owner.pid):
            entry = entries.get(inode)
            if entry is not None and inode not in found and (not owner.script or _is_outlasts(entry)):
                found[inode] = Listening(entry.family, entry.address, owner.name, f"{entry.net} of {owner.whose}")
    return list(found.values())


def _is_outlasts(entry: _Entry) -> bool:
    """Whether a socket of a process in which a script runs is neither the script's nor torch's."""
    if isinstance(entry.address, str):
        return entry.address.startswith("\0" + _OWN)
    return entry.backlog == BACKLOG


# --- whose -----------------------------------------------------------------------------------------------------------
def _owners(launcher: int, run_dir: Path) -> Iterator[_Owner]:
    """The launcher and all below it, and who lives of the run without being below it."""
    seen: set[int] = set()
    for root in (_Owner(launcher, "launcher", "the launcher", False), *(_alone(pid) for pid in of_run(run_dir))):
        waiting = [] if root.pid in seen else [root]
        while waiting:
            owner = waiting.pop()
            seen.add(owner.pid)
            yield owner
            for pid in _children(owner.pid):
                if pid not in seen and (owner.script or _has_begun(pid, owner.pid)):
                    waiting.append(_child(owner, pid))
                seen.add(pid)


def _has_begun(pid: int, parent: int) -> bool:
    """Whether it is more than a copy of its parent, before its exec: a copy has its parent's listeners, as one more
    process beside the launcher."""
    try:
        return (_PROC / f"{pid}/cmdline").read_bytes() != (_PROC / f"{parent}/cmdline").read_bytes()
    except OSError:  # it is gone
        return False


def _alone(pid: int) -> _Owner:
    """By its log: in the middle of a run only an agent and what is below it can have lost its parent."""
    name = output_of(pid)
    if name == "coordinator":
        return _Owner(pid, COORDINATOR, "the coordinator", False)
    if name.startswith("agent-"):
        return _agent(pid, name)
    return _of_script(pid, name, "")


def _child(parent: _Owner, pid: int) -> _Owner:
    name = output_of(pid)
    if parent.script or parent.whose == "an agent":
        return _of_script(pid, name, parent.name)
    if name.startswith("agent-"):
        return _agent(pid, name)
    if name == "coordinator":
        return _Owner(pid, COORDINATOR, "the coordinator", False)
    return _Owner(pid, "beside", "a process beside the launcher", False)


def _agent(pid: int, name: str) -> _Owner:
    return _Owner(pid, name.removeprefix("agent-"), "an agent", False)


def _of_script(pid: int, log: str, parent: str) -> _Owner:
    rank = _RANK.fullmatch(log)
    return _Owner(pid, rank[1] if rank else parent, "a replica" if rank else "a nursery", True)


def _children(pid: int) -> list[int]:
    """Those of all its threads."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in (_PROC / str(pid) / "task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def _network(pid: int) -> str:
    try:
        return os.readlink(_PROC / f"{pid}/ns/net")
    except OSError:
        return ""


def _sockets_of(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for name in os.listdir(_PROC / f"{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(_PROC / f"{pid}/fd/{name}")
                if target.startswith("socket:["):
                    yield int(target[8:-1])


# --- the kernel's lists ----------------------------------------------------------------------------------------------
def _entries() -> dict[int, _Entry]:
    """What listens in this network namespace, by inode."""
    found = dict(_unix_entries())
    for net, family in _NET.items():
        backlogs = _backlogs(family)
        for fields in _rows(net):
            if fields[3] == _LISTEN:
                inode = int(fields[9])
                found[inode] = _Entry(net, family, _reached(fields[1], family), backlogs.get(inode, 0))
    return found


def _rows(net: str) -> list[list[str]]:
    try:
        return [line.split(maxsplit=11) for line in (_PROC / "net" / net).read_text().splitlines()[1:]]
    except OSError:  # a kernel without IPv6
        return []


def _unix_entries() -> Iterator[tuple[int, _Entry]]:
    try:
        lines = (_PROC / "net" / "unix").read_text(errors="replace").splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split(maxsplit=7)
        if int(fields[3], 16) & _ACCEPTS and len(fields) == 8:
            address = "\0" + fields[7][1:] if fields[7].startswith("@") else fields[7]
            net = "abstract unix" if fields[7].startswith("@") else "unix"
            yield int(fields[6]), _Entry(net, socket.AF_UNIX, address, 0)


def _reached(text: str, family: int) -> tuple[str, int]:
    """Where who listens at this address (words of four bytes as this machine has them, and a port) can be called."""
    words, _, port = text.partition(":")
    raw = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    host = socket.inet_ntop(family, raw)
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), int(port, 16)


def _backlogs(family: int) -> dict[int, int]:
    """How many callers may wait at each listening TCP socket, by inode; nothing where the kernel does not say."""
    request = struct.pack("=BBBBI", family, _TCP, 0, 0, _STATE_LISTEN) + bytes(48)
    found: dict[int, int] = {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as asking:
        asking.settimeout(1.0)
        asking.send(struct.pack(_MESSAGE, 16 + len(request), _BY_FAMILY, _DUMP, 1, 0) + request)
        while _read_answer(asking.recv(1 << 16), found.__setitem__):
            pass
    return found


def _read_answer(data: bytes, note: Callable[[int, int], None]) -> bool:
    """Whether more is to come. `note(inode, backlog)`: for each."""
    while data:
        size, kind, *_ = struct.unpack_from(_MESSAGE, data)
        if kind in (_DONE, _ERROR) or size < 16:
            return False
        _, backlog, _, inode = struct.unpack_from("=IIII", data, 16 + 56)
        note(inode, backlog)
        data = data[(size + 3) & ~3 :]
    return True
