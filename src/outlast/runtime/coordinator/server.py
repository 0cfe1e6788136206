"""The coordinator's process: sockets, timers and the durable record around `core/protocol.Coordinator`.

One asyncio loop. A view is told only after its record is on the disk; a refused write means that a newer coordinator
exists, and this one stops. Strangers, at the port and at the members' sockets, are counted and told of now and then.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from outlast.config import RunConfig, decoded
from outlast.core import events
from outlast.core.phases import Phase
from outlast.core.protocol import Coordinator, StepTime
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.core.protocol import operator_messages as om
from outlast.core.protocol.record_lease import AnswersDue
from outlast.journal import Journal
from outlast.runtime.coordinator._absent_members import begin_calls
from outlast.runtime.coordinator._authority import check_speaker
from outlast.runtime.coordinator._bookkeeping import Bookkeeping
from outlast.runtime.coordinator._election import await_turn
from outlast.runtime.coordinator._fleet_settings import settings_of
from outlast.runtime.coordinator._hosts import CUT_OFF, Hosts, briefing
from outlast.runtime.coordinator._link_watch import LinkWatch
from outlast.runtime.coordinator._port import Port, SentAway
from outlast.runtime.coordinator._recalled import take_over
from outlast.runtime.coordinator._refusals import Refusals
from outlast.runtime.coordinator._saves import Keeper
from outlast.runtime.coordinator._speed_watch import SpeedWatch
from outlast.runtime.coordinator._told_once import ToldOnce
from outlast.runtime.host.silence import BEAT_S
from outlast.runtime.settings.fault_points import Probe
from outlast.runtime.transport import save_messages as saving
from outlast.runtime.transport.endpoints import place_here
from outlast.runtime.transport.frames import Heartbeat, HeartbeatReply, frame
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.transport.regions import Region
from outlast.runtime.transport.tls import tls_of

__all__ = ["Server", "main"]

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    m.ToCoordinator
    | Heartbeat
    | saving.FromMember
    | saving.SaveAsked
    | hm.HostHere
    | hm.Awaited
    | om.ScaleAsked
    | om.DrainAsked
    | om.EvictAsked
)
_FLUSH_S = 2.0
_FIRST_S = 0.05  # a view is not held up for longer by a disk that is slow to take events
_ASLEEP_S = 0.5
_FAREWELL_S = 1.5  # members come back within a second


class Server:
    """Serves one run as its coordinator. `finished` resolves to the exit code. The running loop's clock is its own;
    `began_s`: Unix time less that clock's; `open_port`: what makes its port."""

    def __init__(
        self,
        journal: Journal,
        config: RunConfig,
        secret: bytes,
        progress: Progress,
        began_s: float,
        *,
        environ: Mapping[str, str] = os.environ,
        open_port: Callable[..., Port] = Port,
    ) -> None:
        self._loop, self._environ = asyncio.get_running_loop(), environ
        self.journal, self.progress = journal, progress
        self.epoch = journal.claim("coordinator")
        self.probe = Probe(f"coordinator.{self.epoch}", environ.get("OUTLAST_FAULTS"))
        stored = self._stored = journal.get(saving.COORDINATOR_RECORD)
        record = msgspec.msgpack.decode(stored, type=m.FleetRecord) if stored else None
        self._taken_over = record.view if record is not None else None  # all that a run which has ended has of views
        self.coordinator = Coordinator(settings_of(config, environ), self.epoch, record)
        self._began_s, self.run = began_s, environ.get("OUTLAST_RUN", "")
        take_over(self.coordinator, journal, self._began_s)
        self.keeper = Keeper(
            journal, self.coordinator, run=self.run, config=config, write=self.write,
            tell=self.send, probe=self.probe, now=self.now_s, handle=self.handle,
        )  # fmt: skip
        self.finished: asyncio.Future[int] = self._loop.create_future()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        own = list(filter(None, environ.get("OUTLAST_OWN_HOSTS", "").split(","))) if config.agents else []
        self.hosts = Hosts(
            config.most_agents, config.stall_floor_s, config.host_silence_s, place_here(), self._agent_of, own
        )
        self.refusals, self.links = Refusals(self.write), LinkWatch(self._agent_of, self.handle)
        self.speeds = SpeedWatch(config.speed_window_s, self.handle)
        self.port = open_port(
            secret, self.run, self.epoch, self.refusals, receive=self._receive, hung_up=self.hosts.hung_up,
            unsound=self.unsound, idle_s=CUT_OFF * config.host_silence_s,
        )  # fmt: skip
        self._beats, self._answers = dict[str, Heartbeat](), AnswersDue()
        self.books = Bookkeeping(self.keeper.progress, self.write, 3 * config.heartbeat_s, began_s, self._loop.time)
        self._told = ToldOnce(journal if record is not None else None)
        self._sign_s = self._loop.time()
        self._give_sign()
        self.coordinator.roster.lost_agents.update(self._told.lost)
        for told in self._told.there:
            self._recall_host(told)
        self.write("coordinator_started", epoch=self.epoch, pid=os.getpid(), takeover=record is not None)
        if record is None or record.view is None:
            self._set_timer(m.SetTimer(name="start", after_s=config.start_s))

    def _give_sign(self) -> None:
        """For the launcher, which replaces a coordinator that was stopped."""
        now, before_s = self._loop.time(), self._sign_s
        self._sign_s = now
        if (now - before_s > _ASLEEP_S or not self.journal.held) and self._superseded():
            return  # it was stopped, or cut off from the record, and another has taken its place
        self.progress.alive()
        for name, sent_s in self._answers.due(self.journal.confirmed_s):
            self.send([name], HeartbeatReply(epoch=self.epoch, sent_s=sent_s))
        for silent in self.hosts.look(now, self.coordinator.awaited, self.port.crowded):
            self._lose(silent)
        self.port.turn()
        self._loop.call_later(BEAT_S, self._give_sign)

    # --- what is said to it ---------------------------------------------------------------------------------------
    def unsound(self, error: BaseException | None) -> None:
        """A machine that raised decides nothing more: the launcher starts another from the record."""
        if error is not None and not self.finished.done():
            self.finished.set_exception(error)

    def _receive(self, role: str, name: str, body: bytes) -> None:
        message = _decoder.decode(body)
        check_speaker(role, name, message, self._agent_of)
        self.progress.alive()
        if isinstance(message, hm.HostHere):
            self._host_here(name, message)
            return
        message = self.hosts.heard(name, message, self._loop.time())
        if isinstance(message, hm.Awaited):
            return
        if isinstance(message, Heartbeat):
            self._beat(name, message)
            return
        if isinstance(message, saving.FROM_MEMBER):
            self.keeper.received(name, message)
            return
        if isinstance(message, saving.SaveAsked):
            self.keeper.wanted(message.reason)
            return
        if self.keeper.before(message, self.handle):
            return
        if isinstance(message, m.Hello):
            message = self.keeper.returned(message, self.handle)
        if isinstance(message, m.AgentHello) and self._told.agent_is_news(name, message.pid):
            self.write("agent_started", agent=name, pid=message.pid, **self.hosts.facts(name))
        if isinstance(message, m.Spawned) and not self._told.replica_is_news(message.member):
            return  # an agent says it again: an earlier coordinator may have died with it
        for exited in message.exits if isinstance(message, m.AgentGone) else [message]:
            if isinstance(exited, m.Exited):
                self._count(exited.member, exited.steps)
                self._write_progress()
        if isinstance(message, m.Formed) and self._told.view_is_news(message.view):
            self._write_progress()  # it says at which step: first, since when
        self.handle(message)
        if isinstance(message, m.Hello):
            self.keeper.greet(name)
        elif isinstance(message, m.AgentGone) and message.agent not in self._told.lost:
            self.write("agent_lost", agent=message.agent, cause=message.cause, replicas=[])  # before it had said a word

    # --- hosts ---------------------------------------------------------------------------------------------------
    def _recall_host(self, told: events.AgentStarted) -> None:
        if told.host:
            said = hm.HostHere(
                agent=told.agent, host=told.host, place=told.place, pid=told.pid, address=told.address,
                slots=told.slots, sent_s=0.0,
            )  # fmt: skip
            self.hosts.recall(said, self._loop.time())
            self.coordinator.roster.slots[told.agent] = told.slots

    def _host_here(self, name: str, said: hm.HostHere) -> None:
        """A host offers itself: it is taken and told what it needs, or it is turned away."""
        over, refused = self.hosts.take(said, self._loop.time())
        if over is not None:
            self._lose(over)
        if refused is not None:
            reason, remedy = refused
            self.write("notice", level="warning", text=f"host {said.host} at {said.address} was turned away: {reason}")
            raise SentAway(hm.Turned(epoch=self.epoch, reason=reason, remedy=remedy))
        self.handle(said)
        self.send([name], briefing(self.epoch, self._environ))

    def _lose(self, silent: hm.HostSilent) -> None:
        """Nothing is heard of a host. Should it live, it finds its connections closed, and comes back at once."""
        gone = self.hosts.processes(silent.agent)
        self.handle(silent)
        self._told.agent_gone(silent.agent)
        self.port.hang_up(gone)

    def _agent_of(self, member: str) -> str:
        peer = self.coordinator.roster.peers.get(member)
        return peer.agent if peer is not None else ""

    def _beat(self, name: str, beat: Heartbeat) -> None:
        if self._superseded() or not self.journal.held:  # a stale coordinator must prolong nobody's lease
            return
        self._beats[name] = beat
        for reason, (count, who) in beat.refused.items():
            self.refusals.note(f"{name}'s socket", reason, who, count)
        answered = self._answers.heard(name, beat.sent_s, self._loop.time(), self.journal.confirmed_s)
        if answered is not None:
            self.send([name], HeartbeatReply(epoch=self.epoch, sent_s=answered))
        peer = self.coordinator.roster.peers.get(name)
        if peer is not None and beat.committed > peer.committed:
            peer.committed = beat.committed
        if peer is not None and (said := self.books.heard(beat)) is not None:
            self.links.heard(name, said, self._loop.time())
            self.speeds.heard(name, said, self.coordinator.view, self._loop.time())
        self._count(name, beat.steps)
        view = self.coordinator.view
        if view is not None and name == view.members[0]:
            self._write_progress()
            self._write_certified(beat)

    def _count(self, member: str, steps: Iterable[StepTime]) -> None:
        self._counted(self.books.steps(member, steps, self.coordinator.settings.num_replicas))

    def _counted(self, commits: Iterable[tuple[float, float]]) -> None:
        awaited = [self.coordinator.reports.committed(before_s, at_s) for before_s, at_s in commits]
        if any(awaited):
            self.handle(m.Resumed())

    def _write_progress(self, *, last: bool = False) -> None:
        members = self.coordinator.view.members if self.coordinator.view is not None else ()
        messages = sum(self._beats[member].sent_messages for member in members if member in self._beats)
        self._counted(self.books.tell(messages, last=last))

    def _write_certified(self, beat: Heartbeat) -> None:
        new = beat.certified
        if new is not None and self._told.certified_is_news(new.step):
            self.write("certified", step=new.step, share=new.share, audited=new.audited)

    # --- the machine ---------------------------------------------------------------------------------------------
    def handle(self, event: Any) -> None:
        """One event through the machine, and its actions carried out in order."""
        for action in self.keeper.with_unsaved(self.coordinator.handle(self._loop.time(), event)):
            if isinstance(action, m.Persist):
                self._persist(action.record)
            elif isinstance(action, m.Tell):
                self._tell(action)
            elif isinstance(action, m.SetTimer):
                self._set_timer(action)
            elif isinstance(action, m.JournalEntry):
                if action.kind == "recovery" and not self.coordinator.ever_formed:
                    continue  # who ended before anything was trained was not outlasted; its exit is on record
                self.write(action.kind, **action.fields)
                self.books.wrote(action.kind, action.fields)
            elif isinstance(action, m.Finish):
                self._finish(action)
            if self.finished.done() and not isinstance(action, m.Tell | m.Finish | m.JournalEntry):
                return
        self.keeper.look()

    def _persist(self, record: m.FleetRecord) -> None:
        data = msgspec.msgpack.encode(record)
        if data == self._stored and self.journal.held:  # else another's may be there: a write says whether
            return
        newest = record.planned or record.view
        self.probe(Phase.PERSIST, newest.id.n if newest else 0)
        # What led to this record comes first: a successor that reads it takes what it says for told.
        self.journal.flush(_FIRST_S)
        if not self.journal.put(self.epoch, saving.COORDINATOR_RECORD, data):
            self.handle(m.Superseded())
            return
        self._stored = data

    def _superseded(self) -> bool:
        """Whether a newer coordinator holds the epoch; then this one stops."""
        if self.journal.epoch > self.epoch and not self.finished.done():
            self.handle(m.Superseded())
        return self.finished.done()

    def _tell(self, tell: m.Tell) -> None:
        if isinstance(tell.message, m.Install | m.Amend | m.Notify | m.Take):
            self.probe(Phase.TELL, _number(tell.message))
        self.send(tell.to, tell.message)

    def send(self, names: Iterable[str], message: Any) -> None:
        """To members by name; who is not connected misses it."""
        self.port.send(names, frame(message))

    def _set_timer(self, timer: m.SetTimer) -> None:
        old = self._timers.pop(timer.name, None)
        if old is not None:
            old.cancel()
        if timer.after_s != float("inf"):
            self._timers[timer.name] = self._loop.call_later(timer.after_s, self.handle, m.Timer(name=timer.name))

    def write(self, kind: str, **fields: Any) -> None:
        """Append an event to the journal, with the time."""
        if kind == "agent_lost":
            self._told.lost.add(fields["agent"])
        event = msgspec.convert({"kind": kind, "at_s": self.now_s(), **fields}, events.AnyEvent)
        self.journal.append(event)
        self.keeper.heard(event)

    def now_s(self) -> float:
        """Seconds since 1970 by a clock that never jumps: the wall's when the run began on this host, and since."""
        return self._began_s + self._loop.time()

    def _finish(self, finish: m.Finish) -> None:
        if self.finished.done():
            return
        self.refusals.close()
        if not finish.detail.startswith("superseded"):
            self._write_end(finish)
        self.finished.set_result(finish.exit_code)

    def _write_end(self, finish: m.Finish) -> None:
        self._write_progress(last=True)
        view = self.coordinator.view or self._taken_over
        committed = [peer.committed for peer in self.coordinator.roster.peers.values()]
        committed.append(self.keeper.saved_in(view.id if view else None))  # heartbeats come later than saves
        end = events.RunFinished(
            at_s=self.now_s(), outcome=finish.outcome, steps=max(finish.steps, *committed), detail=finish.detail,
            exit_code=finish.exit_code, seconds={},
        )  # fmt: skip
        if self.journal.flush(_FLUSH_S):
            from outlast.observe import accounting

            story = (entry.event for entry in self.journal.each())
            end = msgspec.structs.replace(end, seconds=accounting(itertools.chain(story, [end])).seconds())
        self.journal.append(end)


