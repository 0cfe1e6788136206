"""Which hosts of a run have a bad link, judged while it trains from what its members say of each other.

Role: the coordinator's process feeds it each member's words, and it looks now and then at what has been added since it
looked last (`health.run_links`). What TCP lost counts at once; headers that come late only after three looks in a row,
as a machine that is busy is late too. A link stays bad for ten minutes after it was named last, since what is spared it
may be why it is not. Off the loop: judging takes numpy, and a thread.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from outlast.core import events as ev
from outlast.core.protocol import host_messages as hm
from outlast.core.step_parts import PairWait, StepParts

__all__ = ["LinkWatch"]

_EVERY_S = 10.0
_LATE_LOOKS = 3
_KEPT_S = 600.0
_FEW = 5  # lost segments, or late headers, to and from one member: with fewer everywhere nothing is worth a look

Verdict = dict[str, dict[str, str]]  # kind of evidence -> agent -> what is said of its link


class LinkWatch:
    """Judges links by what members say of their exchanges. `agent_of(replica)`: "" while unknown. `tell`: who is bad,
    each time that changes. `start(work, then)`: has `then(work())` called, later; by default `work` runs in a
    thread."""

    def __init__(
        self,
        agent_of: Callable[[str], str],
        tell: Callable[[hm.LinksJudged], None],
        start: Callable[[Callable[[], Verdict], Callable[[Verdict], None]], None] | None = None,
    ) -> None:
        self._agent_of, self._tell, self._start = agent_of, tell, start or _in_a_thread
        self._newest: dict[str, StepParts] = {}  # since the last look
        self._base: dict[str, StepParts] = {}  # before it
        self._spoke_s: dict[str, float] = {}
        self._looked_s = self._every_s = math.nan
        self._late: Counter[str] = Counter()  # looks in a row
        self._named: dict[str, tuple[float, str]] = {}  # agent -> when it was named last, and how
        self._told: frozenset[str] = frozenset()

    def heard(self, replica: str, parts: StepParts, now_s: float) -> None:
        """A member's word, in which everything is summed since it joined. The first of a member, and of a pair, is what
        later ones are compared with: nobody knows when that was."""
        self._newest[replica], self._spoke_s[replica] = parts, now_s
        if math.isnan(self._looked_s):
            self._looked_s, self._every_s = now_s, _EVERY_S
        if now_s - self._looked_s < self._every_s:
            return
        self._looked_s = now_s
        added = {name: _since(word, self._base[name]) for name, word in self._newest.items() if name in self._base}
        self._base, self._newest = self._base | self._newest, {}  # of who has exited nothing is heard any more
        self._spoke_s = {name: at_s for name, at_s in self._spoke_s.items() if now_s - at_s < 2 * self._every_s + 60}
        self._every_s = max(_EVERY_S, float(len(self._spoke_s)))  # each of N members speaks every N seconds
        agents = {name: self._agent_of(name) for name in {*added, *(n for word in added.values() for n in word.waits)}}
        if len({_place(agent) for agent in agents.values()} - {""}) < 2:
            return
        if _worth_a_look(added):
            self._start(lambda: _judged(added, agents), lambda verdict: self._settle(verdict, now_s))
        else:
            self._settle({"loss": {}, "late": {}}, now_s)

    def _settle(self, verdict: Verdict, now_s: float) -> None:
        late = verdict.get("late", {})
        self._late = Counter({agent: self._late[agent] + 1 for agent in late})
        for agent, text in (late | verdict.get("loss", {})).items():
            if agent in verdict.get("loss", {}) or self._late[agent] >= _LATE_LOOKS or agent in self._named:
                self._named[agent] = now_s, text
        self._named = {agent: row for agent, row in self._named.items() if now_s - row[0] < _KEPT_S}
        if self._named.keys() != self._told:
            self._told = frozenset(self._named)
            self._tell(hm.LinksJudged(agents={agent: text for agent, (_, text) in self._named.items()}))


def _in_a_thread(work: Callable[[], Verdict], then: Callable[[Verdict], None]) -> None:
    def done(future: asyncio.Future[Verdict]) -> None:
        if future.cancelled():
            return
        if (error := future.exception()) is not None:  # what cannot be judged ends no coordinator
            print(f"outlast: links are not judged: {error!r}", file=sys.stderr, flush=True)
        else:
            then(future.result())

    asyncio.get_running_loop().run_in_executor(None, work).add_done_callback(done)


def _worth_a_look(added: Mapping[str, StepParts]) -> bool:
    """Whether so much was lost, or came late, to or from anybody."""
    resent: Counter[str] = Counter()
    late: Counter[str] = Counter()
    for name, word in added.items():
        for peer, wait in word.waits.items():
            for end in (name, peer):
                resent[end] += wait.resent
                late[end] += wait.late
    return max([0, *resent.values(), *late.values()]) >= _FEW


def _place(agent: str) -> str:
    """Which host: the launcher's agents are on one."""
    return agent if ":" in agent else "here" if agent else ""


def _since(parts: StepParts, base: StepParts) -> StepParts:
    """What was added to a member's sums."""
    waits = {name: _less(wait, base.waits[name]) for name, wait in parts.waits.items() if name in base.waits}
    seconds = {part: max(0.0, value - base.seconds.get(part, 0.0)) for part, value in parts.seconds.items()}
    return StepParts(steps=max(0, parts.steps - base.steps), seconds=seconds, waits=waits)


def _less(wait: PairWait, base: PairWait) -> PairWait:
    changed = {name: max(0, getattr(wait, name) - getattr(base, name)) for name in PairWait.__struct_fields__}
    return msgspec.structs.replace(wait, **changed)


def _judged(added: Mapping[str, StepParts], agents: Mapping[str, str]) -> Verdict:
    """The agents whose links are named, with what is said of them."""
    from outlast.health import Fabric, run_links

    events: list[ev.AnyEvent] = []
    for agent in sorted(set(agents.values()) - {""}):
        events.append(ev.AgentStarted(at_s=0.0, agent=agent, pid=0, host=agent if ":" in agent else ""))
    events += [ev.ReplicaStarted(at_s=0.0, replica=name, agent=agent, pid=0) for name, agent in agents.items() if agent]
    for name, word in added.items():
        if agents[name] and word.steps:
            events.append(ev.StepAnatomy(at_s=0.0, replica=name, **msgspec.structs.asdict(word)))
    here = next((agent for agent in sorted(agents.values()) if agent and ":" not in agent), "")
    hosts = {agent if ":" in agent else here for agent in agents.values() if agent}
    found = run_links(events, Fabric(hosts=dict.fromkeys(sorted(hosts), "")))  # of all, also of who has not spoken
    verdict: Verdict = {}
    for kind, report in found.reports.items():
        said = {s.link: f"{s.rate:.1%} {kind} (95 % {s.low:.1%} to {s.high:.1%})" for s in report.suspects}
        for agent in agents.values() if here in said else ():  # the launcher's are on one host
            if agent and ":" not in agent:
                said[agent] = said[here]
        verdict[kind] = said
    return verdict
