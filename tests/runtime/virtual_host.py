"""A host in a time that jumps, and runs on it: its processes are puppets, of which a test says what they do.

What is tried is real: the launcher or the agent, the journal, the signals. Whatever waits for a time is there at once.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outlast.config import resolve
from outlast.core import events as ev
from outlast.journal import Journal
from outlast.runtime.host._children import Child, Exit
from outlast.runtime.host._host_system import HostSystem
from outlast.runtime.host.launcher import Launcher
from outlast.runtime.host.silence import BEAT_S
from outlast.runtime.transport.frames import Link, frame, read_frame
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.transport.regions import Region

FIRST_PID = 1 << 22  # above all that the kernel gives
HORIZON_S = 3600.0  # of virtual time: what has not come about by then never will


class Puppet(Child):
    """A child that `system.start` made. `obeys`: the signals that end it, at once."""

    def __init__(
        self, pid: int, command: Sequence[str], environ: Mapping[str, str], log: Path | None, fds: Sequence[int]
    ) -> None:
        self.pid, self.command, self.environ, self.log = pid, list(command), dict(environ), log
        self._passed = {fd: os.dup(fd) for fd in fds}
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.sent: list[signal.Signals] = []
        self.swept = False
        self.obeys = {signal.SIGKILL}
        self.how: Exit | None = None
        self._reaped = False

    def passed(self, variable: str) -> int:
        """Its own descriptor, of one that its environment names."""
        return self._passed[int(self.environ[variable])]

    def end(self, code: int | None = None, by: int | None = None) -> None:
        """It ends now; nothing happens to one that has ended."""
        if self.how is None:
            self.how = Exit(signal=by, code=code)
            for fd in self._passed.values():
                os.close(fd)
            os.eventfd_write(self.fd, 1)

    def send(self, number: signal.Signals) -> None:
        assert not self._reaped, "its number may be another's"
        self.sent.append(number)
        if number in self.obeys:
            self.end(by=number)

    def reap(self, sweep: bool = False) -> Exit | None:
        if self.how is not None:
            self.swept = sweep
            self._collect()
        return self.how

    def _collect(self) -> int:
        assert self.how is not None, f"process {self.pid} was waited for, and would not have ended"
        assert not self._reaped
        self._reaped = True
        os.close(self.fd)
        return 0


class VirtualHost(HostSystem):
    """`born(puppet)` is told of each child that is started; `states`: the kernel's letter of a process that does not
    just sleep; `used_s`: processor time, by process; `full`: those without a descriptor left; `known`: those whose
    ends somebody waits for; `full_until_s`: there is no process to be had for so long, and `refused` says when one
    was asked for in vain, and how many descriptors this process had then."""

    def __init__(self, born: Callable[[Puppet], Any] = lambda _: None) -> None:
        self.born = born
        self.children: list[Puppet] = []
        self.states: dict[int, str] = {}
        self.used_s: dict[int, float] = {}
        self.full, self.known = set[int](), set[int]()
        self.full_until_s, self.refused = 0.0, list[tuple[float, int]]()
        self._now_ns = self._began_ns = time.monotonic_ns()
        self._agenda: list[tuple[float, int, Callable[[], Any]]] = []
        self._ties = itertools.count()

    @property
    def passed_s(self) -> float:
        """Seconds since this began."""
        return (self._now_ns - self._began_ns) / 1e9

    def after(self, delay_s: float, action: Callable[[], Any]) -> None:
        """Something that happens so much later."""
        heapq.heappush(self._agenda, (self.now_s() + delay_s, next(self._ties), action))

    def pass_s(self, seconds: float) -> None:
        """So much time passes."""
        self._now_ns += round(seconds * 1e9)

    def now_s(self) -> float:
        return self._now_ns / 1e9

    def now_ns(self) -> int:
        return self._now_ns

    def ready(self, fds: Iterable[int], within_s: float) -> list[int]:
        poll, until_s = select.poll(), self.now_s() + within_s
        for fd in fds:
            poll.register(fd, select.POLLIN)
        while not (found := [fd for fd, _ in poll.poll(0)]):
            due_s = self._agenda[0][0] if self._agenda else until_s
            self._now_ns = max(self._now_ns, int(min(due_s, until_s) * 1e9) + 1)  # never before it
            if due_s > until_s or not self._agenda:
                break
            heapq.heappop(self._agenda)[2]()
        assert self.passed_s < HORIZON_S, "nothing ends it"
        return found

    def start(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        log: Path | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        if self.passed_s < self.full_until_s:
            self.refused.append((self.passed_s, len(os.listdir("/proc/self/fd"))))
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        made = Puppet(FIRST_PID + len(self.children), command, environ, log, pass_fds)
        self.children.append(made)
        self.born(made)
        return made

    def state(self, pid: int) -> tuple[str, bool]:
        return self.states.get(pid, "S"), False

    def cpu_s(self, pid: int) -> float:
        return self.used_s.get(pid, 0.0)

    def is_full(self, pid: int) -> bool:
        return pid in self.full

    def reap_strangers(self, known: Collection[int]) -> None:
        self.known = set(known)


class Calls:
    """Connections to a coordinator, in whose place this is: what was said on each. `deaf`: it lets nobody in. `hear`
    is told of each message."""

    def __init__(self, hear: Callable[[Any], Any] = lambda _: None) -> None:
        self.heard: list[list[Any]] = []
        self.deaf = False
        self._hear, self._far = hear, list[socket.socket]()

    def dial(self, *_: Any) -> Link:
        if self.deaf:
            raise ConnectionRefusedError
        near, far = socket.socketpair()
        self.heard.append([])
        self._far.append(far)
        return _Line(near, self.heard[-1], self._hear)

    def say(self, message: Any) -> None:
        """To who has called last."""
        self._far[-1].sendall(frame(message))

    def hang_up(self) -> None:
        """End the newest connection."""
        self._far[-1].close()

    def all(self, *kinds: type) -> list[Any]:
        """What was said of these kinds, on whichever."""
        return [message for said in self.heard for message in said if isinstance(message, kinds)]


class _Line(Link):
    def __init__(self, sock: socket.socket, said: list[Any], hear: Callable[[Any], Any]) -> None:
        self.sock, self._said, self._hear = sock, said, hear

    def send(self, message: Any) -> None:
        self._said.append(message)
        self._hear(message)

    def receive(self, decoder: Any) -> Any:
        return decoder.decode(read_frame(self.sock))

    def close(self) -> None:
        self.sock.close()


class VirtualRun:
    """A run whose launcher is real, and whose coordinator and agents are puppets. `coordinators`, `agents`: those that
    were started; each does what the test's function says when it is born, with its number among its kind. `silent`:
    processes that give no sign of life; `out`: what was said of why nobody can join."""

    def __init__(
        self,
        folder: Path,
        coordinator: Callable[[VirtualRun, Puppet, int], Any] = lambda *_: None,
        agent: Callable[[VirtualRun, Puppet, int], Any] = lambda *_: None,
        **config: Any,
    ) -> None:
        self._scripts = coordinator, agent
        self.silent = set[int]()
        self.coordinators, self.agents = list[Puppet](), list[Puppet]()
        self.host, self.calls, self.out = VirtualHost(self._born), Calls(), list[str]()
        resolved = resolve(cli={"replicas": 1, **config}, environ={})
        self.launcher = Launcher(
            resolved, ["python", "train.py"], folder / "run", system=self.host, dial=self.calls.dial,
            watch=self.out.append,
        )  # fmt: skip

    def _born(self, child: Puppet) -> None:
        leads = child.command[2] == "outlast.runtime.coordinator.server"
        kind, script = (self.coordinators, self._scripts[0]) if leads else (self.agents, self._scripts[1])
        kind.append(child)
        fd = os.dup(child.passed("OUTLAST_PROGRESS_FD" if leads else "OUTLAST_SIGN_FD"))
        sign = Progress(Region(Progress.SIZE, fd=fd), self.host.now_ns)
        self._sign(child, sign)
        child.obeys = {signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1} if not leads else {signal.SIGKILL}
        script(self, child, len(kind))

    def _sign(self, child: Puppet, sign: Progress) -> None:
        """Signs of life until it ends, but for the time in which it is stopped or silent."""
        if child.how is None:
            if child.pid not in self.silent and self.host.states.get(child.pid) != "T":
                sign.alive()
            self.host.after(BEAT_S, lambda: self._sign(child, sign))

    def finish(self, child: Puppet, code: int = 0, after_s: float = 0.0) -> None:
        """The coordinator writes the run's end, and ends so much later."""
        with Journal.open_writer(self.launcher.run_dir, lock_fd=os.dup(child.passed("OUTLAST_LOCK_FD"))) as own:
            outcome: Any = "failed" if code else "finished"
            own.append(ev.RunFinished(at_s=1.0, outcome=outcome, steps=3, detail="", exit_code=code, seconds={}))
        self.host.after(after_s, lambda: child.end(code))

    def goes(self) -> int:
        return self.launcher.run()

    def struck(self, number: signal.Signals) -> None:
        """The launcher's process is sent a signal."""
        os.kill(os.getpid(), number)

    def told(self) -> list[Any]:
        with Journal.open_reader(self.launcher.run_dir) as reader:
            return [entry.event for entry in reader.events()]

    def all_have_ended(self) -> bool:
        return all(child.how is not None and child._reaped for child in self.host.children)
