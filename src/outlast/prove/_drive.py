"""Driving a real `outlast run` from outside: start it, follow its journal, strike at its processes.

Used by the demonstration and by campaigns. It touches only processes that the run's own journal names.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from outlast.core import events as ev
from outlast.errors import EnvironmentFault, ProveError
from outlast.journal import Journal, holds_run
from outlast.prove._patience import Reading, RunWait, read_processor
from outlast.prove._process_tree import Running, launcher_of, processes
from outlast.runtime.settings.fault_points import Fault

if TYPE_CHECKING:
    from outlast.runtime.faults.flips import Flip
    from outlast.runtime.faults.liars import Lie

__all__ = ["Driven"]

_POLL_S = 0.05


class Driven:
    """A run under observation. A context manager: leaving it ends the run if it still goes on. `other_agents`: of
    hosts, by number, that others than the run's launcher start; who comes later is seen as well."""

    clock: Callable[[], float] = staticmethod(time.monotonic)
    read: Reading = staticmethod(read_processor)
    other_agents: Mapping[int, subprocess.Popen[bytes]] = MappingProxyType({})

    def __init__(
        self,
        run_dir: Path,
        options: Sequence[str],
        script: Sequence[str],
        faults: Sequence[Fault] = (),
        program: Sequence[str] = ("-m", "outlast"),
        flips: Sequence[Flip] = (),
        lies: Sequence[Lie] = (),
        environ: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        other_agents: Mapping[int, subprocess.Popen[bytes]] = MappingProxyType({}),
    ) -> None:
        self.run_dir, self.other_agents = run_dir, other_agents
        self.events: list[ev.AnyEvent] = []
        self._journal: Journal | None = None
        self._seq = 0
        environ = {k: v for k, v in os.environ.items() if not k.startswith("OUTLAST_")} | dict(environ or {})
        if faults:
            environ["OUTLAST_FAULTS"] = msgspec.json.encode(list(faults)).decode()
        if lies:
            environ["OUTLAST_LIES"] = msgspec.json.encode(list(lies)).decode()
        if flips:
            environ["OUTLAST_CORRUPTION"] = msgspec.json.encode(list(flips)).decode()
        command = [*prefix, sys.executable, *program, "run", "--json", "--run-dir", str(run_dir), *options, *script]
        self.process: subprocess.Popen[Any] = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self._journal is not None:
            self._journal.close()

    # --- following -----------------------------------------------------------------------------------------------
    def poll(self) -> list[ev.AnyEvent]:
        """Events since the last call."""
        if self._journal is None:
            if not holds_run(self.run_dir):
                return []
            try:
                self._journal = Journal.open_reader(self.run_dir)
            except EnvironmentFault:  # it is being made just now
                return []
        new = self._journal.events(since_seq=self._seq)
        if new:
            self._seq = new[-1].seq
            self.events += [entry.event for entry in new]
        return [entry.event for entry in new]

    def follow(self, folder: Path, process: subprocess.Popen[Any] | None = None) -> None:
        """From now on by the journal in this folder: all of it again. `process`: to the end of this one, where the
        launcher has ended with its host."""
        if process is not None:
            self.process.wait()
            self.process = process
        if self._journal is not None:
            self._journal.close()
        self.run_dir, self._journal, self._seq = folder, None, 0
        self.events.clear()

    def until(
        self, what: str, test: Callable[[], bool], hang_s: float, watch: Callable[[], None], renewed: bool = True
    ) -> None:
        """Follow until `test()`. ProveError if the run ends first, or shows nothing for `hang_s`, and longer on a busy
        machine (`_patience.py`). `renewed`: as `RunWait` has it."""
        wait = self._begin_wait(hang_s, renewed)
        while not test():
            ended = self.wait(_POLL_S)
            said = self._look(wait)
            watch()
            if test():
                return
            if ended:
                raise ProveError(f"the run ended before {what}", remedy=f"outlast why {self.run_dir}")
            if said:
                raise ProveError(f"{what} did not happen: {said}", remedy=f"logs under {self.run_dir}")

    def finish(self, hang_s: float, watch: Callable[[], None]) -> int:
        """Follow to the end; the run's exit code. ProveError if it shows nothing first, as in `until`."""
        wait = self._begin_wait(hang_s, renewed=True)
        while not self.wait(_POLL_S):
            said = self._look(wait)
            watch()
            if said:
                raise ProveError(f"the run did not end: {said}", remedy=f"logs under {self.run_dir}")
        self.poll()
        return int(self.process.returncode)

    def _begin_wait(self, hang_s: float, renewed: bool) -> RunWait:
        return RunWait(hang_s, self.clock(), self.step, self.alive(), renewed=renewed, read=self.read)

    def _look(self, wait: RunWait) -> str:
        told = self.poll()
        return wait.look(self.clock(), told, self.alive())

    def alive(self) -> Iterator[Running]:
        """The run's processes that are seen from here: those of its launcher, and of agents that it did not start."""
        for pid in (self.process.pid, *(agent.pid for agent in self.other_agents.values())):
            yield from launcher_of(pid)
            yield from processes(pid)

    def wait(self, seconds: float) -> bool:
        """Whether it ended within so long."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    # --- what the journal says -----------------------------------------------------------------------------------
    @property
    def step(self) -> int:
        """The newest step known to be committed."""
        return max((e.losses[-1][0] for e in self.events if isinstance(e, ev.ProgressMade) and e.losses), default=-1)

    @property
    def coordinator_pid(self) -> int:
        return next(e.pid for e in reversed(self.events) if isinstance(e, ev.CoordinatorStarted))

    @property
    def members(self) -> list[str]:
        return next((e.members for e in reversed(self.events) if isinstance(e, ev.ViewInstalled)), [])

    def spares(self, ready: bool = True) -> dict[str, int]:
        """Replicas outside the view with their process ids; `ready`: only those that have caught up."""
        caught_up = {e.replica for e in self.events if isinstance(e, ev.JoinerCaughtUp)}
        gone = {e.replica for e in self.events if isinstance(e, ev.ReplicaExited)} | set(self.members)
        started = [e for e in self.events if isinstance(e, ev.ReplicaStarted) and e.replica not in gone]
        return {e.replica: e.pid for e in started if e.replica in caught_up or not ready}

    def recoveries(self) -> list[ev.Recovery]:
        return [e for e in self.events if isinstance(e, ev.Recovery)]
