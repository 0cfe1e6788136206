"""What the coordinator's process knows of hosts: who they are, when they were heard of, what their clocks say.

Role: a host whose agent and replicas are all silent is reported to the protocol once somebody waits for one of them
longer than the host has ever been silent; one for whom nobody waits, after a fixed patience. Times that its processes
tell by their monotonic clock become this machine's. Time is passed in. Decides nothing about membership.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from outlast.core import events
from outlast.core.policy import DeadlinePolicy, DeadlineState, Durations
from outlast.core.protocol import StepTime
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet.roster import host_named_in
from outlast.runtime.transport.frames import Heartbeat
from outlast.runtime.transport.handshake import PeerClaim

__all__ = ["CUT_OFF", "Hosts", "briefing", "last_heard_of", "of_another_run"]

_ENDED_S = 0.5  # for an agent that lives to connect anew, when its connection and those of its replicas have ended
_RETURN_S = 2.0  # at least, for a host that lives to turn to a coordinator that has taken over
_WANTED_S = 5.0  # for so long somebody's word counts that he waits for a replica there
_ALIVE_S = 1.0  # several beats of an agent that has joined
CUT_OFF = 12  # times the silence of a host for whom nobody waits: for so long nobody's silence is this process's own
_ABSENT_S = 1.0  # a pause between two looks above this was this process's own: nobody was silent in it
_BUSY_S = 0.25  # what is above this is not charged to those who have yet to return
_SAMPLES = 64  # of a clock
_TIMES: dict[type, tuple[str, ...]] = {
    m.Exited: ("last_alive_s", "noticed_at_s"), m.Left: ("at_s",), m.Formed: ("left_at_s", "formed_at_s"),
    m.Accused: ("at_s",),
}  # fmt: skip
"""What is said by the sender's monotonic clock; 0 is no time."""


@dataclass(slots=True)
class _Known:
    said: hm.HostHere
    heard_s: float  # or excused until then
    spoke_s: float  # its last word; no earlier than my own last absence
    gaps: Durations = field(default_factory=Durations)
    wanted_s: float = -math.inf  # when somebody said last that he waits
    connected: set[str] = field(default_factory=set)  # the agent and its members, as far as they are
    silent: bool = False
    recalled: bool = False  # from the journal, and not heard of since


