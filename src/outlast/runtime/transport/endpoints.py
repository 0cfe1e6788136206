"""Where a process can be reached: by a socket of its machine, and over the network where the run spans hosts.

A member's address is one string, as the coordinator passes it on: its abstract unix socket's name alone on one machine,
or that name, the place that it is good for, and a network address. Whoever is at the same place takes the unix socket
(descriptors of shared memory pass over it), everybody else the network. It opens nothing by itself and decodes nothing
that a stranger has sent.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
from pathlib import Path
from typing import Any

from outlast.errors import ConfigError, EnvironmentFault

__all__ = [
    "BACKLOG",
    "HANDED_ON",
    "bound_to",
    "caller_for",
    "data_address",
    "handed_on",
    "lane_address",
    "lanes_address",
    "listen_on",
    "member_address",
    "place_in",
    "place_here",
    "read_host_port",
    "shown",
]

BACKLOG = 1021
"""Callers that may wait at each port of a run. Nobody else asks for this very number: by it those that look from
outside tell the run's ports from torch's and the script's in one process (`prove/_listeners.py`)."""
HANDED_ON = "OUTLAST_LISTEN_FD"
"""The variable that names a listening socket which a process has from the one that started it, or that it was."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = ("net", "time")
Target = str | tuple[str, int]


@functools.cache
def place_here() -> str:
    """What processes have in common that reach each other's unix sockets and read the same clock: this boot of this
    machine, this network namespace, this time namespace."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
    found = [os.stat(f"/proc/self/ns/{name}").st_ino for name in _NAMESPACES if os.path.exists(f"/proc/self/ns/{name}")]
    return "/".join([boot, *map(str, found)])


def member_address(unix: str, network: tuple[str, int] | None) -> str:
    """One string for both. `network`: None on one machine."""
    return unix if network is None else f"{unix} {place_here()} {network[0]} {network[1]}"


def place_in(address: str) -> str:
    """The place that a member's address names; "" on one machine."""
    return [*address.split(" "), ""][1]


def lanes_address(addresses: list[str]) -> str:
    """One string for where the ranks of a replica are reached, its lead first."""
    return "|".join(addresses)


def lane_address(address: str, place: int) -> str:
    """Where one of them is; the empty string if there is none."""
    return dict(enumerate(address.split("|"))).get(place, "")


def caller_for(address: str) -> tuple[socket.socket, Target]:
    """A socket of the right kind, not yet connected, and what to connect it to. OSError for what is no address."""
    unix, *rest = address.split(" ")
    if not rest or rest[0] == place_here():
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), "\0" + unix
    if len(rest) != 3 or not (_is_numeric(rest[1]) and _is_port(rest[2])):  # to look a name up takes long
        raise OSError(f"{address!r} is no address of a member")
    host, port = rest[1], int(rest[2])
    sock = socket.socket(_family(host), socket.SOCK_STREAM)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock, (host, port)


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return host.isascii()


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) < 65536


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listen_on(host: str, port: int = 0) -> socket.socket:
    """A socket that listens at this address of this machine. OSError."""
    sock = bound_to(host, port)
    try:
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def bound_to(host: str, port: int = 0) -> socket.socket:
    """A socket that has this address of this machine, for others to listen on: nobody reaches it yet. OSError."""
    sock = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        if port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def handed_on(fd: str, host: str, port: int) -> socket.socket | None:
    """The socket that this process was started with, if it is one that listens at this address. `fd`: its number, in
    words of the environment."""
    try:
        sock = socket.socket(fileno=int(fd))
    except (ValueError, OSError):
        return None
    listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and sock.getsockname()[:2] == (host, port)
    if not listens:
        sock.detach()  # somebody else's
        return None
    sock.set_inheritable(False)
    return sock


def read_host_port(text: str, what: str = "the endpoint") -> tuple[str, int]:
    """`HOST:PORT`, or `[IPv6]:PORT`. ConfigError for anything else."""
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    good = colon and bare and port.isdigit() and int(port) < 65536 and (":" not in bare or host.startswith("["))
    if not good:
        raise ConfigError(
            f"{what} {text!r} is not HOST:PORT", remedy="for example 10.0.0.1:29400, head-node:29400 or [fd00::1]:29400"
        )
    return bare, int(port)


def shown(host: str, port: int) -> str:
    """As `read_host_port` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def data_address(told: str, peer: tuple[str, int], what: str) -> str:
    """The address of this machine that other hosts reach it at: `told`, if it is one of ours, else the one that a
    connection to `peer` leaves from. Raises EnvironmentFault, ConfigError."""
    if told:
        return _own(told, what)
    try:
        found: list[Any] = socket.getaddrinfo(*peer, type=socket.SOCK_DGRAM)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as sock:
            sock.connect(found[0][4])
            return str(sock.getsockname()[0])
    except OSError as error:
        raise EnvironmentFault(
            f"no way to {shown(*peer)} from here: {error.strerror}", remedy="name an address that is reached: HOST:PORT"
        ) from error


def _own(name: str, what: str) -> str:
    """The numeric address behind `name`, which must be one of this machine's, and one that others can call."""
    try:
        host = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        listen_on(host).close()
    except OSError as error:
        raise ConfigError(
            f"{what} {name} is no address of this machine: {error.strerror}", remedy="one that `ip address` shows here"
        ) from error
    if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        raise ConfigError(
            f"{what} {name} stands for all addresses of this machine, and others must be told one",
            remedy="the address that the other hosts reach: `ip address` shows them",
        )
    return host
