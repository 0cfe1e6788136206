"""The ranks of one host: how they are started, examined and killed, and how the coordinator hears of it.

What an agent has is put together here, once. When it does what, and what it is told, is `agent.py`'s.
"""

from __future__ import annotations

import heapq
import math
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from outlast.config import decoded
from outlast.core.phases import Phase
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.errors import WireRefusal
from outlast.health import own_note
from outlast.runtime.host._children import start
from outlast.runtime.host._heir import HeirWatch
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
from outlast.runtime.host._stopped_children import Stopped
from outlast.runtime.host.silence import cpu_s, kernel_state
from outlast.runtime.settings.fault_points import Probe
from outlast.runtime.transport.coordinator_place import CoordinatorPlace
from outlast.runtime.transport.endpoints import place_here, read_host_port
from outlast.runtime.transport.frames import Link
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.transport.regions import Region

__all__ = ["AgentRanks"]

_LOOK_S = 0.15  # between two looks at a suspect's processor time


_BUSY = 0.2  # share of that time that counts as working


_GRACE_S = 3.0  # between asking a rank to stop and killing it


_HOST_BEAT_S = 0.2  # of an agent on whose host others may wait: how soon its silence is noticed


def host_of(name: str, environ: Mapping[str, str]) -> hm.HostHere | None:
    """What an agent says of its host in a run that spans several; None in one that does not."""
    address = environ.get("OUTLAST_ADDRESS", "")
    if not address:
        return None
    return hm.HostHere(
        agent=name, host=environ["OUTLAST_HOST"], place=place_here(), pid=os.getpid(), address=address,
        slots=int(environ.get("OUTLAST_HOST_SLOTS", "0")), noted=own_note(os.environ, environ["OUTLAST_HOST"]),
    )  # fmt: skip


class AgentRanks:
    """Starts, watches and ends the ranks of an agent. `environ`: what ranks inherit, with the run's secrets; `command`:
    the script; `link`: to the coordinator, if there is one already."""

    def __init__(self, name: str, environ: dict[str, str], command: list[str], link: Link | None = None) -> None:
        self.name, self.environ, self.command = name, environ, command
        self.run_id = environ.get("OUTLAST_RUN", "")
        self.secret = bytes.fromhex(environ["OUTLAST_SECRET"])
        self.run_dir = Path(environ["OUTLAST_RUN_DIR"])
        config = decoded(environ["OUTLAST_CONFIG"])
        moves = config.record != "sqlite"
        self.place = CoordinatorPlace(read_host_port(environ["OUTLAST_COORDINATOR"]), self.run_dir if moves else None)
        self.linked_to, self.heir = self.place.now(), HeirWatch(environ)
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

    def _at(self, delay_s: float, action: Any) -> None:
        self._tie += 1
        heapq.heappush(self._agenda, (time.monotonic() + delay_s, self._tie, action))

    def _connect(self) -> None:
        if self.link is not None or self._asked or self._over:  # the coordinator is gone for good
            return
        try:
            first, self._first_link = self._first_link, None
            self.linked_to, limit_s = self.place.now(), 1.0 if self.place.moves else 2.0
            self.link = first or Link(self.linked_to, self.secret, "agent", self.name, limit_s, self.run_id)
        except (OSError, WireRefusal, msgspec.DecodeError):
            self._retry_s = min(0.5, self._retry_s * 1.5)
            self._at(self._retry_s, self._connect)
            return
        self._retry_s, self._heard_s = 0.02, time.monotonic()
        self._offer()
        for exited in self.exits.values():  # before the list, from which their absence would speak less clearly
            self._send(exited)
        self._show_ends()
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
        self._show_ends()

    def _show_ends(self) -> None:
        """Whose end is told the launcher may forget; not of an agent that stops, which may find no coordinator."""
        if self.link is not None and not self.stopping:
            self.shown.told()

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
