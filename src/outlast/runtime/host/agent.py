"""The agent: starts, watches and kills the ranks of one host, and tells the coordinator what it sees for certain.

One thread, one poll loop over pidfds, the coordinator's socket and delayed starts; no torch. Sensors are read in
threads of their own, which touch nothing of this (`_host_readings.py`). Ranks die with it. It decides nothing: what a
suspect's evidence means is `core/policy`'s matter.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from outlast.config import decoded
from outlast.core.phases import OWNED, Phase
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.errors import WireRefusal
from outlast.runtime.host._children import start
from outlast.runtime.host._host_doubt import HostDoubt
from outlast.runtime.host._host_readings import HostReadings, sources_of
from outlast.runtime.host._nursery import Preloading
from outlast.runtime.host._rank_blocks import BlocksShown, exit_of
from outlast.runtime.host._replica_ranks import (
    Rank,
    absent,
    cause_of,
    detail_of,
    evidence_of,
    free_number,
    patience_s,
    suspect,
    works,
)
from outlast.runtime.host._snapshot_memory import slots_of
from outlast.runtime.host._stopped_children import LOOK_S, Stopped
from outlast.runtime.host.silence import BEAT_S, cpu_s, excused, kernel_state
from outlast.runtime.settings.fault_points import Probe
from outlast.runtime.transport.endpoints import place_here, read_host_port
from outlast.runtime.transport.frames import SILENT_BEATS, Heartbeat, HeartbeatReply, Link
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.transport.regions import Region

__all__ = ["Agent", "host_of", "main"]

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    m.FromCoordinator | HeartbeatReply | hm.Briefing | hm.Turned
)
_LOOK_S = 0.15  # between two looks at a suspect's processor time
_BUSY = 0.2  # share of that time that counts as working
_GRACE_S = 3.0  # between asking a rank to stop and killing it
_HOST_BEAT_S = 0.2  # of an agent on whose host others may wait: how soon its silence is noticed
_ENDS = {"finished": 0, "turned away": 4, "left alone": 3, "asked to leave": 143}  # exit codes; 1 for another end


class Agent:
    """See the module. `environ`: what its ranks inherit, with the run's secrets; `command`: the user's script; `link`:
    to the coordinator, if there is one already."""

    def __init__(self, name: str, environ: dict[str, str], command: list[str], link: Link | None = None) -> None:
        self.name, self.environ, self.command = name, environ, command
        self.address, self.run_id = read_host_port(environ["OUTLAST_COORDINATOR"]), environ.get("OUTLAST_RUN", "")
        self.secret = bytes.fromhex(environ["OUTLAST_SECRET"])
        self.run_dir = Path(environ["OUTLAST_RUN_DIR"])
        config = decoded(environ["OUTLAST_CONFIG"])
        self.heartbeat_s, self.outside_s, self.formation_s = config.heartbeat_s, config.outside_s, config.formation_s
        self.width = config.ranks
        self.nth, self.num_agents = (int(n) for n in environ.get("OUTLAST_AGENT_OF", "0/1").split("/"))
        self.host = host_of(name, environ)
        self.grace_s, self.alone_s = _GRACE_S, math.inf
        if self.host is not None:
            self.heartbeat_s = min(self.heartbeat_s, _HOST_BEAT_S)
            self.grace_s, self.lease_s = max(_GRACE_S, config.stop_save_s), config.lease_s
            self.alone_s = config.lease_s + config.start_s
        self.shown = BlocksShown(environ)
        sign_fd = environ.get("OUTLAST_SIGN_FD")
        self.sign = Progress(Region(Progress.SIZE, fd=int(sign_fd) if sign_fd else None))
        self.probe = Probe(name if "." in name else f"{name}.1", environ.get("OUTLAST_FAULTS"))
        self.hold_fds = slots_of(environ)
        self.ranks: dict[str, Rank] = {}
        self.exits: dict[str, m.Exited] = {}
        self.pending, self.tested = set[str](), set[str]()
        self.nursery = Preloading(command, environ, self.hold_fds, config.preload, self.formation_s)
        self.readings = HostReadings(name, self.run_dir, config.readings_s, sources_of(name, config.readings_from))
        self.doubt = HostDoubt(name, self.run_dir)
        self._unborn: list[str] = []  # due, and waiting until the nursery is ready
        self.epoch = self.greetings = 0
        self.link: Link | None = None
        self._first_link = link
        self.stopped = Stopped()
        self.stopping = ""
        self._agenda: list[tuple[float, int, Any]] = []
        self._tie = 0
        self._retry_s = 0.02
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._asked, self._over = "", False
        self._heard_s = self._answered_s = self._beat_s = time.monotonic()

    def ask(self, reason: str) -> None:
        """From a signal's handler: the launcher says that the run is over."""
        self._asked = reason
        os.eventfd_write(self._wake_fd, 1)

    # --- the loop ------------------------------------------------------------------------------------------------
    def run(self) -> int:
        """Until told to stop and all ranks are gone; the exit code."""
        self.nursery.begin()
        self._at(0.0, self._connect)
        self._at(self.heartbeat_s, self._beat)
        self._at(BEAT_S, self._give_sign)
        self._at(LOOK_S, self._look_for_the_stopped)
        if self.readings.wanted:
            self._at(self.readings.interval_s, self._read_host)
        while not (self.stopping and not self.ranks):
            self._turn()
        if self.link is not None:
            self.link.close()
        self.nursery.close()
        self.readings.close()
        self.doubt.close()
        return _ENDS.get(self.stopping, 1)

    def _at(self, delay_s: float, action: Any) -> None:
        self._tie += 1
        heapq.heappush(self._agenda, (time.monotonic() + delay_s, self._tie, action))

    def _turn(self) -> None:
        if self._asked:
            self._stop(self._asked)
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        by_fd = {rank.child.fd: (lead, rank) for lead in self.ranks.values() for rank in lead.all()}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        if self.link is not None:
            poll.register(self.link.sock.fileno(), select.POLLIN)
        nursery_fd = self.nursery.fd
        if nursery_fd >= 0:
            poll.register(nursery_fd, select.POLLIN)
        due = self._agenda[0][0] if self._agenda else time.monotonic() + 3600.0
        for fd, _ in poll.poll(max(0.0, due - time.monotonic()) * 1000.0):
            if fd == self._wake_fd:
                os.eventfd_read(fd)
            elif fd in by_fd:
                self._ended(*by_fd[fd])
            elif fd == nursery_fd:
                self.nursery.hear()
                self._spawn_unborn()
            else:
                self._receive()
        while self._agenda and self._agenda[0][0] <= time.monotonic():
            heapq.heappop(self._agenda)[2]()

    def _read_host(self) -> None:
        for alarm in self.readings.turn() if self.link is not None else ():  # nobody hears: nothing is asked
            self.doubt.alarmed(alarm)
            self._send(alarm)
        self._at(self.readings.interval_s, self._read_host)

    def _give_sign(self) -> None:
        """For the launcher, which continues an agent that was stopped."""
        self.sign.alive()
        self._at(BEAT_S, self._give_sign)

    # --- the coordinator -----------------------------------------------------------------------------------------
    def _connect(self) -> None:
        if self.link is not None or self._asked or self._over:  # the coordinator is gone for good
            return
        try:
            first, self._first_link = self._first_link, None
            self.link = first or Link(self.address, self.secret, "agent", self.name, 2.0, self.run_id)
        except (OSError, WireRefusal, msgspec.DecodeError):
            self._retry_s = min(0.5, self._retry_s * 1.5)
            self._at(self._retry_s, self._connect)
            return
        self._retry_s, self._heard_s = 0.02, time.monotonic()
        self._offer()
        for exited in self.exits.values():  # before the list, from which their absence would speak less clearly
            self._send(exited)
        members = (*self.ranks, *sorted(self.pending))
        self.greetings += 1
        self._send(
            m.AgentHello(agent=self.name, pid=os.getpid(), members=members, epoch=self.epoch, number=self.greetings)
        )
        for rank in list(self.ranks.values()):
            self._send(m.Spawned(member=rank.name, agent=self.name, pid=rank.child.pid))

    def _offer(self) -> None:
        """This host's slots, where the run spans several; none once it is asked to stop."""
        if self.host is not None:
            slots = -1 if self._asked else self.host.slots
            self._send(msgspec.structs.replace(self.host, slots=slots, sent_s=time.monotonic()))

    def _send(self, message: Any) -> None:
        if self.link is not None:
            try:
                self.link.send(message)
            except OSError:
                self._disconnected()

    def _disconnected(self) -> None:
        if self.link is not None:
            self.link.close()
        self.link = None
        self._at(self._retry_s, self._connect)

    def _beat(self) -> None:
        """Now and then: a heartbeat, and a look at who is silent (in a view of one nobody else would notice)."""
        now = time.monotonic()
        if self.link is not None and now - self._heard_s > SILENT_BEATS * self.heartbeat_s:
            self._disconnected()
        self._send(Heartbeat(sender=self.name, sent_s=now))
        for rank in self._every():
            if rank.progress.changes and self._too_silent(rank, now):
                self._examine(rank.name)
        idle = not (self.ranks or self.pending or self.stopping)
        for result in self.doubt.turn(idle=idle) if self.link is not None else ():
            self._send(result)
        self._reap_strangers()
        if self.host is not None:
            self._answered_s = excused(self._answered_s, now - self._beat_s, now, self.lease_s)
            self._mind_the_lease(now - self._answered_s)
        self._beat_s = now
        self._at(self.heartbeat_s, self._beat)

    def _mind_the_lease(self, alone_s: float) -> None:
        """Others may have gone on without this host: its replicas end with their lease, and it with its patience."""
        if alone_s > self.lease_s:
            for rank in list(self.ranks.values()):
                self._kill(rank.name, f"no word of the coordinator for {alone_s:.0f} s, longer than the lease")
        if alone_s > self.alone_s and not self.stopping:
            self._stop("left alone")

    def _look_for_the_stopped(self) -> None:
        """Continue each child once; of who is stopped again the coordinator hears."""
        now = time.monotonic()
        for rank in self._every():
            found, for_s = self.stopped.look(rank.key, rank.child.pid, now)
            if found == "once":
                rank.child.send(signal.SIGCONT)
                self._send(m.Continued(member=rank.name, for_s=for_s))
            elif found == "again":
                self._examine(rank.name)
        if self.nursery.fd >= 0 and self.stopped.look("", self.nursery.pid, now)[0]:
            self.nursery.wake()
        self._at(LOOK_S, self._look_for_the_stopped)

    def _reap_strangers(self) -> None:
        """What was adopted beside a rank: a loader of one that died at that moment, a rank whose number came late."""
        known = {self.nursery.pid, self.doubt.pid, *(rank.child.pid for rank in self._every())}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in known:  # is dealt with where it is waited for; the others when it has been
                    return
                os.waitpid(ended.si_pid, 0)

    def _too_silent(self, rank: Rank, now_s: float) -> bool:
        """Beyond its deadline. Who is stopped is looked after beside this."""
        phase, _, _, alive_s, allowed_s = rank.progress.read()
        limit_s = min(allowed_s, self.outside_s) if phase in OWNED else self.outside_s
        return phase is not Phase.IDLE and now_s - alive_s > limit_s and kernel_state(rank.child.pid)[0] != "T"

    def _receive(self) -> None:
        link = self.link
        if link is None:
            return
        try:
            message = link.receive(_decoder)
        except (OSError, WireRefusal, msgspec.DecodeError):
            self._disconnected()
            return
        self._heard_s = time.monotonic()
        if isinstance(message, hm.Turned | hm.Briefing):  # of whichever run: its epochs may be below ours
            self._told_of_the_run(message)
        if message.epoch < self.epoch or self._over:
            return
        self.epoch = message.epoch
        if isinstance(message, HeartbeatReply):
            self._answered_s = message.sent_s
        elif isinstance(message, m.Spawn):
            self._order(message)
        elif isinstance(message, m.Kill):
            self._kill(message.member, message.reason)
        elif isinstance(message, m.Examine):
            self._examine(message.member)
        elif isinstance(message, m.Continue) and message.member in self.ranks:
            for rank in self.ranks[message.member].all():
                rank.child.send(signal.SIGCONT)
        elif isinstance(message, m.Stop):
            self._stop(message.reason)

    def _told_of_the_run(self, said: hm.Turned | hm.Briefing) -> None:
        """Nothing of one run ever joins another that has taken its place, whatever it is told there."""
        another = said.run if isinstance(said, hm.Turned) else said.run_id
        if isinstance(said, hm.Briefing) and another == self.run_id:
            return
        self._over, why = True, f"run {self.run_id} is over: {another} is in its place"
        if isinstance(said, hm.Turned):
            why = f"turned away: {said.reason}\n  remedy: {said.remedy}"
        print(f"outlast: {why}", file=sys.stderr, flush=True)
        for name in (*self.ranks, *self.pending):
            self._kill(name, why)
        self._stop("left alone" if another else "turned away")

    # --- ranks ---------------------------------------------------------------------------------------------------
    def _order(self, spawn: m.Spawn) -> None:
        """Start it after its delay; the same incarnation never twice."""
        if spawn.member in self.exits:
            self._send(self.exits[spawn.member])
        elif spawn.member not in self.ranks and spawn.member not in self.pending:
            self.pending.add(spawn.member)
            self.tested.update([spawn.member] if spawn.tested else [])
            self._at(spawn.after_s, lambda: self._spawn(spawn.member))

    def _spawn_unborn(self) -> None:
        unborn, self._unborn = self._unborn, []
        for member in unborn:
            self._spawn(member)

    def _spawn(self, member: str) -> None:
        if self.stopping or member not in self.pending:
            return
        if self.nursery.loading:
            self._unborn.append(member)
            self._at(self.formation_s, self._spawn_unborn)
            return
        self.pending.discard(member)
        self.probe(Phase.SPAWN)
        started, number = list[Rank](), free_number(self.ranks.values())
        try:
            for place in range(self.width):
                started.append(self._start(member, place, number))
        except OSError as error:
            for rank in started:
                rank.child.send(signal.SIGKILL)
                rank.child.wait()
            self._send(m.SpawnFailed(member=member, error=str(error)))
            return
        lead, *lead.siblings = started
        self.ranks[member] = lead
        self.shown.began(member, lead.progress.region.fd, lead.child.fd)
        self._at(self.formation_s, lambda: self._look_whether_joined(member))
        self._send(m.Spawned(member=member, agent=self.name, pid=lead.child.pid))

    def _start(self, member: str, place: int, number: int) -> Rank:
        key = f"{member}.rank{place}" if place else member
        log = self.run_dir / "logs" / f"{key}.log"
        region = Region(Progress.SIZE, name=f"outlast-{key}")
        environ = {
            "OUTLAST_MEMBER": member,
            "OUTLAST_PLACE": str(place),
            "OUTLAST_DEVICE": str((number * self.num_agents + self.nth) * self.width + place),
            "OUTLAST_AGENT": self.name,
            "OUTLAST_PARENT": str(os.getpid()),
            "OUTLAST_PROBATION": "true" if member in self.tested else "",
            "OUTLAST_PROGRESS_FD": str(region.fd),
            "PYTHONUNBUFFERED": "1",
        }
        child = self.nursery.start(environ, log, region.fd) or start(
            self.command, environ=self.environ | environ, log=log, pass_fds=[region.fd, *self.hold_fds]
        )
        return Rank(member, child, Progress(region), log, key=key, number=number)

    def _every(self) -> list[Rank]:
        """All ranks that have not ended."""
        return [rank for lead in self.ranks.values() for rank in lead.all()]

    def _look_whether_joined(self, member: str) -> None:
        rank = self.ranks.get(member)
        if rank is not None and not rank.progress.joined:
            self._send(m.Unjoined(member=member, for_s=self.formation_s))

    def _ended(self, lead: Rank, rank: Rank) -> None:
        noticed = time.monotonic()
        how = rank.child.reap(sweep=self.stopping not in ("", "finished"))
        if how is None:
            return
        rank.how = how
        self.stopped.forget(rank.key)
        left = lead.all()
        if left and (how.signal is not None or how.code != 0):  # a replica lives and dies as a whole (38)
            self._at(patience_s(how), lead.sweep)
        if not left:
            self._all_ended(lead, lead.first_to_fail(), noticed)

    def _all_ended(self, lead: Rank, rank: Rank, noticed: float) -> None:
        """The replica is gone; `rank`: the one that says why."""
        del self.ranks[lead.name]
        how = rank.how
        assert how is not None
        exited = exit_of(lead.name, lead.progress, noticed, cause_of(rank, how), detail_of(rank, how))
        exited = msgspec.structs.replace(exited, code=how.code)
        for each in (lead, *lead.siblings):
            each.progress.region.close()
        self._gone(exited)
        self.shown.ended(lead.name)

    def _gone(self, exited: m.Exited) -> None:
        self.exits[exited.member] = exited
        self._send(exited)

    def _kill(self, member: str, reason: str) -> None:
        rank = self.ranks.get(member)
        if member in self.pending:
            self.pending.discard(member)
            self._gone(m.Exited(member=member, cause="evicted", detail=reason, joined=False))
        elif rank is not None:
            rank.killed_for = rank.killed_for or reason
            self.probe(Phase.KILL)
            for each in rank.all():
                each.killed_for = rank.killed_for
                each.child.send(signal.SIGKILL)

    def _stop(self, reason: str) -> None:
        """The run is over. A script that finished training may take its time; any other end is enforced."""
        if self.stopping:
            return
        self.stopping = reason or "stopped"
        if self._asked:
            self._offer()
        for rank in self.ranks.values():
            if reason != "finished":
                for each in rank.all():
                    each.child.send(signal.SIGCONT)
                rank.child.send(signal.SIGTERM)
            elif rank.progress.changes == 0:
                self._kill(rank.name, "it was still starting when the run finished")
        self._at(self.grace_s, self._enforce)

    def _enforce(self, last: bool = False) -> None:
        """After a good end a script that has left its training may take its time. Who only waits for somebody's word
        is woken, in case it was stopped and cannot hear it, and killed if it has not heard of the end by then."""
        for rank in list(self.ranks.values()):
            phase, step = rank.progress.read()[:2]
            if self.stopping != "finished" or phase is not Phase.IDLE or (last and step >= 0):
                self._kill(rank.name, f"the run was {self.stopping}")
            elif step >= 0:
                rank.child.send(signal.SIGCONT)
        if not last and self.ranks:
            self._at(self.formation_s, lambda: self._enforce(last=True))

    # --- evidence ------------------------------------------------------------------------------------------------
    def _examine(self, member: str) -> None:
        rank = self.ranks.get(member)
        if rank is None:
            self._send(absent(member))
            return
        for each in rank.all():
            state, traced = kernel_state(each.child.pid)
            if state in "Tt":
                self._say(each, state, traced, False)
                return
        before = {each.child.pid: cpu_s(each.child.pid) for each in rank.all()}
        self._at(_LOOK_S, lambda: self._look_again(rank, before))

    def _look_again(self, rank: Rank, before_s: Mapping[int, float]) -> None:
        """The replica is slow, and hangs not, while any of its ranks works."""
        living = [each for each in rank.all() if each.child.pid in before_s]
        if rank.name in self.ranks and living:
            chosen, deaf = suspect(living, time.monotonic(), self.outside_s, self.formation_s)
            state, traced = kernel_state(chosen.child.pid)
            advanced = works(living, before_s, _BUSY * _LOOK_S)
            self._say(chosen, state, traced, advanced, deaf and not advanced)

    def _say(self, rank: Rank, state: str, traced: bool, advanced: bool, deaf: bool = False) -> None:
        self._send(evidence_of(rank, state, traced, advanced, deaf, self.formation_s))


def host_of(name: str, environ: Mapping[str, str]) -> hm.HostHere | None:
    """What an agent says of its host in a run that spans several; None in one that does not."""
    address = environ.get("OUTLAST_ADDRESS", "")
    if not address:
        return None
    return hm.HostHere(
        agent=name, host=environ["OUTLAST_HOST"], place=place_here(), pid=os.getpid(), address=address,
        slots=int(environ.get("OUTLAST_HOST_SLOTS", "0")),
    )  # fmt: skip


def main() -> int:
    """Entry of the agent's process: its name, then the script's command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    agent = Agent(sys.argv[1], dict(os.environ), sys.argv[2:])
    signal.signal(signal.SIGTERM, lambda *_: agent.ask("stopped"))
    signal.signal(signal.SIGUSR1, lambda *_: agent.ask("finished"))
    return agent.run()


if __name__ == "__main__":
    sys.exit(main())
