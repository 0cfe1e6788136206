"""Who there is: every member and agent that the coordinator knows, and which slots want a process.

Pure bookkeeping under the coordinator; it decides restarts and their budget, never membership of a view. Every question
that is asked at each event is answered from a counter, so that a fleet of N costs O(N) to form, not O(N²).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from outlast.core.policy import AlarmKind, RestartPolicy, VacancyPolicy
from outlast.core.protocol.types import ServeId, ViewId

__all__ = [
    "QUARANTINED_AT",
    "Peer",
    "Roster",
    "Settings",
    "Status",
    "host_named_in",
    "incarnation_of",
    "noted_as",
    "slot_of",
]

QUARANTINED_AT = 2  # offences
Status = Literal["spawning", "fresh", "joining", "ready", "member", "condemned", "gone"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the run was started with; seconds are floats."""

    num_replicas: int
    num_spares: int = 0
    auto_spares: bool = False  # how many is decided by the policy while the run lasts (`_spares`)
    num_slots: int = 0  # of a run on one host, as it was told; 0: nobody said
    num_agents: int = 1  # the first replicas are started when so many agents have said hello
    ack_s: float = 5.0
    doubt_s: float = 0.5  # how long "its connection ended" waits for the agent's certainty
    lease_s: float = 600.0
    clock_margin: float = 0.1  # how much longer than the lease the coordinator waits, as a share
    start_s: float = 600.0
    gather_s: float = 5.0  # the least patience for the other replicas once the first is ready
    formation_s: float = 30.0
    outside_s: float = 1800.0
    max_restarts: int = 16
    backoff_s: float = 1.0
    vacancies: VacancyPolicy = field(default_factory=lambda: VacancyPolicy(kind="shrink", patience_s=600.0))
    min_replicas: int = 1
    on_alarm: Literal["act", "tell"] = "act"
    by_speed: bool = True  # whether work may follow speed: not with replicas of several ranks yet
    retired: frozenset[str] = frozenset()  # agents that the diary has put out of service, as `noted_as` has them
    probation: frozenset[str] = frozenset()  # those that have come back from repair or retirement a short while ago
    alarm_kinds: Mapping[str, AlarmKind] = field(default_factory=dict)  # what runs before have taught of alarms
    save_s: float = 1.0  # what a save is taken to cost before anything is known
    failure_s: float = 5.0  # likewise a death that nobody expected
    most_processes: int = 1 << 30  # replicas and spares that the run can have, however many are asked for


@dataclass(slots=True, kw_only=True)
class Peer:
    """One incarnation of a slot, e.g. r2.1. `status` is changed by `Roster.mark` alone."""

    name: str
    agent: str
    status: Status
    view: ViewId | None = None  # the newest view it has formed
    left: ViewId | None = None  # the newest view it is known to have left
    committed: int = 0
    serve: ServeId = (0, 0)
    leaving: bool = False
    going: bool = False  # it says itself that it was asked to go: it ends whatever is decided
    joined: bool = False
    since_s: float = 0.0  # when it said Hello
    address: str = ""
    store: str = ""
    device: str = ""
    pid: int = 0

    @property
    def alive(self) -> bool:
        return self.status not in ("gone", "condemned")


def slot_of(member: str) -> str:
    """The slot of a member: r2.1 -> r2."""
    return member.partition(".")[0]


def incarnation_of(member: str) -> int:
    """The incarnation of a member: r2.1 -> 1; 1 where none is named."""
    number = member.partition(".")[2]
    return int(number) if number.isdigit() else 1


def host_named_in(agent: str) -> str:
    """The host of an agent: h1:4fa0 -> h1; of those that the launcher has started one after the other, a0.2 -> a0."""
    return agent.partition(":" if ":" in agent else ".")[0]


def noted_as(agent: str) -> str:
    """What an agent is called across runs: h1: for the one of host h1, whatever follows; a0 for a0.2."""
    host, joined, _ = agent.partition(":")
    return f"{host}:" if joined else agent.partition(".")[0]


def _index(name: str) -> int:
    digits = slot_of(name)[1:]
    return int(digits) if digits.isdigit() else 0