class Hosts:
    """Knows the hosts of a run, and how long each has been silent. `most`: hosts that the run takes; `floor_s`: no
    learned deadline is below; `unmissed_s`: the silence of a host for whom nobody waits. `agent_of(member)`: "" while
    unknown. `here`: the place of this process. `own`: names of the launcher's hosts, for which there is always room,
    and which nobody else may have."""

    def __init__(
        self,
        most: int,
        floor_s: float,
        unmissed_s: float,
        here: str,
        agent_of: Callable[[str], str],
        own: Iterable[str] = (),
    ) -> None:
        self._own = frozenset(own)
        self._most, self._floor_s, self._unmissed_s = most, floor_s, unmissed_s
        self._here, self._agent_of = here, agent_of
        self._known: dict[str, _Known] = {}
        self._clocks: dict[str, deque[float]] = {}  # place -> here less there, and what the way took
        self._looked_s = math.nan
        self._cut_off = False
        self._cut_off_at_s = math.inf  # the last word before it
        self._crowded_s = -math.inf  # when callers could not come in last

    # --- who is there --------------------------------------------------------------------------------------------
    def recall(self, said: hm.HostHere, now_s: float) -> None:
        """A host that an earlier coordinator had; from now on it may be silent."""
        self._known[said.agent] = _Known(said, now_s, now_s, connected={said.agent}, recalled=True)

    def opened(self, now_s: float) -> None:
        """Who was recalled can be heard from now on only."""
        for known in self._known.values():
            if known.recalled:
                known.heard_s = known.spoke_s = now_s

    def take(self, said: hm.HostHere, now_s: float) -> tuple[hm.HostSilent | None, tuple[str, str] | None]:
        """A host says that it is there: (an earlier process of it that is thereby over, why it is not taken)."""
        mine = self._known.get(said.agent)
        if mine is not None:
            mine.said, mine.silent, mine.heard_s = said, False, max(mine.heard_s, now_s)
            mine.spoke_s = mine.heard_s
            mine.connected.add(said.agent)
            mine.recalled = False
            return None, None
        launched = is_launched(said.agent)
        if said.host in self._own and not launched:
            reason = f"the host that started the run is called {said.host}"
            return None, (reason, "give this one another name with --host")
        twins = [agent for agent, k in self._known.items() if k.said.host == said.host and not k.silent]
        before = next(iter(twins), "")
        twin = self._known.get(before)
        if not launched and twin is not None and before in twin.connected and now_s - twin.heard_s < _ALIVE_S:
            where = f"process {twin.said.pid} at {twin.said.address or 'this machine'}"
            reason = f"a host of the name {said.host} is already here ({where})"
            return None, (reason, "give this one another name with --host, or end the other agent")
        there = [k for k in self._known.values() if not k.silent and now_s - k.spoke_s <= self._unmissed_s]
        others = {k.said.host for k in there} - {said.host} - self._own
        if not launched and len(others) >= self._most - len(self._own):
            return None, (f"the run has its {self._most} hosts", "start it with a larger --nnodes MIN:MAX")
        over = None
        if twin is not None:
            twin.silent = True
            why = f"host {said.host} has come anew"
            over = hm.HostSilent(agent=before, for_s=now_s - twin.heard_s, why=why)
        self._known[said.agent] = _Known(said, now_s, now_s, connected={said.agent})
        self._sample(self._known[said.agent], said.sent_s, now_s)
        return over, None

    def facts(self, agent: str) -> dict[str, Any]:
        """What the journal tells of it; nothing of an agent that the launcher started."""
        known = self._known.get(agent)
        if known is None:
            return {}
        said = known.said
        return {"host": said.host, "place": said.place, "address": said.address, "slots": said.slots}

    def _of(self, name: str) -> _Known | None:
        return self._known.get(name) or self._known.get(self._agent_of(name))

    # --- silence -------------------------------------------------------------------------------------------------
    def heard(self, name: str, message: Any, now_s: float) -> Any:
        """An agent or a member has said something: the message, as of my clock."""
        known = self._of(name)
        if known is None:
            return message
        if name in self._known and name in known.connected and not known.silent:
            known.gaps.observe(now_s - known.heard_s)
        known.heard_s = known.spoke_s = max(known.heard_s, now_s)
        known.silent &= name in self._known  # a member that goes on without its agent can be silent once more
        known.connected.add(name)
        known.recalled = False
        if isinstance(message, m.Stalled | hm.Awaited):
            self._wanted(message.missing, now_s)
        if isinstance(message, Heartbeat):
            self._sample(known, message.sent_s, now_s)
        return self._by_my_clock(known, message)

    def hung_up(self, name: str) -> None:
        """Its connection ended."""
        known = self._of(name)
        if known is not None:
            known.connected.discard(name)

    def _wanted(self, members: Iterable[str], now_s: float) -> None:
        for member in members:
            known = self._of(member)
            if known is not None:
                known.wanted_s = now_s

    def look(self, now_s: float, awaited: Iterable[str] = (), crowded: bool = False) -> list[hm.HostSilent]:
        """Hosts that nobody should wait for any more, once for each time that they were heard of. `awaited`: members
        for whose word the coordinator itself holds up the others; `crowded`: callers do not come in as fast as they
        call. Call it several times a second."""
        self._wanted(awaited, now_s)
        self._crowded_s = now_s if crowded else self._crowded_s
        pause_s = now_s - self._looked_s
        was_cut_off, self._cut_off = self._cut_off, self._nobody_is_heard(now_s)
        if self._cut_off and not was_cut_off:
            self._cut_off_at_s = max(known.spoke_s for known in self._known.values() if not known.silent)
        absent, back = not pause_s < _ABSENT_S, was_cut_off and not self._cut_off
        self._looked_s = now_s
        found = []
        for known in self._known.values():
            if absent:
                known.heard_s = known.spoke_s = max(known.heard_s, now_s)
            elif back and known.spoke_s > self._cut_off_at_s - _ALIVE_S:  # who fell silent before has no excuse
                known.heard_s = max(known.heard_s, now_s)
            elif known.recalled:
                known.heard_s = min(known.heard_s + max(0.0, pause_s - _BUSY_S), now_s)
        cut_off_s = self._unmissed_s * CUT_OFF if self._cut_off else 0.0
        for agent, known in self._known.items():
            limit_s, why = self._limit(known, now_s)
            for_s = now_s - known.heard_s
            if not known.silent and for_s > max(limit_s, cut_off_s if known.connected else 0.0):
                known.silent = True
                left = known.said.slots < 0 and not known.connected
                why = "it has left, as it was asked to" if left else f"silent for {for_s:.2f} s{why}"
                found.append(hm.HostSilent(agent=agent, for_s=for_s, why=why))
        return found

    def _nobody_is_heard(self, now_s: float) -> bool:
        """Whether all hosts, several, are silent: then it is this process that is cut off. Their members train on, and
        would be ended for it when the path is back."""
        there = [known.heard_s for known in self._known.values() if not known.silent]
        return len(there) > 1 and now_s - max(there) > _ALIVE_S

    def _limit(self, known: _Known, now_s: float) -> tuple[float, str]:
        crowded = now_s - self._crowded_s <= _ENDED_S  # who has to come in anew may live, and not be let in
        if not known.connected:
            return self._unmissed_s if crowded else _ENDED_S, ", and all its connections have ended"
        if now_s - known.wanted_s < _WANTED_S and known.recalled:
            return_s = self._unmissed_s if crowded else min(max(_RETURN_S, 2 * self._floor_s), self._unmissed_s)
            return return_s, " by the coordinator that has taken over, while others wait for it"
        awaited = now_s - known.wanted_s < _WANTED_S
        state = DeadlineState(awaited=awaited, longest_s=self._unmissed_s)
        allowed_s = DeadlinePolicy(floor_s=self._floor_s).decide(known.gaps, state).allowed_s
        return allowed_s, " while others wait for it" if awaited else ""

    def processes(self, agent: str) -> list[str]:
        """Who was connected from there."""
        known = self._known.get(agent)
        return sorted(known.connected) if known is not None else []

    # --- clocks --------------------------------------------------------------------------------------------------
    def _sample(self, known: _Known, sent_s: float, now_s: float) -> None:
        if known.said.place != self._here:
            self._clocks.setdefault(known.said.place, deque(maxlen=_SAMPLES)).append(now_s - sent_s)

    def _apart_s(self, known: _Known) -> float:
        """My clock less its, late by no more than the fastest of the newest messages took; 0 where it is the same."""
        return min(self._clocks.get(known.said.place, ()), default=0.0)

    def _by_my_clock(self, known: _Known, message: Any) -> Any:
        apart_s = self._apart_s(known)
        if not apart_s:
            return message
        changes: dict[str, Any] = {
            key: getattr(message, key) + apart_s for key in _TIMES.get(type(message), ()) if getattr(message, key)
        }
        if isinstance(message, Heartbeat | m.Exited) and message.steps:  # a heartbeat's `sent_s` goes back as it is
            changes["steps"] = tuple(_moved(step, apart_s) for step in message.steps)
        return msgspec.structs.replace(message, **changes) if changes else message


