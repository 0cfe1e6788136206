"""`outlast run`: makes the run directory, starts the coordinator and the agents, and keeps them alive until the end.

It holds what must outlive the coordinator: the listening socket, the run's lock and secret. It decides nothing about
membership; it only says for certain that an agent has died. Ctrl-C stops the run, twice kills it; nothing is orphaned,
because every process dies with the one that started it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from outlast.config import Resolved, anchored, encoded
from outlast.core import events
from outlast.core.protocol import messages as m
from outlast.errors import EnvironmentFault, MembershipError, OutlastError, Unsaved
from outlast.journal import LastLine, RunLock
from outlast.runtime.host._children import Child
from outlast.runtime.host._coordinator_child import CoordinatorChild
from outlast.runtime.host._coordinator_ends import CoordinatorEnds, ended_code, keeps_checkpoints
from outlast.runtime.host._coordinator_line import CoordinatorLine, own_endpoint
from outlast.runtime.host._host_system import HERE, HostSystem
from outlast.runtime.host._later_starts import LaterStarts
from outlast.runtime.host._launched_agent import LaunchedAgent, start_agent
from outlast.runtime.host._notices import Notices
from outlast.runtime.host._run_folder import begin_folder
from outlast.runtime.host._snapshot_memory import hold_memory
from outlast.runtime.settings import run_clock
from outlast.runtime.settings.rank_limits import check_ranks
from outlast.runtime.transport.coordinator_place import CoordinatorPlace
from outlast.runtime.transport.endpoints import HANDED_ON, handed_on, listen_on, read_host_port, shown
from outlast.runtime.transport.frames import Link
from outlast.runtime.transport.save_messages import SaveAsked

__all__ = ["Launcher"]

_OF_HOSTS = (  # not of a run around this
    "OUTLAST_ADDRESS", "OUTLAST_AGENT_OF", "OUTLAST_HOST", "OUTLAST_HOST_SLOTS", "OUTLAST_MOST_PROCESSES",
    "OUTLAST_OWN_HOSTS",
)  # fmt: skip
_LEAST_HELD, _ROOM_HELD = 16, 64  # replicas; a large fleet has no descriptors to spare
_STOP_S = 5.0  # how long the coordinator may take to end the run when asked
_AGENT_STOP_S = 10.0  # an agent: a call to a coordinator that does not answer, and its ranks' grace, are 5
_TURN_S = 0.25  # how often the watcher is called at least
_TELL_S = 0.5  # what is told in each turn: a turn must be shorter than what `Watch` takes for the launcher's absence
_FINISHED = (0, Unsaved.exit_code)  # of an agent that was told that training is done
_HEARD_S = 10.0  # for the coordinator's process here to take in an end that an agent was told of


@dataclass(slots=True)
class Launcher:
    """Starts a run on this host, and waits for its end. `watch` is called four times a second at least, with why nobody
    can join, or ""; `ready` once, when all that can be refused beforehand was not; `ended` with the exit code, when all
    other processes have ended and before the end is written down. `began_at_s`: when this process began (Unix seconds),
    if it is there for the run alone. `system`: this host's clock and processes; `dial`: how the coordinator is called;
    `notices`: what signals say."""

    resolved: Resolved
    command: list[str]
    run_dir: Path
    watch: Callable[[str], Any] | None = None
    ready: Callable[[], Any] | None = None
    ended: Callable[[int], Any] | None = None
    began_at_s: float | None = None
    _apart_s: float = field(init=False, default_factory=lambda: run_clock.apart_s({}))
    run_id: str = field(default_factory=lambda: secrets.token_hex(4))
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    host: str = field(default_factory=socket.gethostname)
    system: HostSystem = HERE
    dial: Callable[..., Link] = Link
    notices: Notices = field(default_factory=Notices)
    _agents: list[LaunchedAgent] = field(default_factory=list)
    _later: LaterStarts = field(init=False)
    _coordinator: CoordinatorChild = field(init=False)
    _standing: list[m.AgentGone | m.Stop] = field(default_factory=list)  # what each coordinator is told
    _stopped: set[str] = field(default_factory=set)  # agents that were told to go on, and are not seen to yet
    _line: CoordinatorLine = field(default_factory=CoordinatorLine)
    _stop_by_s: float = math.inf
    _save_by_s: float = 0.0  # so long a stop may wait for its save, whoever coordinates
    _over_by_s: float = math.inf
    _over_code: int = 0
    _exit_code: int | None = None
    _address: tuple[str, int] = ("127.0.0.1", 0)

    def __post_init__(self) -> None:
        config, ends = self.resolved.config, CoordinatorEnds(self.run_dir)
        self._later = LaterStarts(self.system)
        self._coordinator = CoordinatorChild(self.system, ends, self._later, config.stall_floor_s, config.formation_s)

    def run(self) -> int:
        """From nothing to the end of the run: its exit code. ConfigError, EnvironmentFault before it has begun."""
        check_ranks(self.resolved.config)
        self.resolved = msgspec.structs.replace(self.resolved, config=anchored(self.resolved.config))
        listening = self._listen()
        try:
            hold, found_by = hold_memory(self._num_held * self.resolved.config.ranks)
            lock = self._prepare()
        except OutlastError:
            listening.close()
            raise
        environ = self._environ(listening) | found_by
        if self.ready is not None:
            self.ready()
        with contextlib.ExitStack() as after:  # the last first
            after.callback(self._end, lock)
            after.callback(hold.close)
            after.callback(listening.close)
            wake_fd = after.enter_context(self.notices.heard())
            after.callback(self._kill_everything)
            try:
                self._coordinator.start(functools.partial(self._start_coordinator, environ, listening, lock))
                for index in range(self._here):
                    self._start_agent(environ, f"a{index}")
                while self._exit_code is None or self._agents:
                    self._turn(environ, wake_fd)
            except BaseException:
                self.ended = None  # what is raised says it
                raise
        return self._code

    @property
    def _code(self) -> int:
        return self._exit_code if self._exit_code is not None else self.notices.code

    def _end(self, lock: RunLock) -> None:
        """All others have ended: from here on nobody else writes to the journal."""
        if self._exit_code is not None and self.resolved.config.record == "sqlite":  # else another host may go on
            now_s = self._apart_s + self.system.now_s()
            self._coordinator.ends.write_end(lock.fileno(), now_s, self._exit_code, self.notices.stopping)
        try:
            if self.ended is not None:
                self.ended(self._code)
        finally:
            began_s = self.system.now_s()
            with contextlib.suppress(OutlastError), LastLine(self.run_dir) as line:
                now_s = self.system.now_s()
                over_s = now_s + (now_s - began_s)  # its disk takes about as long again to keep it
                line.append(events.RunEnded(at_s=self._apart_s + over_s, exit_code=self._code))
            lock.release()

    # --- preparing -----------------------------------------------------------------------------------------------
    @property
    def endpoint(self) -> str:
        """Where the coordinator listens."""
        return shown(*self._address)

    @property
    def _here(self) -> int:
        return self.resolved.config.agents

    @property
    def awaits(self) -> int:
        """Agents of other hosts, before the first replicas are started."""
        return self.resolved.config.num_agents - self.resolved.config.agents

    @property
    def _num_held(self) -> int:
        """Replicas whose snapshots this host keeps, and so the most that can ever be asked for here: memory that nobody
        has sized takes none. A state whose writers are on several hosts is whole on none: then
        all of them take it from where checkpoints are kept."""
        config = self.resolved.config
        begun = config.replicas + config.num_spares
        return 0 if config.endpoint else max(_LEAST_HELD, min(2 * begun, _ROOM_HELD), begun)

    def _prepare(self) -> RunLock:
        began_s = self.began_at_s or self._apart_s + self.system.now_s()
        return begin_folder(self.run_dir, self.resolved, self.run_id, self.command, began_s, self._apart_s)

    def _listen(self) -> socket.socket:
        config = self.resolved.config
        host, port = read_host_port(config.endpoint) if config.endpoint else ("127.0.0.1", config.port)
        if config.endpoint:
            host = own_endpoint(host, port, config.tls)
        try:
            return handed_on(os.environ.pop(HANDED_ON, ""), host, port) or listen_on(host, port)
        except OSError as error:
            option = "--endpoint HOST:PORT" if config.endpoint else "--port"
            raise EnvironmentFault(
                f"the coordinator's port {port} is busy: {error.strerror}",
                remedy=f"give another {option}, or 0 for any free one",
            ) from error

    def _environ(self, listening: socket.socket) -> dict[str, str]:
        self._address = listening.getsockname()[:2]
        config = self.resolved.config
        place = CoordinatorPlace(self._address, self.run_dir if config.record != "sqlite" else None, self.run_id)
        self._line = CoordinatorLine(place, self.secret, self.run_id, config.tls, self.dial)
        found = {key: value for key, value in os.environ.items() if key not in _OF_HOSTS} | {
            "OUTLAST_RUN": self.run_id,
            "OUTLAST_RUN_DIR": str(self.run_dir.resolve()),
            "OUTLAST_COORDINATOR": shown(*self._address),
            "OUTLAST_SECRET": self.secret.hex(),
            "OUTLAST_CONFIG": encoded(config),
            run_clock.VARIABLE: repr(self._apart_s),
            "OUTLAST_COMMAND": json.dumps(self.command),
            "OUTLAST_SEAT": secrets.token_hex(8),
            "OUTLAST_FOLDER": str(Path.cwd()),
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),  # sets have one order in all, whenever they start
        }
        if config.endpoint:
            own = ",".join(self._own_host(index) for index in range(config.agents))
            return found | {
                "OUTLAST_ADDRESS": self._address[0],
                "OUTLAST_HOST_SLOTS": str(config.slots),
                "OUTLAST_OWN_HOSTS": own,
            }
        return found | {"OUTLAST_MOST_PROCESSES": str(self._num_held)}

    def _own_host(self, index: int) -> str:
        """What the host of one of my agents is called: several are as many hosts."""
        return self.host if self.resolved.config.agents == 1 else f"{self.host}-a{index}"

    # --- children ------------------------------------------------------------------------------------------------
    def _start_coordinator(
        self, environ: dict[str, str], listening: socket.socket, lock: RunLock, progress_fd: int
    ) -> Child:
        """Start one, on the socket that the members know."""
        mine = {
            HANDED_ON: str(listening.fileno()),
            "OUTLAST_LOCK_FD": str(lock.fileno()),
            "OUTLAST_PROGRESS_FD": str(progress_fd),
            "OUTLAST_HOST": environ.get("OUTLAST_HOST", self.host),
        }
        if (untold := self._coordinator.ends.untold(self.resolved.config.record != "sqlite")) is not None:
            mine["OUTLAST_TAKEOVER"] = untold
        return self.system.start(
            [sys.executable, "-m", "outlast.runtime.coordinator.server"],
            environ=environ | mine,
            log=self.run_dir / "logs" / "coordinator.log",
            pass_fds=[listening.fileno(), lock.fileno(), progress_fd],
        )

    def _start_agent(self, environ: dict[str, str], name: str) -> None:
        """OSError."""
        index, config = int(name[1:].partition(".")[0]), self.resolved.config
        mine = {"OUTLAST_HOST": self._own_host(index), "OUTLAST_AGENT_OF": f"{index}/{config.agents}"}
        self._agents.append(start_agent(self.system, config, self.run_dir, name, self.command, environ | mine))

    # --- the loop ------------------------------------------------------------------------------------------------
    def _turn(self, environ: dict[str, str], wake_fd: int) -> None:
        of_agents = (fd for agent in self._agents for fd in (agent.child.fd, agent.blocks.fd))
        ready = set(self.system.ready([wake_fd, *self._coordinator.fds, *of_agents], _TURN_S))
        if wake_fd in ready:
            os.read(wake_fd, 64)
            self._on_signals()
        if ready.intersection(self._coordinator.fds):
            self._coordinator_ended()
        for agent in [agent for agent in self._agents if agent.child.fd in ready]:
            self._agent_ended(agent, environ)
        for agent in self._agents:
            agent.blocks.take_in()
        self._look_for_the_silent()
        if self._exit_code is None and self._standing:
            self._line.tell_all(self._standing, _TELL_S)  # again after a reconnection: it is idempotent
        if self._exit_code is None:
            self._start_what_failed()
        if self._exit_code is None and self.system.now_s() > self._over_by_s:
            self._exit_code = self._over_code
            self._ask_agents_to_stop(finished=True)
        if self.system.now_s() > self._stop_by_s:
            self._insist()
        if self.watch is not None:
            self.watch(self._coordinator.why_out())

    def _look_for_the_silent(self) -> None:
        """A stopped agent is continued: its replicas are well. A stopped coordinator is replaced: that costs nobody
        anything, and its successor is fenced from it by the epoch."""
        now_s = self.system.now_s()
        for agent in self._agents:
            found, for_s = agent.watch.look(now_s)
            if found == "stopped":
                agent.child.send(signal.SIGCONT)
                if agent.name not in self._stopped:
                    self._line.tell([m.AgentContinued(agent=agent.name, for_s=for_s)], _TELL_S)
                self._stopped.add(agent.name)
            else:
                self._stopped.discard(agent.name)
        if self._exit_code is None and (lost := self._coordinator.look()) is not None:
            self._replace(*lost)

    def _coordinator_ended(self) -> None:
        if (found := self._coordinator.reap()) is None:
            return
        how, why, silent_s = found
        self._line.drop()
        ended = ended_code(self.run_dir, how.code)
        if ended is not None:
            self._exit_code = ended
            self._ask_agents_to_stop(finished=ended == 0 and not self.notices.stopping)
            return
        self._replace(why, silent_s)

    def _replace(self, why: str, silent_s: float) -> None:
        """Another coordinator; the run's end if there are too many, or it was to stop and has no time for a save."""
        self._line.drop()
        stopping = self.notices.stopping
        wanted = not stopping or self.system.now_s() < self._save_by_s
        if not self._coordinator.replace(why, silent_s, wanted=wanted):
            self._exit_code = 3 if not stopping else self.notices.code
            self._ask_agents_to_stop()
        elif stopping and (stop := m.Stop(reason=stopping, exit_code=self.notices.code)) not in self._standing:
            self._standing.append(stop)

    def _start_what_failed(self) -> None:
        """Successors for which there was no room. A run that was to stop, and has no coordinator to end it, is over."""
        if not self.notices.stopping:
            self._later.turn()
        elif self._coordinator.child is None:
            self._exit_code = self.notices.code
            self._ask_agents_to_stop()

    def _agent_ended(self, agent: LaunchedAgent, environ: dict[str, str]) -> None:
        how, noticed_s = agent.child.reap(), self.system.now_s()
        if how is None:
            return
        self._agents.remove(agent)
        exits = agent.blocks.close(noticed_s, f"its agent {agent.name} died: {how}")
        if self._exit_code is not None or self.notices.stopping or ended_code(self.run_dir) is not None:
            return  # the coordinator has told the agents that the run is over, and ends as well
        if how.code == MembershipError.exit_code:
            self._give_up(f"its own agent was turned away: see {self.run_dir}/logs/agent-{agent.name}.log")
            return
        if how.code in _FINISHED and self._line.elsewhere(self._address):  # told so; the record may be out of reach
            self._over_by_s = min(self._over_by_s, noticed_s + _HEARD_S)
            self._over_code = self._over_code or how.code or 0
            return
        self._standing.append(m.AgentGone(agent=agent.name, cause=str(how), exits=exits))
        base, _, number = agent.name.partition(".")
        name = f"{base}.{int(number or 1) + 1}"
        self._later.start(f"agent {name}", functools.partial(self._start_agent, environ, name))

    def _give_up(self, reason: str) -> None:
        """The run cannot go on, and another try would end alike."""
        self.notices.stop(reason, MembershipError.exit_code)
        self._stop_by_s = self.system.now_s() + _STOP_S
        self._tell([m.Stop(reason=reason, exit_code=self.notices.code)])

    def _tell(self, messages: Sequence[Any], timeout_s: float = 2.0) -> None:
        self._line.tell(messages, timeout_s)

    # --- stopping ------------------------------------------------------------------------------------------------
    def _on_signals(self) -> None:
        """Once: stop in order. Ctrl-C twice: kill. A child that is struck between fork and exec has these handlers and
        this pipe: what it writes there is not meant for this process."""
        if self.notices.wants_save():
            self._tell([SaveAsked(reason="a save was asked for")])
        if not self.notices.stopping:
            return
        if self.notices.insisted:
            self._exit_code = self.notices.code
            self._kill_everything()
        elif self._exit_code is None:
            save_s = self.resolved.config.stop_save_s if keeps_checkpoints(self.run_dir) else 0.0
            self._save_by_s = self._save_by_s or self.system.now_s() + save_s
            self._stop_by_s = min(self._stop_by_s, self.system.now_s() + _STOP_S + save_s)
            self._tell([m.Stop(reason=self.notices.stopping, exit_code=self.notices.code)])
        else:
            self._ask_agents_to_stop(until_s=self._stop_by_s)

    def _insist(self) -> None:
        """Who was asked to stop and does not (it may be stopped itself) is killed: the coordinator, then the agents."""
        if self._coordinator.child is not None:
            self._coordinator.kill()
        elif self._exit_code is not None:
            for agent in self._agents:
                self._exit_code = self._exit_code or self.notices.code  # its work after a good end is cut short
                agent.child.send(signal.SIGKILL)

    def _ask_agents_to_stop(self, finished: bool = False, until_s: float = math.inf) -> None:
        """The coordinator is gone, and perhaps could not tell them. After a good end scripts may take their time."""
        if not finished:
            self._stop_by_s = min(until_s, self.system.now_s() + _AGENT_STOP_S)
        for agent in self._agents:
            agent.child.send(signal.SIGUSR1 if finished else signal.SIGTERM)

    def _kill_everything(self) -> None:
        children = [*(agent.child for agent in self._agents), *self._coordinator.all()]
        for child in children:
            child.send(signal.SIGKILL)
        for child in children:
            child.wait()
        self._agents.clear()
        self._coordinator.forget()  # at the end this is called again