@dataclass(slots=True)
class Roster:
    """Members by name, agents by name, incarnation numbers by slot."""

    settings: Settings
    peers: dict[str, Peer] = field(default_factory=dict)
    agents: set[str] = field(default_factory=set)
    lost_agents: set[str] = field(default_factory=set)
    incarnations: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    recent: dict[str, list[float]] = field(default_factory=dict)  # slot -> times of death
    asked_out: set[str] = field(default_factory=set)  # members that people asked to go (`_asked`)
    unpaid: set[str] = field(default_factory=set)  # slots whose next process is no restart: people asked for it
    accusations: dict[tuple[ViewId, int], dict[str, str]] = field(default_factory=dict)  # (view, step): who says whom
    offences: dict[str, int] = field(default_factory=dict)  # slot -> how often its state or numbers were wrong
    fleeting: dict[str, int] = field(default_factory=dict)  # slot -> how often its numbers were wrong once only
    judged: set[tuple[int, str, str]] = field(default_factory=set)  # (step, action, member) that was written down
    barred: set[str] = field(default_factory=set)  # agents that get no replica any more
    doubted: set[str] = field(default_factory=set)  # agents that get none until they were found well
    badly_linked: set[str] = field(default_factory=set)  # agents of hosts behind a bad link
    drained: set[str] = field(default_factory=set)  # hosts that get no replica, as they were asked to be emptied
    host_names: dict[str, str] = field(default_factory=dict)  # as `host_named_in` has it -> what the host is called
    notes: dict[str, str] = field(default_factory=dict)  # agent -> "retired" or "probation" by its host's own diary
    slots: dict[str, int] = field(default_factory=dict)  # agent -> replicas that it may have; 0 or absent: any number
    _live: dict[str, str] = field(default_factory=dict)  # slot -> live member
    _greetings: dict[tuple[str, int], int] = field(default_factory=dict)  # (agent, process) -> number of the newest
    _by_status: dict[Status, set[str]] = field(default_factory=dict)
    _num_wanted_fresh: int = 0
    _look: bool = True  # whether a slot may be without a process

    @property
    def _restarts(self) -> RestartPolicy:
        return RestartPolicy(most=self.settings.max_restarts, backoff_s=self.settings.backoff_s)

    def alive(self, members: Iterable[str]) -> list[str]:
        return [m for m in members if m in self.peers and self.peers[m].alive]

    def learn(self, name: str, committed: int) -> None:
        """So many steps the member is known to have committed, dead or alive."""
        if name in self.peers:
            self.peers[name].committed = max(self.peers[name].committed, committed)

    def forget_steps(self) -> None:
        """What those who are gone had committed is lost with them, and will be done once more."""
        for peer in self.peers.values():
            if not peer.alive:
                peer.committed = 0

    def is_alive(self, name: str) -> bool:
        return name in self.peers and self.peers[name].alive

    def having(self, *statuses: Status) -> list[str]:
        """Members with one of the statuses, by slot number."""
        names = [name for status in statuses for name in self._by_status.get(status, ())]
        return sorted(names, key=lambda name: (_index(name), name))

    def count(self, status: Status) -> int:
        return len(self._by_status.get(status, ()))

    @property
    def enough_to_start(self) -> bool:
        """Whether as many fresh members as replicas wait in the slots r0 ... of the replicas."""
        return self._num_wanted_fresh >= self.settings.num_replicas

    @property
    def deserted(self) -> bool:
        """Whether no process lives and none is to be started any more, though there were some."""
        usable = self.agents - self.drained_agents  # drained ones may be again
        return not self._look and bool(usable and self.incarnations) and self._hosts_told and not self._live

    @property
    def _hosts_told(self) -> bool:
        """Whether as many hosts are here as the run begins with; once it has begun, those that are lost count too."""
        agents = self.agents | self.lost_agents if self.incarnations else self.agents
        return len({host_named_in(agent) for agent in agents}) >= self.settings.num_agents

    def may_grow(self, members: Collection[str]) -> bool:
        """Whether others than these live, or may yet be started without anybody asking for more restarts."""
        wanted = (f"r{index}" for index in range(self.settings.num_replicas + self.settings.num_spares))
        vacant = [slot for slot in wanted if slot not in self._live and self.offences.get(slot, 0) < QUARANTINED_AT]
        decided = (self._restarts.decide(deaths=0, restarts=self.restarts, again=self.is_charged(s)) for s in vacant)
        return not set(self._live.values()) <= set(members) or any(found.start for found in decided)

    def want(self, num_replicas: int, num_spares: int) -> None:
        """So many replicas train from now on, and so many are kept caught up beside them."""
        self.settings = replace(self.settings, num_replicas=num_replicas, num_spares=num_spares)
        self._num_wanted_fresh = sum(_index(name) < num_replicas for name in self._by_status.get("fresh", ()))
        self._look = True

    @property
    def drained_agents(self) -> set[str]:
        """Agents of the hosts that were asked to be emptied."""
        return {agent for agent in self.agents if host_named_in(agent) in self.drained} if self.drained else set()

    @property
    def retired_agents(self) -> set[str]:
        """Agents that the diary, or their host's own, has put out of service."""
        retired = self.settings.retired
        return {a for a in self.agents if noted_as(a) in retired or self.notes.get(a) == "retired"}

    def on_probation(self, agent: str) -> bool:
        """Whether it came back from repair or retirement a short while ago."""
        return noted_as(agent) in self.settings.probation or self.notes.get(agent) == "probation"

    def _last(self, agent: str) -> bool:
        return agent in self.badly_linked or self.on_probation(agent)

    def by_host(self, names: Sequence[str]) -> tuple[str, ...]:
        """The same members, those of each host side by side: its microbatches are then one range, and few sums stand
        for them (33). Hosts come in the order of their first member; agents of the launcher's are on one."""
        found: dict[str, list[str]] = {}
        for name in names:
            agent = self.peers[name].agent if name in self.peers else ""
            found.setdefault(host_named_in(agent) if ":" in agent else "", []).append(name)
        return tuple(name for host in found.values() for name in host)

    def index_of(self, name: str) -> int:
        """The number of a member's slot."""
        return _index(name)

    def living(self, slot: str) -> str:
        """The live member of a slot; "" if there is none."""
        return self._live.get(slot, "")

    def add(self, name: str, agent: str, status: Status) -> Peer:
        slot = slot_of(name)
        self.incarnations[slot] = max(self.incarnations.get(slot, 0), incarnation_of(name))
        peer = self.peers.get(name)
        if peer is None:
            peer = self.peers[name] = Peer(name=name, agent=agent, status=status)
            self._count(name, status, True)
        if peer.alive:
            self._live[slot] = name
        return peer

    def mark(self, name: str, status: Status) -> None:
        peer = self.peers[name]
        if peer.status != status:
            self._count(name, peer.status, False)
            peer.status = status
            self._count(name, status, True)

    def _count(self, name: str, status: Status, more: bool) -> None:
        names = self._by_status.setdefault(status, set())
        (names.add if more else names.discard)(name)
        if status == "fresh" and _index(name) < self.settings.num_replicas:
            self._num_wanted_fresh += 1 if more else -1

    def drop(self, name: str, now_s: float) -> None:
        """The member is gone for certain. Its record stays, so that it is refused should it come back."""
        if name not in self.peers:
            self.add(name, "", "gone")
        self.mark(name, "gone")
        slot = slot_of(name)
        if self._live.get(slot) == name:
            del self._live[slot]
        self._look = True
        if name in self.asked_out:
            self.unpaid.add(slot)
            return
        self.recent[slot] = [t for t in self.recent.get(slot, []) if now_s - t < self._restarts.window_s] + [now_s]

    def is_charged(self, slot: str) -> bool:
        """Whether another process for this slot is a restart, of which a run has so many."""
        return self.incarnations.get(slot, 0) > 0 and slot not in self.unpaid

    def agent_here(self, agent: str, pid: int, number: int) -> bool:
        """Whether this greeting is news, not a late copy."""
        if 0 < number <= self._greetings.get((agent, pid), 0):
            return False
        self._greetings[agent, pid] = number
        self.agents.add(agent)
        self.lost_agents.discard(agent)
        self._look = True
        return True

    def look(self) -> None:
        """Slots may be filled that could not before."""
        self._look = True

    def agent_lost(self, agent: str) -> None:
        self.agents.discard(agent)
        self.lost_agents.add(agent)
        self._look = True

    def superseded(self, name: str) -> bool:
        """Whether nothing is known of this member but that its slot has had it, or a later one, already."""
        return name not in self.peers and incarnation_of(name) <= self.incarnations.get(slot_of(name), 0)

    def load(self, without: Collection[str] = ()) -> dict[str, int]:
        """Return replicas by agent, of the agents that get more of them. Those that are barred, in doubt or retired do
        where there are no others. `without`: as if these agents' hosts were drained."""
        open_to = self.agents - self.drained_agents - set(without)
        sound = open_to - self.barred - self.doubted - self.retired_agents
        load = dict.fromkeys(sorted(sound or open_to), 0)
        for name in self._live.values():
            agent = self.peers[name].agent
            if agent in load:
                load[agent] += 1
        return load

    def vacancies(self) -> Iterator[tuple[str, str, float]]:
        """(member to start, agent, delay) for each slot without a live process, within the budget of restarts."""
        if not self._look or not self.agents or not self._hosts_told:
            return
        self._look = False
        load = self.load()
        for index in range(self.settings.num_replicas + self.settings.num_spares):
            slot = f"r{index}"
            if slot in self._live or self.offences.get(slot, 0) >= QUARANTINED_AT:
                continue
            again, deaths = self.is_charged(slot), len(self.recent.get(slot, []))
            decision = self._restarts.decide(deaths=deaths, restarts=self.restarts, again=again)
            agent = self.roomiest(load, computes=index < self.settings.num_replicas)
            if not decision.start or not agent:
                continue
            self.restarts += again
            self.unpaid.discard(slot)
            load[agent] += 1
            name = f"{slot}.{self.incarnations.get(slot, 0) + 1}"
            self.add(name, agent, "spawning")
            yield name, agent, decision.delay_s

    def roomiest(self, load: Mapping[str, int], computes: bool) -> str:
        """The agent with the fewest replicas among those with a slot left; "" if there is none. One on probation, or
        behind a bad link, gets what `computes` only where no other has said that it has a slot left; a spare it may
        have before."""
        free = [agent for agent, number in load.items() if not self.slots.get(agent) or number < self.slots[agent]]
        settled = [agent for agent in free if self.slots.get(agent) and not self._last(agent)]
        free = settled if settled and computes else free
        return min(free, key=lambda agent: (load[agent], self._last(agent), agent), default="")

    def unlisted(self, agent: str, listed: Collection[str]) -> tuple[list[str], list[str]]:
        """Live members placed on the agent that it does not list: (those that had started, those that had not)."""
        missing = [p for p in self.peers.values() if p.agent == agent and p.status != "gone" and p.name not in listed]
        started = [p.name for p in missing if p.status != "spawning" or p.joined or p.pid]
        return started, [p.name for p in missing if p.name not in started]