def _moved(step: StepTime, by_s: float) -> StepTime:
    return msgspec.structs.replace(step, end_s=step.end_s + by_s)


def briefing(epoch: int, environ: Mapping[str, str]) -> hm.Briefing:
    """What an agent that joins has to know, from the coordinator's own environment."""
    return hm.Briefing(
        epoch=epoch,
        run_id=environ["OUTLAST_RUN"],
        command=tuple(json.loads(environ["OUTLAST_COMMAND"])),
        folder=environ["OUTLAST_FOLDER"],
        config=environ["OUTLAST_CONFIG"],
        hash_seed=environ.get("PYTHONHASHSEED", "0"),
    )


def is_launched(agent: str) -> bool:
    """Whether `outlast run` started this agent itself: who joins puts its host's name before a colon."""
    return ":" not in agent


def last_heard_of(story: Iterable[events.Event]) -> tuple[list[events.AgentStarted], list[str]]:
    """What an earlier coordinator wrote of agents: (those that it still had, those that it had lost and that have not
    been followed by another of their host)."""
    newest: dict[str, events.AgentStarted | events.AgentLost] = {}
    for event in story:
        if isinstance(event, events.AgentStarted | events.AgentLost):
            newest[event.agent] = event
    there = [event for event in newest.values() if isinstance(event, events.AgentStarted)]
    hosts = {host_named_in(event.agent) for event in there}
    return there, [
        agent
        for agent, event in newest.items()
        if isinstance(event, events.AgentLost) and host_named_in(agent) not in hosts
    ]


def of_another_run(run: str, epoch: int, claim: PeerClaim) -> hm.Turned | None:
    """What somebody is told who is left of another run under the same secret; None if he belongs here. An agent that
    joins knows of no run yet, nor does somebody who asks from another host."""
    if claim.run == run or (claim.role in ("agent", "operator") and not claim.run):
        return None
    reason = f"this is run {run}, and no longer {claim.run or 'one without a name'}"
    return hm.Turned(epoch=epoch, reason=reason, remedy="start outlast agent again to join it", run=run)
