"""What the journal tells of agents, replicas and certified states: so that each is written down once.

An agent repeats itself to each coordinator, and each coordinator's predecessor may have written it down already.
"""

from __future__ import annotations

from collections.abc import Iterable

from outlast.core import events
from outlast.core.protocol import ViewId
from outlast.journal import Journal
from outlast.runtime.coordinator._hosts import last_heard_of

__all__ = ["ToldOnce"]


class ToldOnce:
    """`story`: an earlier coordinator's journal, if there was one. `there`: agents that it still had; `lost`: those
    that are written down as lost."""

    def __init__(self, story: Journal | None) -> None:
        told = _of(story, events.AgentStarted, events.AgentLost)
        self.there, gone = last_heard_of(told)
        self.lost = set(gone)
        self._pids = {agent.agent: agent.pid for agent in self.there}
        spawned = _of(story, events.ReplicaStarted)
        self._replicas = {event.replica for event in spawned if isinstance(event, events.ReplicaStarted)}
        self._formed: ViewId | None = None
        self._certified = 0

    def agent_is_news(self, name: str, pid: int) -> bool:
        """An agent says hello."""
        known, self._pids[name] = self._pids.get(name), pid
        return known != pid

    def agent_gone(self, name: str) -> None:
        """It would be news again."""
        self._pids.pop(name, None)

    def replica_is_news(self, member: str) -> bool:
        """An agent says that it has started this one."""
        known = member in self._replicas
        self._replicas.add(member)
        return not known

    def view_is_news(self, view: ViewId) -> bool:
        """A member says that it is formed."""
        known, self._formed = self._formed, view
        return known != view

    def certified_is_news(self, step: int) -> bool:
        """A member says that the state after this step is verified."""
        news = step > self._certified
        self._certified = max(step, self._certified)
        return news


def _of(story: Journal | None, *kinds: type[events.AnyEvent]) -> Iterable[events.AnyEvent]:
    return (entry.event for entry in story.events(kinds=kinds)) if story is not None else ()
