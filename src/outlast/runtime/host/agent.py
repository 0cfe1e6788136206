"""The agent: starts, watches and kills the ranks of one host, and tells the coordinator what it sees for certain.

One thread, one poll loop over pidfds, the coordinator's socket and delayed starts; no torch. Sensors are read in
threads of their own, which touch nothing of this (`_host_readings.py`). Ranks die with it. It decides nothing: what a
suspect's evidence means is `core/policy`'s matter.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from outlast.core.phases import OWNED, Phase
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.errors import WireRefusal
from outlast.runtime.host._agent_ranks import AgentRanks, host_of
from outlast.runtime.host._host_lease import HostLease
from outlast.runtime.host._replica_ranks import Rank
from outlast.runtime.host._stopped_children import LOOK_S
from outlast.runtime.host.silence import BEAT_S
from outlast.runtime.transport.frames import SILENT_BEATS, Heartbeat, HeartbeatReply

__all__ = ["Agent", "host_of", "main"]

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    m.FromCoordinator | HeartbeatReply | hm.Briefing | hm.Turned
)
_ENDS = {"turned away": 4, "left alone": 3, "asked to leave": 143, "stopped": 143}
"""Exit codes; the run's where it has finished, and 1 for another end."""
_NOT_THE_RUNS = ("turned away", "left alone", "asked to leave")


