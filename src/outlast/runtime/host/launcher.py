"""`outlast run`: makes the run directory, starts the coordinator and the agents, and keeps them alive until the end.

It holds what must outlive the coordinator: the listening socket, the run's lock and secret. It decides nothing about
membership; it only says for certain that an agent has died. Ctrl-C stops the run, twice kills it; nothing is orphaned,
because every process dies with the one that started it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from outlast.config import Resolved, anchored, encoded
from outlast.core import events
from outlast.core.protocol import messages as m
from outlast.errors import EnvironmentFault, MembershipError, OutlastError
from outlast.journal import Journal, LastLine, RunLock, keep_clock
from outlast.runtime.host._children import Child, start
from outlast.runtime.host._coordinator_ends import CoordinatorEnds, ended_code
from outlast.runtime.host._coordinator_line import CoordinatorLine
from outlast.runtime.host._rank_blocks import RankBlocks
from outlast.runtime.host._snapshot_memory import hold_memory, slots_of
from outlast.runtime.host.silence import Watch, why_out
from outlast.runtime.settings import run_clock
from outlast.runtime.settings.rank_limits import check_ranks
from outlast.runtime.transport.coordinator_place import CoordinatorPlace
from outlast.runtime.transport.endpoints import HANDED_ON, data_address, handed_on, listen_on, read_host_port, shown
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.transport.regions import Region
from outlast.runtime.transport.save_messages import SAVE_EPOCHS, SaveAsked

__all__ = ["Launcher"]

_OF_HOSTS = (  # not of a run around this
    "OUTLAST_ADDRESS", "OUTLAST_AGENT_OF", "OUTLAST_HOST", "OUTLAST_HOST_SLOTS", "OUTLAST_MOST_PROCESSES",
    "OUTLAST_OWN_HOSTS",
)  # fmt: skip
_LEAST_HELD, _ROOM_HELD = 16, 64  # replicas; a large fleet has no descriptors to spare
_COORDINATOR_TRIES = 8  # restarts in a row without a minute of life between them
_STOP_S = 5.0  # how long the coordinator may take to end the run when asked
_AGENT_STOP_S = 10.0  # an agent: a call to a coordinator that does not answer, and its ranks' grace, are 5
_TURN_S = 0.25  # how often the watcher is called at least
_TELL_S = 0.5  # what is told in each turn: a turn must be shorter than what `Watch` takes for the launcher's absence
_KILLED_S = 2.0  # a coordinator that was killed and has not ended by then is left to wake or not


@dataclass(slots=True)
class _Agent:
    name: str
    child: Child
    watch: Watch
    blocks: RankBlocks


@dataclass(slots=True)
class Launcher:
    """Starts a run on this host, and waits for its end. `watch` is called four times a second at least, with why nobody
    can join, or ""; `ready` once, when all that can be refused beforehand was not; `ended` with the exit code, when all
    other processes have ended and before the end is written down. `began_at_s`: when this process began (Unix seconds),
    if it is there for the run alone."""

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
    _agents: list[_Agent] = field(default_factory=list)
    _coordinator: Child | None = None
    _progress: Progress | None = None
    _watch: Watch | None = None
    _condemned: tuple[str, float, float] | None = None  # why the coordinator was killed, how silent it was, when
    _retired: list[Child] = field(default_factory=list)
    _lost_agents: list[m.AgentGone] = field(default_factory=list)
    _line: CoordinatorLine = field(default_factory=CoordinatorLine)
    _restarts: list[float] = field(default_factory=list)
    _interrupts: int = 0
    _wants_save: bool = False
    _stopping: str = ""
    _stop_code: int = 130
    _stop_by_s: float = math.inf
    _exit_code: int | None = None
    _ends: CoordinatorEnds = field(init=False)
    _address: tuple[str, int] = ("127.0.0.1", 0)

    def __post_init__(self) -> None:
        self._ends = CoordinatorEnds(self.run_dir)

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
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        old_fd = signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        ends = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it, and then so do we
            ends.append(signal.SIGHUP)
        old = {s: signal.signal(s, self._signalled) for s in ends}
        old[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._save_wanted)
        try:
            self._start_coordinator(environ, listening, lock)
            for index in range(self._here):
                self._start_agent(environ, f"a{index}")
            while self._exit_code is None or self._agents:
                self._turn(environ, listening, lock, wake_r)
        except BaseException:
            self.ended = None  # what is raised says it
            raise
        finally:
            self._kill_everything()
            for number, handler in old.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(old_fd)
            os.close(wake_r)
            os.close(wake_w)
            listening.close()
            hold.close()
            self._end(lock)
        return self._code

    @property
    def _code(self) -> int:
        return self._exit_code if self._exit_code is not None else self._stop_code

    def _end(self, lock: RunLock) -> None:
        """All others have ended: from here on nobody else writes to the journal."""
        if self._exit_code is not None and self.resolved.config.record == "sqlite":  # else another host may go on
            now_s = self._apart_s + time.monotonic()
            self._ends.write_end(lock.fileno(), now_s, self._exit_code, self._stopping)
        try:
            if self.ended is not None:
                self.ended(self._code)
        finally:
            began_s = time.monotonic()
            with contextlib.suppress(OutlastError), LastLine(self.run_dir) as line:
                now_s = time.monotonic()
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
        config = self.resolved.config
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"cannot make the run directory {self.run_dir}: {error.strerror}"
            raise EnvironmentFault(reason, remedy="give --run-dir a directory that can be written") from error
        lock = RunLock.take(self.run_dir)
        journal = Journal.create(self.run_dir, lock_fd=os.dup(lock.fileno()))
        shown = msgspec.structs.asdict(config)
        journal.append(
            events.RunStarted(
                at_s=self.began_at_s or self._apart_s + time.monotonic(),
                run_id=self.run_id,
                command=self.command,
                num_replicas=config.replicas,
                num_spares=config.num_spares,
                signature={},
                config=shown,
            )
        )
        journal.close()
        written = {key: {"value": value, "origin": self.resolved.origins[key]} for key, value in shown.items()}
        text = json.dumps(written, indent=1, default=str) + "\n"
        try:
            (self.run_dir / "logs").mkdir(exist_ok=True)
            keep_clock(self.run_dir, self._apart_s)
            (self.run_dir / "config.json").write_text(text, encoding="utf-8")
        except OSError as error:
            raise EnvironmentFault(
                f"cannot write into the run directory {self.run_dir}: {error.strerror}",
                did="nothing was started",
                remedy="free some space on its disk, or give --run-dir another one",
            ) from error
        return lock

    def _listen(self) -> socket.socket:
        config = self.resolved.config
        host, port = read_host_port(config.endpoint) if config.endpoint else ("127.0.0.1", config.port)
        if config.endpoint:
            host = data_address(host, (host, port), "the endpoint")
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
        folder = self.run_dir if config.record != "sqlite" else None
        self._line = CoordinatorLine(CoordinatorPlace(self._address, folder), self.secret, self.run_id)
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
    def _start_coordinator(self, environ: dict[str, str], listening: socket.socket, lock: RunLock) -> None:
        region = Region(Progress.SIZE, name="outlast-coordinator")
        self._progress = Progress(region)
        self._progress.alive()
        mine = {
            HANDED_ON: str(listening.fileno()),
            "OUTLAST_LOCK_FD": str(lock.fileno()),
            "OUTLAST_PROGRESS_FD": str(region.fd),
            "OUTLAST_HOST": environ.get("OUTLAST_HOST", self.host),
        }
        if (untold := self._ends.untold(self.resolved.config.record != "sqlite")) is not None:
            mine["OUTLAST_TAKEOVER"] = untold
        self._coordinator = start(
            [sys.executable, "-m", "outlast.runtime.coordinator.server"],
            environ=environ | mine,
            log=self.run_dir / "logs" / "coordinator.log",
            pass_fds=[listening.fileno(), lock.fileno(), region.fd],
        )
        config = self.resolved.config
        self._watch = Watch(self._coordinator.pid, self._progress, config.stall_floor_s, config.formation_s)
        self._condemned = None

    def _start_agent(self, environ: dict[str, str], name: str) -> None:
        command = [sys.executable, "-m", "outlast.runtime.host.agent", name, *self.command]
        region = Region(Progress.SIZE, name=f"outlast-{name}")
        sign, config, blocks = Progress(region), self.resolved.config, RankBlocks()
        index = int(name[1:].partition(".")[0])
        sign.alive()
        mine = {
            "OUTLAST_SIGN_FD": str(region.fd),
            "OUTLAST_RANKS_FD": str(blocks.passed.fileno()),
            "OUTLAST_HOST": self._own_host(index),
            "OUTLAST_AGENT_OF": f"{index}/{config.agents}",
        }
        child = start(
            command,
            environ=environ | mine,
            log=self.run_dir / "logs" / f"agent-{name}.log",
            pass_fds=[region.fd, blocks.passed.fileno(), *slots_of(environ)],
        )
        blocks.passed.close()
        watch = Watch(child.pid, sign, config.stall_floor_s, config.formation_s)
        self._agents.append(_Agent(name, child, watch, blocks))

    # --- the loop ------------------------------------------------------------------------------------------------
    def _turn(self, environ: dict[str, str], listening: socket.socket, lock: RunLock, wake_fd: int) -> None:
        poll = select.poll()
        poll.register(wake_fd, select.POLLIN)
        if self._coordinator is not None:
            poll.register(self._coordinator.fd, select.POLLIN)
        for agent in self._agents:
            poll.register(agent.child.fd, select.POLLIN)
            poll.register(agent.blocks.fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(_TURN_S * 1000.0)}
        if wake_fd in ready:
            os.read(wake_fd, 64)
            self._on_signals()
        if self._coordinator is not None and self._coordinator.fd in ready:
            self._coordinator_ended(environ, listening, lock)
        for agent in [agent for agent in self._agents if agent.child.fd in ready]:
            self._agent_ended(agent, environ)
        for agent in self._agents:
            agent.blocks.take_in()
        self._look_for_the_silent(environ, listening, lock)
        if self._exit_code is None and self._lost_agents:
            self._tell_losses()
        if time.monotonic() > self._stop_by_s:
            self._insist()
        if self.watch is not None:
            self.watch(why_out(self._progress if self._coordinator is not None else None))

    def _look_for_the_silent(self, environ: dict[str, str], listening: socket.socket, lock: RunLock) -> None:
        """A stopped agent is continued: its replicas are well. A stopped coordinator is replaced: that costs nobody
        anything, and its successor is fenced from it by the epoch."""
        now = time.monotonic()
        for agent in self._agents:
            if agent.watch.look(now)[0] == "stopped":
                agent.child.send(signal.SIGCONT)
        if self._coordinator is None or self._watch is None or self._exit_code is not None:
            return
        wrong, silent_s = self._watch.look(now)
        if self._condemned is None:
            if wrong:  # killed, it also lets go of its connections, and everybody turns to the successor at once
                self._condemned = (f"it {'hung' if wrong == 'hung' else 'was stopped'}", silent_s, now)
                self._coordinator.send(signal.SIGKILL)
        elif now - self._condemned[2] > _KILLED_S:
            self._retired.append(self._coordinator)
            self._replace(environ, listening, lock, *self._condemned[:2])

    def _coordinator_ended(self, environ: dict[str, str], listening: socket.socket, lock: RunLock) -> None:
        noticed = time.monotonic()
        assert self._coordinator is not None
        assert self._progress is not None
        how = self._coordinator.reap()
        if how is None:
            return
        self._coordinator = None
        self._line.drop()
        ended = ended_code(self.run_dir, how.code)
        if ended is not None:
            self._exit_code = ended
            self._ask_agents_to_stop(finished=ended == 0 and not self._stopping)
            return
        silent_s = max(0.0, noticed - self._progress.read()[3])
        why, silent_s = self._condemned[:2] if self._condemned is not None else (f"it ended by {how}", silent_s)
        self._replace(environ, listening, lock, why, silent_s)

    def _replace(
        self, environ: dict[str, str], listening: socket.socket, lock: RunLock, why: str, silent_s: float
    ) -> None:
        """Another coordinator, from the record, on the socket that the members know."""
        assert self._progress is not None
        now = time.monotonic()
        self._coordinator = None
        self._line.drop()
        self._ends.died(why, silent_s)
        self._restarts = [t for t in self._restarts if now - t < 60.0] + [now]
        if len(self._restarts) > _COORDINATOR_TRIES or self._stopping:
            self._exit_code = 3 if not self._stopping else self._stop_code
            self._ask_agents_to_stop()
            return
        self._progress.region.close()
        self._start_coordinator(environ, listening, lock)

    def _agent_ended(self, agent: _Agent, environ: dict[str, str]) -> None:
        how, noticed_s = agent.child.reap(), time.monotonic()
        if how is None:
            return
        self._agents.remove(agent)
        exits = agent.blocks.close(noticed_s, f"its agent {agent.name} died: {how}")
        if self._exit_code is not None or self._stopping or ended_code(self.run_dir) is not None:
            return  # the coordinator has told the agents that the run is over, and ends as well
        if how.code == MembershipError.exit_code:
            self._give_up(f"its own agent was turned away: see {self.run_dir}/logs/agent-{agent.name}.log")
            return
        self._lost_agents.append(m.AgentGone(agent=agent.name, cause=str(how), exits=exits))
        base, _, number = agent.name.partition(".")
        self._start_agent(environ, f"{base}.{int(number or 1) + 1}")

    def _give_up(self, reason: str) -> None:
        """The run cannot go on, and another try would end alike."""
        self._stopping, self._stop_code = reason, MembershipError.exit_code
        self._stop_by_s = time.monotonic() + _STOP_S
        self._tell([m.Stop(reason=reason, exit_code=self._stop_code)])

    def _tell_losses(self) -> None:
        """Agents that died, to the coordinator; all of them again after a reconnection (it is idempotent)."""
        self._line.tell_all(self._lost_agents, _TELL_S)

    def _tell(self, messages: Sequence[Any], timeout_s: float = 2.0) -> None:
        self._line.tell(messages, timeout_s)

    # --- stopping ------------------------------------------------------------------------------------------------
    def _signalled(self, number: int, _: Any) -> None:
        self._interrupts += number == signal.SIGINT or not self._stopping  # engines repeat a notice; they have SIGKILL
        self._stopping = {signal.SIGINT: "interrupt", signal.SIGHUP: "hangup"}.get(number, "terminated")  # type: ignore[call-overload]
        self._stop_code = 128 + number  # not 0: whoever waits for the work must not take it for done

    def _save_wanted(self, number: int, _: Any) -> None:
        self._wants_save = True

    def _on_signals(self) -> None:
        """Once: stop in order. Ctrl-C twice: kill. A child that is struck between fork and exec has these handlers and
        this pipe: what it writes there is not meant for this process."""
        if self._wants_save:
            self._wants_save = False
            self._tell([SaveAsked(reason="a save was asked for")])
        if not self._stopping:
            return
        if self._interrupts >= 2:
            self._exit_code = self._stop_code
            self._kill_everything()
        elif self._exit_code is None:
            save_s = self.resolved.config.stop_save_s if self._keeps_checkpoints() else 0.0
            self._stop_by_s = min(self._stop_by_s, time.monotonic() + _STOP_S + save_s)
            self._tell([m.Stop(reason=self._stopping, exit_code=self._stop_code)])
        else:
            self._ask_agents_to_stop(until_s=self._stop_by_s)

    def _keeps_checkpoints(self) -> bool:
        """Whether the coordinator has a place to save to, wherever that was said."""
        with Journal.open_reader(self.run_dir) as journal:
            return journal.get(SAVE_EPOCHS) is not None

    def _insist(self) -> None:
        """Who was asked to stop and does not (it may be stopped itself) is killed: the coordinator, then the agents."""
        if self._coordinator is not None:
            self._coordinator.send(signal.SIGKILL)
        elif self._exit_code is not None:
            for agent in self._agents:
                self._exit_code = self._exit_code or self._stop_code  # its work after a good end is cut short
                agent.child.send(signal.SIGKILL)

    def _ask_agents_to_stop(self, finished: bool = False, until_s: float = math.inf) -> None:
        """The coordinator is gone, and perhaps could not tell them. After a good end scripts may take their time."""
        if not finished:
            self._stop_by_s = min(until_s, time.monotonic() + _AGENT_STOP_S)
        for agent in self._agents:
            agent.child.send(signal.SIGUSR1 if finished else signal.SIGTERM)

    def _kill_everything(self) -> None:
        last = [self._coordinator] if self._coordinator is not None else []
        children = [*(agent.child for agent in self._agents), *self._retired, *last]
        for child in children:
            child.send(signal.SIGKILL)
        for child in children:
            child.wait()
        self._agents.clear()
        self._retired.clear()  # at the end this is called again: their descriptors are closed, or somebody else's
        self._coordinator = None