def _number(message: m.Install | m.Amend | m.Notify | m.Take) -> int:
    """The view that a message is about."""
    if isinstance(message, m.Amend):
        return message.delta.id.n
    if isinstance(message, m.Take):
        return message.order.next.id.n if message.order.next is not None else message.order.view.n
    return message.view.n if isinstance(message, m.Notify) else message.view.id.n


async def _run(environ: dict[str, str]) -> int:
    run_dir = Path(environ["OUTLAST_RUN_DIR"])
    config = decoded(environ["OUTLAST_CONFIG"])
    progress = Progress(Region(Progress.SIZE, fd=int(environ["OUTLAST_PROGRESS_FD"])))
    journal = Journal.open_writer(run_dir, lock_fd=int(environ["OUTLAST_LOCK_FD"]))
    turn = await_turn(environ, journal, config, progress.alive)
    if turn.exit_code is not None:
        journal.close()
        return turn.exit_code
    server = Server(journal, config, bytes.fromhex(environ["OUTLAST_SECRET"]), progress, turn.began_s)
    for end in turn.takeovers:
        server.write("recovery", **end, view=[server.epoch, 0])
    if turn.takeovers:
        journal.flush(0.5)  # if this one is lost soon as well, what it took over from is told all the same
    sock = socket.socket(fileno=int(environ["OUTLAST_LISTEN_FD"]))
    asyncio.get_running_loop().set_exception_handler(lambda _, context: server.unsound(context.get("exception")))
    inherited = server.coordinator.ended is not None
    server.port.open(sock, tls_of(config.tls))
    server.hosts.opened(asyncio.get_running_loop().time())
    end_calls = begin_calls(environ, config.record, server.coordinator, server.port, server.unsound)
    code = await server.finished
    end_calls()
    if journal.epoch == server.epoch:
        journal.tell_end(code, _FLUSH_S)
    if inherited:  # members that still come back would else never hear that it was a good end
        await asyncio.sleep(_FAREWELL_S)
    await server.port.drain()
    await server.keeper.close()
    await server.port.close()
    journal.close()
    return code


def main() -> int:
    """Entry of the coordinator's process; its exit code is the run's. An engine's notice goes to all processes of a
    job at once. What it means for the run the launcher says; this process would only be missed."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return asyncio.run(_run(dict(os.environ)))


if __name__ == "__main__":
    sys.exit(main())
