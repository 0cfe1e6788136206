"""Hosts on one machine: network namespaces joined by a bridge, each with its own `/dev/shm` and temporary folder.

Processes hold the namespaces, and die with whoever made them, also by SIGKILL; with the last process of a namespace its
links go, so nothing is left behind in any case. A host can be cut off (its cable is pulled: no end of stream), lose its
power (cut off, and everything in it killed, in that order) and come back. It needs root, and the tools of iproute2 and
util-linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from outlast.errors import EnvironmentFault

__all__ = ["HostNetwork", "unavailable"]

_TOOLS = ("ip", "nsenter", "unshare", "setpriv", "mount")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_NOWHERE = "02:00:00:00:00:01"  # of a machine that is not there
_TRIAL = (  # all that making hosts takes: what a container forbids is found out here, not half way
    "mount --make-rprivate / && mount -t tmpfs tmpfs /mnt && mkdir /mnt/0 && mount --bind /mnt/0 /mnt/0 && "
    "ip link add br0 type bridge && ip link set br0 up && ip link add v0 type veth peer name eth0 && "
    "ip link set v0 master br0 up && ip addr add 10.77.0.1/24 dev eth0"
)
_HOLD = "echo ready; exec cat"  # until its input ends, that is, until whoever holds the other end is gone


def unavailable() -> str:
    """Why no hosts can be made here; "" if they can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} missing (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root here"
    tried = subprocess.run(["unshare", "--net", "--mount", "sh", "-ec", _TRIAL], capture_output=True)
    return "" if tried.returncode == 0 else f"no network namespaces: {tried.stderr.decode().strip()[-200:]}"


class HostNetwork:
    """`num` hosts; `shared`: folders under `/tmp` that all of them see as they are, beside this interpreter's, this
    package's and the working directory. A context manager."""

    def __init__(self, num: int, shared: Sequence[Path] = ()) -> None:
        self.num = num
        self._shared = shared_in(Path("/tmp"), shared)
        self._held: list[subprocess.Popen[bytes]] = []
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> HostNetwork:
        try:
            self._make()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    # --- making --------------------------------------------------------------------------------------------------
    def _make(self) -> None:
        bridge = "ip link set lo up && ip link add br0 type bridge && ip link set br0 up"
        self._hold(["unshare", "--net", "--mount"], bridge)
        for host in range(self.num):
            self._hold([*self._into(0, mount=False), "unshare", "--net", "--mount"], self._own_folders())
            pid, veth = self._held[-1].pid, f"v{host}"
            self._bridge("ip", "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
            self._bridge("ip", "link", "set", veth, "master", "br0", "up")
            own = f"ip link set lo up && ip addr add {self.address(host)}/24 dev eth0 && ip link set eth0 up"
            self._do([*self._into(host + 1), "sh", "-c", own])

    def _own_folders(self) -> str:
        """A fresh `/dev/shm` and `/tmp`, with what is shared put back into its place."""
        said = ["mount --make-rprivate /", "mount -t tmpfs tmpfs /dev/shm", "mount -t tmpfs tmpfs /mnt"]
        for index, path in enumerate(self._shared):
            said += [f"mkdir /mnt/{index}", f"mount --bind '{path}' /mnt/{index}"]
        said.append("mount -t tmpfs tmpfs /tmp")
        for index, path in enumerate(self._shared):
            said += [f"mkdir -p '{path}'", f"mount --bind /mnt/{index} '{path}'"]
        return " && ".join(said)

    def _hold(self, enter: Sequence[str], prepare: str) -> None:
        child = subprocess.Popen(
            [*enter, "sh", "-ec", f"{prepare}\n{_HOLD}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=_die_with_me,
            start_new_session=True,
        )
        self._held.append(child)
        assert child.stdout is not None
        assert child.stderr is not None
        if child.stdout.readline() != b"ready\n":
            raise EnvironmentFault(
                f"a namespace could not be made: {child.stderr.read().decode().strip()[-300:]}",
                remedy="run as root, on a kernel with network namespaces, bridges and veth",
            )

    def _into(self, held: int, *, mount: bool = True) -> list[str]:
        at = f"/proc/{self._held[held].pid}/ns"
        return ["nsenter", f"--net={at}/net", *([f"--mount={at}/mnt"] if mount else [])]

    def _bridge(self, *command: str) -> None:
        self._do([*self._into(0), *command])

    def _do(self, command: Sequence[str]) -> None:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise EnvironmentFault(
                f"{' '.join(command[-8:])}: {done.stderr.decode().strip()[-300:]}",
                remedy="run as root, on a kernel with network namespaces, bridges and veth",
            )

    # --- using ---------------------------------------------------------------------------------------------------
    def address(self, host: int) -> str:
        """The IPv4 address of this host, as the others see it."""
        return f"10.77.0.{host + 1}"

    def entering(self, host: int) -> list[str]:
        """What to put before a command to have it run on this host, in the folder that this process has, and end with
        whoever started it."""
        here = ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd()]
        return [*self._into(host + 1), "setpriv", "--pdeathsig", "KILL", *here]

    def start(
        self,
        host: int,
        command: Sequence[str],
        environ: Mapping[str, str] | None = None,
        out: IO[bytes] | int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """A process on this host; `out` takes its errors too."""
        child = subprocess.Popen(
            [*self.entering(host), *command],
            env=dict(os.environ if environ is None else environ),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_me,
        )
        self._started.append(child)
        return child

    def processes(self, host: int) -> list[int]:
        """All that run on this host, but for the one that holds it."""
        held = self._held[host + 1].pid
        wanted = os.stat(f"/proc/{held}/ns/net").st_ino
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and int(name) != held and os.stat(f"/proc/{name}/ns/net").st_ino == wanted:
                    found.append(int(name))
        return found

    # --- what happens to hosts -----------------------------------------------------------------------------------
    def cut(self, host: int) -> None:
        """Pull its cable: nothing comes or goes, and nothing ends."""
        self._bridge("ip", "link", "set", f"v{host}", "down")

    def mend(self, host: int) -> None:
        """Put the cable, or the power, back."""
        self._bridge("ip", "link", "set", f"v{host}", "up")

    def power_off(self, host: int) -> None:
        """Everything on it is gone, and no other host hears of that."""
        self.cut(host)
        self.signal_all(host, signal.SIGKILL)

    def signal_all(self, host: int, number: signal.Signals) -> None:
        """To every process there: SIGSTOP is a kernel that hangs."""
        while pids := self.processes(host):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if number != signal.SIGKILL:
                return
            for child in self._started:
                child.poll()  # ours to reap: else they would be found for ever

    def part(self, one: int, other: int) -> None:
        """Break the path between these two, and no other."""
        for here, there in ((one, other), (other, one)):
            self._do(
                [
                    *self._into(here + 1),
                    "ip",
                    "neigh",
                    "replace",
                    self.address(there),
                    "lladdr",
                    _NOWHERE,
                    "dev",
                    "eth0",
                    "nud",
                    "permanent",
                ]
            )

    def join(self, one: int, other: int) -> None:
        """Mend the path between these two."""
        for here, there in ((one, other), (other, one)):
            self._do([*self._into(here + 1), "ip", "neigh", "del", self.address(there), "dev", "eth0"])

    def mute(self, host: int, *, others: bool = False) -> None:
        """Break the path one way: what this host sends goes nowhere, and what it is sent arrives. With `others`, the
        other way."""
        for other in set(range(self.num)) - {host}:
            here, there = (other, host) if others else (host, other)
            nowhere = ["lladdr", _NOWHERE, "dev", "eth0", "nud", "permanent"]
            self._do([*self._into(here + 1), "ip", "neigh", "replace", self.address(there), *nowhere])

    def unmute(self, host: int, *, others: bool = False) -> None:
        """Mend what `mute` broke."""
        for other in set(range(self.num)) - {host}:
            here, there = (other, host) if others else (host, other)
            self._do([*self._into(here + 1), "ip", "neigh", "del", self.address(there), "dev", "eth0"])

    def shape(self, host: int, *words: str) -> None:
        """Let what goes to this host through a bucket of tokens: `words` are those of `tc` for tbf. A long latency
        makes a slow link, a short one a lossy link, as what does not fit is dropped."""
        self._bridge("tc", "qdisc", "replace", "dev", f"v{host}", "root", "tbf", *words)

    def unshape(self, host: int) -> None:
        """As fast as it was."""
        self._bridge("tc", "qdisc", "del", "dev", f"v{host}", "root")

    def carried(self, host: int) -> tuple[int, int]:
        """Bytes that its cable has carried since it was made: what the host has sent, and what it was sent."""
        command = [*self._into(0), "ip", "-s", "-j", "link", "show", f"v{host}"]
        told = json.loads(subprocess.run(command, capture_output=True, check=True, stdin=subprocess.DEVNULL).stdout)
        return told[0]["stats64"]["rx"]["bytes"], told[0]["stats64"]["tx"]["bytes"]

    # --- the end -------------------------------------------------------------------------------------------------
    def _end(self) -> None:
        for child in self._started:
            if child.poll() is None:
                child.kill()
        for host in range(len(self._held) - 1):
            self.signal_all(host, signal.SIGKILL)
        for child in [*self._started, *self._held]:
            child.kill()
            child.communicate()
        self._started.clear()
        self._held.clear()


def shared_in(hidden: Path, asked: Sequence[Path] = ()) -> list[Path]:
    """Which folders a host sees below one that is its own: those asked for, and those that its processes need."""
    needed = [Path(__file__).parents[2], Path(sys.prefix), Path(sys.base_prefix), Path.cwd()]
    found = {path.resolve() for path in (*asked, *needed)}
    return sorted(path for path in found if path != hidden and path.is_relative_to(hidden))


def _die_with_me() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
