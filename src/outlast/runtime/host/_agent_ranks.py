"""The ranks of one host: how they are started, examined and killed, and how the coordinator hears of it.

What an agent has is put together here, once. When it does what, and what it is told, is `agent.py`'s.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from outlast.config import decoded
from outlast.core.phases import Phase
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.health import own_note
from outlast.runtime.host._agenda import Agenda
from outlast.runtime.host._agent_line import AgentLine
from outlast.runtime.host._heir import HeirWatch
from outlast.runtime.host._host_doubt import HostDoubt
from outlast.runtime.host._host_lease import HostLease
from outlast.runtime.host._host_readings import HostReadings, sources_of
from outlast.runtime.host._host_system import HERE, HostSystem
from outlast.runtime.host._rank_blocks import BlocksShown, exit_of
from outlast.runtime.host._rank_starter import RankStarter
from outlast.runtime.host._replica_ranks import (
    Rank,
    Silence,
    absent,
    cause_of,
    detail_of,
    evidence_of,
    patience_s,
    suspect,
    works,
)
from outlast.runtime.host._stopped_children import Stopped
from outlast.runtime.settings.fault_points import Probe
from outlast.runtime.transport.coordinator_place import CoordinatorPlace
from outlast.runtime.transport.endpoints import place_here, read_host_port
from outlast.runtime.transport.frames import Link
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.transport.regions import Region
from outlast.runtime.transport.tls import tls_of

__all__ = ["AgentRanks"]

_LOOK_S = 0.15  # between two looks at a suspect's processor time
_BUSY = 0.2  # share of that time that counts as working
_LOOKS = 4  # whether a script that takes no processor time has joined
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
    the script; `link`: to the coordinator, if there is one already; `system`: this host's clock and processes; `dial`:
    how the coordinator is called."""

    def __init__(
        self,
        name: str,
        environ: dict[str, str],
        command: list[str],
        link: Link | None = None,
        *,
        system: HostSystem = HERE,
        dial: Callable[..., Link] = Link,
    ) -> None:
        self.name, self.system = name, system
        self.run_id = environ.get("OUTLAST_RUN", "")
        run_dir, secret = Path(environ["OUTLAST_RUN_DIR"]), bytes.fromhex(environ["OUTLAST_SECRET"])
        config = decoded(environ["OUTLAST_CONFIG"])
        moves = config.record != "sqlite"
        first, folder = read_host_port(environ["OUTLAST_COORDINATOR"]), run_dir if moves else None
        place = CoordinatorPlace(first, folder, self.run_id)
        self.line = AgentLine(name, self.run_id, secret, place, link, system, dial, tls_of(config.tls))
        self.heir = HeirWatch(environ, system)
        self.heartbeat_s, self.outside_s, self.formation_s = config.heartbeat_s, config.outside_s, config.formation_s
        self.host = host_of(name, environ)
        self.grace_s = _GRACE_S
        self.lease: HostLease | None = None
        if self.host is not None:
            self.heartbeat_s = min(self.heartbeat_s, _HOST_BEAT_S)
            self.grace_s = max(_GRACE_S, config.stop_save_s)
            self.lease = HostLease(config, system.now_s())
        self.shown = BlocksShown(environ)
        sign_fd = environ.get("OUTLAST_SIGN_FD")
        self.sign = Progress(Region(Progress.SIZE, fd=int(sign_fd) if sign_fd else None), system.now_ns)
        self.probe = Probe(name if "." in name else f"{name}.1", environ.get("OUTLAST_FAULTS"))
        self.starter = RankStarter(name, environ, command, config, system)
        self.ranks: dict[str, Rank] = {}
        self.exits: dict[str, m.Exited] = {}
        self.pending, self.tested = set[str](), set[str]()
        sources = sources_of(name, config.readings_from)
        self.readings = HostReadings(name, run_dir, config.readings_s, sources, system.now_s)
        self.doubt = HostDoubt(name, run_dir, system=system)
        self._unborn: list[str] = []  # due, and waiting until the nursery is ready
        self.epoch = self.greetings = 0
        self.stopped = Stopped(system.state)
        self.stopping, self.finished_code = "", 0
        self.agenda = Agenda(system.now_s)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._asked, self._over = "", False
        self._seen_s = system.now_s()

    def _connect(self) -> None:
        if self.line.link is not None or self._asked or self._over:  # the coordinator is gone for good
            return
        began_s = self.system.now_s()
        connected = self.line.connect()
        if self.lease is not None:
            self.lease.tried(min(self.system.now_s() - began_s, 2 * self.line.limit_s))
        if not connected:
            self.agenda.at(self.line.retry_s, self._connect)
            return
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
            self._send(msgspec.structs.replace(self.host, slots=slots, sent_s=self.system.now_s()))

    def _send(self, message: Any) -> None:
        try:
            self.line.send(message)
        except OSError:
            self._disconnected()

    def _disconnected(self) -> None:
        self.line.drop()
        self.agenda.at(self.line.retry_s, self._connect)

    def _order(self, spawn: m.Spawn) -> None:
        """Start it after its delay; the same incarnation never twice."""
        if spawn.member in self.exits:
            self._send(self.exits[spawn.member])
        elif spawn.member not in self.ranks and spawn.member not in self.pending:
            self.pending.add(spawn.member)
            self.tested.update([spawn.member] if spawn.tested else [])
            self.agenda.at(spawn.after_s, lambda: self._spawn(spawn.member))

    def _spawn_unborn(self) -> None:
        unborn, self._unborn = self._unborn, []
        for member in unborn:
            self._spawn(member)

    def _spawn(self, member: str) -> None:
        if self.stopping or member not in self.pending:
            return
        if self.starter.nursery.loading:
            self._unborn.append(member)
            self.agenda.at(self.formation_s, self._spawn_unborn)
            return
        self.pending.discard(member)
        self.probe(Phase.SPAWN)
        try:
            lead = self.starter.start(member, self.ranks.values(), member in self.tested)
        except OSError as error:
            self._send(m.SpawnFailed(member=member, error=str(error)))
            return
        self.ranks[member] = lead
        self.shown.began(member, lead.progress.region.fd, lead.child.fd)
        self.agenda.at(self.formation_s, lambda: self._look_whether_joined(member))
        self._send(m.Spawned(member=member, agent=self.name, pid=lead.child.pid))

    def _every(self) -> list[Rank]:
        """All ranks that have not ended."""
        return [rank for lead in self.ranks.values() for rank in lead.all()]

    def _look_whether_joined(self, member: str, looks: int = 1) -> None:
        """On a busy machine a script may not have come to its first line: who has hardly run is looked at again."""
        rank = self.ranks.get(member)
        if rank is None or rank.progress.joined:
            return
        if looks < _LOOKS and self.system.cpu_s(rank.child.pid) < _BUSY * self.formation_s:
            self.agenda.at(self.formation_s, lambda: self._look_whether_joined(member, looks + 1))
        else:
            self._send(m.Unjoined(member=member, for_s=looks * self.formation_s))

    def _ended(self, lead: Rank, rank: Rank) -> None:
        noticed = self.system.now_s()
        how = rank.child.reap(sweep=self.stopping not in ("", "finished"))
        if how is None:
            return
        rank.how, rank.seen_s = how, self._seen_s
        self.stopped.forget(rank.key)
        lead.see_who_deserted()
        left = lead.all()
        if left and rank.failed:  # a replica lives and dies as a whole (38)
            self.agenda.at(patience_s(how), lead.sweep)
        if not left:
            self._all_ended(lead, lead.first_to_fail(), noticed)

    def _all_ended(self, lead: Rank, rank: Rank, noticed: float) -> None:
        """The replica is gone; `rank`: the one that says why."""
        del self.ranks[lead.name]
        how = rank.how
        assert how is not None
        exited = exit_of(lead.name, lead.progress, noticed, cause_of(rank, how), detail_of(rank, how))
        joined = exited.joined and rank.progress.changes > 0
        # Its script may have been silent for long; whoever is killed from outside lived until then.
        struck_s = rank.seen_s if exited.joined and exited.cause == "signal" else 0.0
        last_s = max(exited.last_alive_s, struck_s)
        exited = msgspec.structs.replace(exited, joined=joined, code=how.code, last_alive_s=last_s)
        for each in (lead, *lead.siblings):
            each.progress.region.close()
        self._gone(exited)
        self.shown.ended(lead.name)
        self._show_ends()

    def _show_ends(self) -> None:
        """Whose end is told the launcher may forget; not of an agent that stops, which may find no coordinator."""
        if self.line.link is not None and not self.stopping:
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
        self.agenda.at(self.grace_s, self._enforce)

    def _enforce(self, last: bool = False) -> None:
        """After a good end a script that has left its training may take its time. Who only waits for somebody's word,
        or was stopped, is woken, as it could not hear of the end, and killed if it has not heard by then."""
        for rank in list(self.ranks.values()):
            phase, step = rank.progress.read()[:2]
            idle = phase is Phase.IDLE
            asleep = not last and any(self.system.state(each.child.pid)[0] == "T" for each in rank.all())
            if self.stopping != "finished" or not (idle or asleep) or (last and step >= 0):
                self._kill(rank.name, f"the run was {self.stopping}")
            elif step >= 0 or not idle:
                for each in rank.all():
                    each.child.send(signal.SIGCONT)
        if not last and self.ranks:
            self.agenda.at(self.formation_s, lambda: self._enforce(last=True))

    def _examine(self, member: str) -> None:
        rank = self.ranks.get(member)
        if rank is None:
            self._send(absent(member))
            return
        for each in rank.all():
            state, traced = self.system.state(each.child.pid)
            if state in "Tt":
                self._say(each, state, traced, False)
                return
        before = {each.child.pid: self.system.cpu_s(each.child.pid) for each in rank.all()}
        self.agenda.at(_LOOK_S, lambda: self._look_again(rank, before))

    def _look_again(self, rank: Rank, before_s: Mapping[int, float]) -> None:
        """The replica is slow, and hangs not, while any of its ranks works."""
        living = [each for each in rank.all() if each.child.pid in before_s]
        if rank.name in self.ranks and living:
            chosen, deaf = suspect(living, self.system.now_s(), self.outside_s, self.formation_s)
            advanced = works(living, before_s, _BUSY * _LOOK_S, self.system)
            why: Silence = "deaf" if deaf and not advanced else ""
            for each in living:
                if each.progress.read()[0] is Phase.CONNECT and self.system.is_full(each.child.pid):
                    chosen, why = each, "full"
            state, traced = self.system.state(chosen.child.pid)
            self._say(chosen, state, traced, advanced, why)

    def _say(self, rank: Rank, state: str, traced: bool, advanced: bool, why: Silence = "") -> None:
        self._send(evidence_of(rank, state, traced, advanced, why, self.formation_s, self.system.now_s()))
