"""Which hosts of a run have a bad link, judged while it trains from what its members say of each other.

Role: the coordinator's process feeds it each member's words, and it looks now and then at what has been added since it
looked last (`health.run_links`). What TCP lost counts at once; headers that come late only after three looks in a row,
as a machine that is busy is late too. A link stays bad for ten minutes after it was named last, since what is spared it
may be why it is not. Off the loop: judging takes numpy, and a thread.
"""

from __future__ import annotations

import asyncio
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
_FEW = 5  # lost segments, or late headers, of one pair: with fewer everywhere nothing is worth a look

Verdict = dict[str, dict[str, str]]  # kind of evidence -> agent -> what is said of its link


class LinkWatch:
    """See the module. `agent_of(replica)`: "" while unknown. `tell`: who is bad, each time that changes. `start(work,
    then)`: has `then(work())` called, later; by default `work` runs in a thread."""

    def __init__(
        self,
        agent_of: Callable[[str], str],
        tell: Callable[[hm.LinksJudged], None],
        start: Callable[[Callable[[], Verdict], Callable[[Verdict], None]], None] | None = None,
    ) -> None:
        self._agent_of, self._tell, self._start = agent_of, tell, start or _in_a_thread
        self._newest: dict[str, StepParts] = {}
        self._base: dict[str, StepParts] = {}  # at the last look
        self._looked_s = -_EVERY_S
        self._late: Counter[str] = Counter()  # looks in a row
        self._named: dict[str, tuple[float, str]] = {}  # agent -> when it was named last, and how
        self._told: frozenset[str] = frozenset()

    def heard(self, replica: str, parts: StepParts, now_s: float) -> None:
        """A member's word, in which everything is summed since it joined."""
        self._newest[replica] = parts
        if now_s - self._looked_s < _EVERY_S:
            return
        self._looked_s = now_s
        added = {name: _since(word, self._base.get(name)) for name, word in self._newest.items()}
        self._base, self._newest = self._base | self._newest, {}  # of who has exited nothing is heard any more
        agents = {name: self._agent_of(name) for name in {*added, *(n for word in added.values() for n in word.waits)}}
        waits = [wait for word in added.values() for wait in word.waits.values()]
        if len({_place(agent) for agent in agents.values()} - {""}) < 2:
            return
        if any(wait.resent >= _FEW or wait.late >= _FEW for wait in waits):
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
        if not future.cancelled():
            then(future.result())

    asyncio.get_running_loop().run_in_executor(None, work).add_done_callback(done)


def _place(agent: str) -> str:
    """Which host: the launcher's agents are on one."""
    return agent if ":" in agent else "here" if agent else ""


def _since(parts: StepParts, base: StepParts | None) -> StepParts:
    """What was added to a member's sums."""
    if base is None or base.steps > parts.steps:
        return parts
    waits = {name: _less(wait, base.waits.get(name, PairWait())) for name, wait in parts.waits.items()}
    seconds = {part: max(0.0, value - base.seconds.get(part, 0.0)) for part, value in parts.seconds.items()}
    return StepParts(steps=parts.steps - base.steps, seconds=seconds, waits=waits)


def _less(wait: PairWait, base: PairWait) -> PairWait:
    changed = {name: max(0, getattr(wait, name) - getattr(base, name)) for name in PairWait.__struct_fields__}
    return msgspec.structs.replace(wait, **changed)


def _judged(added: Mapping[str, StepParts], agents: Mapping[str, str]) -> Verdict:
    """The agents whose links are named, with what is said of them."""
    from outlast.errors import ConfigError
    from outlast.health import run_links

    events: list[ev.AnyEvent] = []
    for agent in sorted(set(agents.values()) - {""}):
        events.append(ev.AgentStarted(at_s=0.0, agent=agent, pid=0, host=agent if ":" in agent else ""))
    events += [ev.ReplicaStarted(at_s=0.0, replica=name, agent=agent, pid=0) for name, agent in agents.items() if agent]
    for name, word in added.items():
        if agents[name] and word.steps:
            events.append(ev.StepAnatomy(at_s=0.0, replica=name, **msgspec.structs.asdict(word)))
    try:
        found = run_links(events)
    except ConfigError:  # of one host
        return {}
    verdict: Verdict = {}
    for kind, report in found.reports.items():
        said = {s.link: f"{s.rate:.1%} {kind} (95 % {s.low:.1%} to {s.high:.1%})" for s in report.suspects}
        here = next((text for link, text in said.items() if ":" not in link), "")
        launched = dict.fromkeys((agent for agent in agents.values() if agent and ":" not in agent and here), here)
        verdict[kind] = said | launched
    return verdict
