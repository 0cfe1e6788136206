"""What the coordinator knows, and how it says what is to be done: the data that every rule of this room works on.

Decides nothing. Rules are functions of this state, the time and an event; they change it, and append actions in the
order in which these are to be carried out. Nothing here imports a rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from outlast.core.policy import Prognosis, Replacements
from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet._failures import Failures
from outlast.core.protocol.fleet.reports import Reports
from outlast.core.protocol.fleet.roster import Roster, Settings
from outlast.core.protocol.operator_messages import Answered
from outlast.core.protocol.types import View, ViewId

__all__ = ["Change", "FleetState", "HostSilence", "Shortage", "Start"]


@dataclass(slots=True)
class Start:
    """The wait for a first view. `since_s`: its beginning; `late`: who is not ready now has to join."""

    since_s: float = math.nan
    first_s: float = math.nan
    late: bool = False


@dataclass(slots=True)
class Change:
    """Views up to `upto` are over and their successor is not yet installed."""

    upto: ViewId
    view: tuple[str, ...]  # members of the view that holds the state
    old: dict[str, None]  # these, those of a planned successor that may have taken effect, and `outgoing`
    cause: str
    waiting: set[str]  # alive and not yet heard to have left
    acked: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)  # too far behind those who are alive
    doubts: set[tuple[str, str]] = field(default_factory=set)  # (who says so, whose connection ended)
    doubtful: bool = True  # doubts still wait for certainty
    expired: bool = False
    lease_out: bool = False


@dataclass(slots=True)
class Shortage:
    """What is known and decided about missing replicas. `replacements`: what the run's record says of them; `since_s`:
    since when training waits for some, NaN: it does not; `stopping`: why the run saves and stops, where they are too
    few; `told`: whether this coordinator has said so; `saving`: a stop that was asked for waits for its save."""

    replacements: Replacements = field(default_factory=Replacements)
    since_s: float = math.nan
    stopping: str = ""
    told: bool = False
    saving: bool = False


@dataclass(slots=True)
class HostSilence:
    """Nothing is heard of a host since `since_s`; that was found at `noticed_s`."""

    why: str
    since_s: float
    noticed_s: float
    timed: bool = False  # whether a timer runs for the leases there


class FleetState:
    """Holds what the coordinator knows, which every rule of it reads and changes. `_out`: the actions that the event at
    hand has led to so far."""

    def __init__(self, settings: Settings, epoch: int) -> None:
        self.settings, self.epoch, self.now_s = settings, epoch, 0.0  # now: of the event at hand
        self.roster = Roster(settings)
        self.view: View | None = None
        self.planned: View | None = None  # told, and perhaps in effect already
        self.planned_entered = False  # some member is known to be in it
        self.change: Change | None = None
        self.start = Start()
        self.orders = self._number = 0  # given in this view; the number of the newest view that was ever made
        self.num_serves, self.saved = 0, 0  # saved: steps in the newest checkpoint that this run has published
        self.facts: dict[str, str] = {}
        self.over = False
        self.farewell = ""  # what members are told of the end; who is superseded says nothing
        self.ever_formed = False
        self.unjoined = False  # it was told that the script seems not to join
        self.leaving = False  # some member was asked to go
        self.outgoing: set[str] = set()  # members that the view is without: let go once it has formed (2)
        self.stay_told: set[str] = set()  # members that cannot leave though they were asked to, as was written down
        self.killed: set[str] = set()  # members whose agents were told to kill them
        self.began_with = settings.num_replicas
        self.wanted = 0  # replicas that people asked for; 0: as many as the run was started with
        self.awaiting: set[str] = set()  # after a restart: members of the last view that have not reported
        self.unheard: set[str] = set()  # after a restart: the others that were placed and have not reported
        self.orders_heard: set[int] = set()  # after a restart: how many of its view's orders each member knows of
        self.silent: dict[str, HostSilence] = {}  # agents of hosts that are not heard of
        self.disturbed = ""  # after a restart: why the last view cannot simply go on
        self.ended: m.FleetRecord | None = None  # the run was over before this coordinator began
        self.ending: m.Ending | None = None  # training is over, the scripts are not
        self.told_ended: m.Ended | None = None
        self.current: frozenset[str] = frozenset()  # members of the view and of the planned one
        self.unformed: set[str] = set()  # members of the view that have not formed it yet
        self.planned_unformed: set[str] = set()
        self.reports = Reports(self.journal)
        self.stalls: dict[str, m.Stalled] = {}
        self.rows: dict[tuple[str, int], m.Rows] = {}
        self.idle: set[str] = set()  # members that only wait, as their agents say, while paths are probed
        self.probing: ViewId | None = None
        self.done: dict[ViewId, set[str]] = {}
        self.failures = Failures()
        self.prognosis = Prognosis(kinds=settings.alarm_kinds)
        self.alarms: dict[str, str] = {}  # agent -> evidence of its open alarm
        self.planned_s: dict[ViewId, float] = {}  # how long each planned view has held up its members
        self.bad_links: set[str] = set()  # agents of hosts whose links were judged bad, whatever follows from it
        self.leaf_s: dict[str, float] = {}  # seconds that a microbatch takes each member, as measured last
        self.stragglers: dict[str, float] = {}  # members that were named as slow, and when
        self.outages: list[float] = []  # seconds that each death has cost so far
        self.failed_s: dict[str, float] = {}  # agent -> when a replica of it died last
        self.shortage = Shortage()
        self.saved_s = -math.inf  # when an alarm had a save asked for
        self._out: list[m.Action] = []

    def want(self, num_replicas: int) -> None:
        """So many replicas train from now on."""
        self.wanted = num_replicas
        self.roster.want(num_replicas, self.settings.num_spares)
        self.settings = self.roster.settings

    def hold(self, num_spares: int) -> None:
        """So many spares are kept from now on."""
        self.roster.want(self.settings.num_replicas, num_spares)
        self.settings = self.roster.settings

    def latest(self) -> ViewId:
        """The newest view that anybody may act in."""
        newest = self.planned or self.view
        return newest.id if newest else ViewId(self.epoch, 0)

    def known_steps(self, members: Iterable[str]) -> int:
        """So many steps these are known to have committed. Whose end an earlier coordinator told has no past here."""
        return max((self.reports.steps, *(self.roster.peers[m].committed for m in members if m in self.roster.peers)))

    @property
    def num_microbatches(self) -> int:
        """Microbatches of every step; 0 while nobody has said."""
        return int(self.facts.get("microbatches", "0"))

    @property
    def awaited(self) -> set[str]:
        """Members for whose word the others are held up: their view is over, of this coordinator or one before it."""
        if self.change is not None:
            return self.change.waiting
        return self.awaiting if self.disturbed else set()

    @property
    def callable_at(self) -> dict[str, str]:
        """Living members, and where each is called."""
        return {peer.name: peer.address for peer in self.roster.peers.values() if peer.alive and peer.address}

    def next_id(self) -> ViewId:
        """Never used before in this epoch, even if the view that had it is forgotten."""
        self._number = max(self._number, self.latest().n) + 1
        return ViewId(self.epoch, self._number)

    def set_views(self, view: View | None, planned: View | None) -> None:
        """The view that is and the one that may come; O(members)."""
        self.view, self.planned, self.planned_entered = view, planned, False
        self.current = frozenset((view.members if view else ()) + (planned.members if planned else ()))
        self.unformed = self._yet_to_form(view)
        self.planned_unformed = self._yet_to_form(planned)

    def _yet_to_form(self, view: View | None) -> set[str]:
        peers = self.roster.peers
        return {name for name in view.members if peers[name].view != view.id} if view is not None else set()

    def install_message(self, view: View, cause: str) -> m.Install:
        return m.Install(epoch=self.epoch, view=view, cause=cause, **self.contacts(view))

    def spawn_message(self, name: str, agent: str, after_s: float) -> m.Spawn:
        return m.Spawn(epoch=self.epoch, member=name, after_s=after_s, tested=self.roster.on_probation(agent))

    def departure(self) -> m.Close:
        return m.Close(epoch=self.epoch, reason=m.DEPARTED)

    def dismiss(self, name: str) -> None:
        """It was asked to go, and may: unless it is of the view, or needed until that has formed."""
        if name not in self.current and name not in self.outgoing:
            self.tell([name], self.departure())

    def contacts(self, view: View) -> dict[str, Any]:
        peers = self.roster.peers
        known = {name: peers[name] for name in view.members + view.attached if name in peers}
        addresses, hosts = {n: p.address for n, p in known.items()}, {n: p.agent for n, p in known.items()}
        return {"addresses": addresses, "hosts": hosts, "store": peers[view.members[0]].store}

    def start_again(self, name: str) -> None:
        """A joiner, or who cannot be a member: it drops what it has and waits to be served."""
        self.roster.mark(name, "fresh")
        self.roster.peers[name].serve = (0, 0)
        self.tell([name], m.Rejoin(epoch=self.epoch, member=name))

    def condemn(self, name: str, why: str) -> None:
        """It counts for nothing from here on, whether or not it can be reached."""
        self.roster.mark(name, "condemned")
        if self.change is not None:
            self.change.waiting.discard(name)
            self.change.acked.discard(name)
        self.journal("suspected", replica=name, evidence=why, decision="evict")
        self.kill(name, why)
        self.tell([name], m.Evict(epoch=self.epoch, reason=why))

    def kill(self, name: str, why: str) -> None:
        agent = self.roster.peers[name].agent
        if agent:
            self.killed.add(name)
            self.persist()
            self.tell([agent], m.Kill(epoch=self.epoch, member=name, reason=why))

    def persist(self, **ended: Any) -> None:
        """Also where nothing changed: the write is what proves that this coordinator still is the coordinator."""
        placement = {p.name: p.agent for p in self.roster.peers.values() if p.alive}
        record = m.FleetRecord(
            view=self.view,
            planned=self.planned,
            incarnations=dict(self.roster.incarnations),
            placement=placement,
            addresses=self.callable_at,
            facts=self.facts,
            formed=self.ever_formed,
            offences=dict(self.roster.offences),
            fleeting=dict(self.roster.fleeting),
            ending=self.ending,
            wanted=self.wanted,
            drained=tuple(sorted(self.roster.drained)),
            leaving=tuple(sorted(name for name in self.roster.asked_out if self.roster.is_alive(name))),
            outgoing=tuple(sorted(self.roster.alive(self.outgoing))),
            unpaid=tuple(sorted(self.roster.unpaid)),
            stopping=self.shortage.stopping,
            spares=self.settings.num_spares if self.settings.auto_spares else -1,
            saved=self.saved,
            **ended,
        )
        if not any(isinstance(action, m.Persist) and action.record == record for action in self._out):
            self._out.append(m.Persist(record=record))

    def tell(self, to: Sequence[str], message: m.FromCoordinator | Answered) -> None:
        if to:
            self._out.append(m.Tell(to=tuple(to), message=message))

    def timer(self, name: str, after_s: float) -> None:
        self._out.append(m.SetTimer(name=name, after_s=after_s))

    def journal(self, kind: str, **fields: object) -> None:
        if kind == "recovery" and isinstance(fields["downtime_s"], float) and fields["downtime_s"] > 0:
            self.outages.append(fields["downtime_s"])  # who was in no view has held up nobody
        self._out.append(m.JournalEntry(kind=kind, fields=fields))

    def finish(
        self, outcome: Literal["finished", "failed", "stopped"], exit_code: int, steps: int, detail: str
    ) -> None:
        if self.over:
            return
        self.over, self.farewell = True, outcome if outcome == "finished" else detail or outcome
        if self.change is None and not self.unformed:  # else the last faults were not recovered from
            self.reports.recoveries(self.latest())
        self.reports.end(steps if outcome == "finished" else None, steps if outcome == "failed" else None)
        self.persist(outcome=outcome, exit_code=exit_code, steps=steps, detail=detail)
        everyone = [p.name for p in self.roster.peers.values() if p.alive]
        self.tell(everyone, m.Close(epoch=self.epoch, reason=self.farewell))
        self.tell(sorted(self.roster.agents), m.Stop(epoch=self.epoch, reason=outcome, exit_code=exit_code))
        self.end(m.Finish(outcome=outcome, exit_code=exit_code, steps=steps, detail=detail))

    def end(self, finish: m.Finish) -> None:
        self._out.append(finish)

    def superseded(self) -> None:
        """A newer coordinator has taken over: nothing of what was about to be said holds."""
        self.over = True
        self._out = [m.Finish(outcome="stopped", exit_code=0, steps=0, detail="superseded by a newer coordinator")]