class Agent(AgentRanks):
    """Does on one host what the coordinator orders. `environ`: what its ranks inherit, with the run's secrets;
    `command`: the user's script; the others as of `AgentRanks`."""

    turned: Callable[[str], None] = staticmethod(lambda _: None)
    """Called in each turn of the loop, with why this host is not in the run, or nothing."""

    def ask(self, reason: str) -> None:
        """From a signal's handler: the launcher says that the run is over."""
        self._asked = reason
        os.eventfd_write(self._wake_fd, 1)

    # --- the loop ------------------------------------------------------------------------------------------------
    def run(self) -> int:
        """Until told to stop and all ranks are gone; the exit code."""
        self.starter.nursery.begin()
        self.agenda.at(0.0, self._connect)
        self.agenda.at(self.heartbeat_s, self._beat)
        self.agenda.at(BEAT_S, self._give_sign)
        self.agenda.at(LOOK_S, self._look_for_the_stopped)
        if self.readings.wanted:
            self.agenda.at(self.readings.interval_s, self._read_host)
        while not (self.stopping and not self.ranks):
            self._turn()
        self.line.drop()
        self.starter.nursery.close()
        self.readings.close()
        self.doubt.close()
        self.heir.close(over=self.stopping not in _NOT_THE_RUNS)
        return self.finished_code if self.stopping == "finished" else _ENDS.get(self.stopping, 1)

    def _turn(self) -> None:
        if self._asked:
            self._stop(self._asked)
        self.turned(self._why_out())
        by_fd = {rank.child.fd: (lead, rank) for lead in self.ranks.values() for rank in lead.all()}
        nursery = self.starter.nursery
        nursery_fd = nursery.fd
        fds = [self._wake_fd, *by_fd, *self.line.fds, *([nursery_fd] if nursery_fd >= 0 else [])]
        found = self.system.ready(fds, 0.0 if self.line.more else self.agenda.left_s())
        looked_s = self.system.now_s()
        for fd in found:
            if fd == self._wake_fd:
                os.eventfd_read(fd)
            elif fd in by_fd:
                self._ended(*by_fd[fd])
            elif fd == nursery_fd:
                nursery.hear()
                self._spawn_unborn()
            else:
                self._receive()
        while self.line.more:
            self._receive()
        self._seen_s = looked_s
        self.agenda.turn()

    def _why_out(self) -> str:
        if self.stopping:
            return f"it is leaving the run: {self.stopping}"
        return "" if self.line.link is not None else "it is not connected with the coordinator"

    def _read_host(self) -> None:
        for alarm in self.readings.turn() if self.line.link is not None else ():  # nobody hears: nothing is asked
            self.doubt.alarmed(alarm)
            self._send(alarm)
        self.agenda.at(self.readings.interval_s, self._read_host)

    def _give_sign(self) -> None:
        """For the launcher, which continues an agent that was stopped."""
        self.sign.alive()
        self.agenda.at(BEAT_S, self._give_sign)

    # --- the coordinator -----------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Now and then: a heartbeat, and a look at who is silent (in a view of one nobody else would notice)."""
        now = self.system.now_s()
        if self.line.lost(SILENT_BEATS * self.heartbeat_s):
            self._disconnected()
        if not self.stopping:
            self.heir.turn()
        self._send(Heartbeat(sender=self.name, sent_s=now))
        for rank in self._every():
            if self._too_silent(rank, now):
                self._examine(rank.name)
        idle = not (self.ranks or self.pending or self.stopping)
        for result in self.doubt.turn(idle=idle) if self.line.link is not None else ():
            self._send(result)
        self._reap_strangers()
        if self.lease is not None:
            self._mind_the_lease(self.lease, self.lease.alone_s(now))
        self.agenda.at(self.heartbeat_s, self._beat)

    def _mind_the_lease(self, lease: HostLease, alone_s: float) -> None:
        """Others may have gone on without this host: its replicas end with their lease, and it with its patience."""
        if alone_s > lease.lease_s:
            for rank in list(self.ranks.values()):
                self._kill(rank.name, f"no word of the coordinator for {alone_s:.0f} s, longer than the lease")
        if alone_s > lease.patience_s and not self.stopping:
            self._stop("left alone")

    def _look_for_the_stopped(self) -> None:
        """Continue each child once; of who is stopped again the coordinator hears."""
        now = self.system.now_s()
        for rank in self._every():
            found, for_s = self.stopped.look(rank.key, rank.child.pid, now)
            if found == "once":
                rank.child.send(signal.SIGCONT)
                self._send(m.Continued(member=rank.name, for_s=for_s))
            elif found == "again":
                self._examine(rank.name)
        if self.starter.nursery.fd >= 0 and self.stopped.look("", self.starter.nursery.pid, now)[0]:
            self.starter.nursery.wake()
        self.agenda.at(LOOK_S, self._look_for_the_stopped)

    def _reap_strangers(self) -> None:
        """What was adopted beside a rank: a loader of one that died at that moment, a rank whose number came late."""
        known = {self.starter.nursery.pid, self.doubt.pid, self.heir.pid, *(rank.child.pid for rank in self._every())}
        self.system.reap_strangers(known)

    def _too_silent(self, rank: Rank, now_s: float) -> bool:
        """Beyond its deadline. Who is stopped is looked after beside this. Before `protect` the script's code runs."""
        phase, _, _, _, allowed_s = rank.progress.read()
        limit_s = min(allowed_s, self.outside_s) if phase in OWNED else self.outside_s
        owes = phase is not Phase.IDLE or not rank.progress.changes
        return owes and rank.silent_s(now_s) > limit_s and self.system.state(rank.child.pid)[0] != "T"

    def _receive(self) -> None:
        if self.line.link is None:
            return
        try:
            message = self.line.receive(_decoder)
        except (OSError, msgspec.DecodeError):
            self._disconnected()
            return
        except WireRefusal as error:
            print(f"outlast: from the coordinator: {error.message}; connecting again", file=sys.stderr, flush=True)
            self._disconnected()
            return
        if isinstance(message, hm.Turned | hm.Briefing):  # of whichever run: its epochs may be below ours
            self._told_of_the_run(message)
        if message.epoch < self.epoch or self._over:
            return
        self.epoch = message.epoch
        if isinstance(message, HeartbeatReply):
            if self.lease is not None:
                self.lease.answered(message.sent_s)
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
            if message.reason == "finished":
                self.finished_code = message.exit_code
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


def main() -> int:
    """Entry of the agent's process: its name, then the script's command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    agent = Agent(sys.argv[1], dict(os.environ), sys.argv[2:])
    signal.signal(signal.SIGTERM, lambda *_: agent.ask("stopped"))
    signal.signal(signal.SIGUSR1, lambda *_: agent.ask("finished"))
    return agent.run()


if __name__ == "__main__":
    sys.exit(main())
