"""The coordinator: orders membership, and nothing else. It is not on the step's path.

`Coordinator.handle(now_s, event) -> actions` is the whole of it: no clock, no sockets, no randomness. Actions are
carried out in order; a `Persist` must be durable before anything after it (protocol, 2 and 3). Read `_progress` first:
after every event it does the one thing that is next. What that is lives beside this file: `change` (a view is over),
`_planned` (somebody in or out, a joiner to be served), `_silence` (who is asked to go), `_restart` (a new epoch),
`_returning` (a lost connection).

    no view ── enough fresh members ──► view formed ──(death, Left, eviction)──► change: everyone is told to leave
                                          ▲   │ planned switch / serve a joiner         │ all alive acknowledged
                                          │   ▼ (orders, carried out between steps)     ▼ or the deadline passed
                                          └────────────── successor: durable, then told ┘

Nothing that cannot be taken back (a view, a kill, the end of the run) is said before a durable write conditional on
the epoch, so a coordinator that was stopped and resumed after its successor took over does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from outlast.core.protocol.fleet import _audit_findings, _beginning, _ending, _planned, _restart  # isort: skip
from outlast.core.protocol.fleet import _returning, _robust_rules, _silence, _step_verdicts, _telling  # isort: skip
from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet import change as _change
from outlast.core.protocol.fleet._failures import Failures
from outlast.core.protocol.fleet.change import Change
from outlast.core.protocol.fleet.reports import Reports, noted, resumed
from outlast.core.protocol.fleet.roster import Peer, Roster, Settings, incarnation_of, slot_of
from outlast.core.protocol.types import View, ViewId, differences

__all__ = ["Coordinator"]


class Coordinator:
    """See the module. `record`: what the previous coordinator made durable, None for a new run."""

    def __init__(self, settings: Settings, epoch: int, record: m.Record | None = None) -> None:
        self.settings, self.epoch = settings, epoch
        self.roster = Roster(settings)
        self.view: View | None = None
        self.planned: View | None = None  # told, and perhaps in effect already
        self.planned_entered = False  # some member is known to be in it
        self.change: Change | None = None
        self.start = _beginning.Start()
        self.orders = 0  # given in this view
        self._number = 0  # of the newest view that was ever made
        self.num_serves = 0
        self.facts: dict[str, str] = {}
        self.over = False
        self.farewell = ""  # what members are told of the end; who is superseded says nothing
        self.ever_formed = False
        self.unjoined = False  # it was told that the script seems not to join
        self.leaving = False  # some member was asked to go
        self.awaiting: set[str] = set()  # after a restart: members of the last view that have not reported
        self.unheard: set[str] = set()  # after a restart: the others that were placed and have not reported
        self.disturbed = ""  # after a restart: why the last view cannot simply go on
        self.ended: m.Record | None = None  # the run was over before this coordinator began
        self.ending: m.Ending | None = None  # training is over, the scripts are not
        self.told_ended: m.Ended | None = None
        self.current: frozenset[str] = frozenset()  # members of the view and of the planned one
        self.unformed: set[str] = set()  # members of the view that have not formed it yet
        self.planned_unformed: set[str] = set()
        self.reports = Reports(self.journal)
        self.stalls: dict[str, m.Stalled] = {}
        self.rows: dict[str, m.Rows] = {}
        self.idle: set[str] = set()  # members that only wait, as their agents say, while paths are probed
        self.probing: ViewId | None = None
        self.done: dict[ViewId, set[str]] = {}
        self.failures = Failures()
        self._out: list[m.Action] = []
        if record is not None:
            _restart.recover(self, record)

    def handle(self, now_s: float, event: m.Event) -> list[m.Action]:
        """React to one event at monotonic time `now_s`; returns the actions, in order."""
        if self.over:
            return self._after_the_end(event)
        if self.ended is not None:
            _restart.end_again(self, self.ended)
        else:
            getattr(self, "_on_" + type(event).__name__.lower())(now_s, event)
            self._progress(now_s)
        out, self._out = self._out, []
        return out

    def _progress(self, now_s: float) -> None:
        if self.ending is not None and not self.over:
            _ending.progress(self)
        if self.over or self.awaiting or self.ending is not None:
            return
        if self.disturbed and self.change is None:
            _restart.reconcile(self)
        self._spawn()
        if self.change is not None:
            _change.try_install(self, now_s)
        if self.over or self.change is not None:
            return
        if self.view is None:
            _beginning.try_start(self, now_s)
        elif len(self.done.get(self.view.id, ())) == len(self.view.members):
            steps = max(self.roster.peers[name].committed for name in self.view.members)
            _ending.begin(self, steps)
        elif self.planned is None and not self.unformed:
            self.reports.recoveries(self.latest())
            _planned.plan_next(self)

    def latest(self) -> ViewId:
        """The newest view that anybody may act in."""
        newest = self.planned or self.view
        return newest.id if newest else ViewId(self.epoch, 0)

    @property
    def num_microbatches(self) -> int:
        """Of every step; 0 while nobody has said."""
        return int(self.facts.get("microbatches", "0"))

    def next_id(self) -> ViewId:
        """Never used before in this epoch, even if the view that had it is forgotten."""
        self._number = max(self._number, self.latest().n) + 1
        return ViewId(self.epoch, self._number)

    # --- views ---------------------------------------------------------------------------------------------------
    def install(self, view: View, cause: str) -> None:
        """Durable first, then told (protocol, step 3 of a death)."""
        before = self.change.old if self.change is not None else {}
        base = self.planned if self.planned_entered else self.view
        for name in view.members:
            self.roster.mark(name, "member")
        self.change, self.orders = None, 0
        self.set_views(view, None)
        self.reports.formed.clear()
        self.stalls.clear()
        self.persist()
        self.journal(
            "view_installed", epoch=view.id.epoch, n=view.id.n, members=list(view.members), cause=cause, planned=False,
            num_microbatches=self.num_microbatches,
        )  # fmt: skip
        _telling.tell_view(self, base, view, cause)
        departed = [name for name in self.roster.alive(before) if name not in self.current]
        self.tell([name for name in departed if self.roster.peers[name].leaving], self._departure())
        self.timer(f"form:{view.id}", _beginning.formation_s(self, view))

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

    def _departure(self) -> m.Close:
        return m.Close(epoch=self.epoch, reason="left as planned")

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

    # --- what members say ----------------------------------------------------------------------------------------
    def _on_hello(self, now_s: float, hello: m.Hello) -> None:
        if hello.epoch > self.epoch:
            self._on_superseded(now_s, m.Superseded())
            return
        self.tell([hello.member], m.Welcome(epoch=self.epoch))
        known = self.roster.peers.get(hello.member)
        if (known is not None and not known.alive) or self.roster.superseded(hello.member):
            reason = "the run went on without this replica"
            self.tell([hello.member], m.Evict(epoch=self.epoch, reason=reason))
            return
        if not self._same_facts(hello):
            return
        self.unheard.discard(hello.member)
        peer = known or self.roster.add(hello.member, hello.agent, "spawning")
        peer.address, peer.store, peer.device, peer.joined = hello.address, hello.store, hello.device, True
        peer.since_s = peer.since_s or now_s
        peer.committed = max(peer.committed, hello.committed)
        peer.leaving = peer.leaving or hello.leaving
        self.leaving = self.leaving or peer.leaving
        if self.ending is not None:
            _ending.greet(self, peer)
        elif peer.name in self.current:
            _returning.member(self, peer, hello)
        elif peer.leaving:
            self.tell([peer.name], self._departure())
        else:
            _returning.outsider(self, peer, hello)

    def _same_facts(self, hello: m.Hello) -> bool:
        if not self.facts and hello.facts:
            self.facts = dict(hello.facts)
            self.persist()
        shown = differences(self.facts, hello.facts)
        if not shown:
            return True
        self.tell([hello.member], m.Evict(epoch=self.epoch, reason=shown, remedy="facts"))
        self.journal("notice", level="error", text=f"{hello.member} was refused: {shown}")
        return False

    def _on_left(self, now_s: float, left: m.Left) -> None:
        peer = self.roster.peers.get(left.member)
        if peer is None or not peer.alive:
            return
        peer.left = max(peer.left or left.view, left.view)
        view = self.view
        if view is None or left.member not in self.current or left.view < view.id:
            return
        _change.begin(self, left.cause or f"{left.member} left")
        change = self.change
        if change is None:
            return
        if left.view >= change.upto:
            _change.acknowledge(self, left.member)
        change.stale.update(left.stale)
        for name in left.suspects:
            self.reports.noticed(name, left.member, left.at_s)
            change.doubts.add((left.member, name))
        if left.suspects and change.doubtful:
            self.timer(f"doubt:{change.upto}", self.settings.doubt_s)

    def _on_formed(self, now_s: float, formed: m.Formed) -> None:
        peer = self.roster.peers.get(formed.member)
        if peer is None or not peer.alive:
            return
        peer.committed = max(peer.committed, formed.step)
        self.reports.formed[formed.member] = formed
        if self.note_formed(peer, formed.view) and not self.awaiting:
            self.reports.view_formed(formed)

    def note_formed(self, peer: Peer, at: ViewId) -> bool:
        """Returns whether this was the last member that its view waited for."""
        peer.view = max(peer.view or at, at)
        if self.planned is not None and at == self.planned.id:
            self.planned_entered = True
            self.planned_unformed.discard(peer.name)
            if not self.planned_unformed and not self.awaiting and self.change is None:
                _planned.switched(self)
                return True
        elif self.view is not None and at == self.view.id and peer.name in self.unformed:
            self.unformed.discard(peer.name)
            if not self.ever_formed:
                self.ever_formed = True
                self.persist()
            return not self.unformed
        return False

    def _on_ready(self, now_s: float, ready: m.Ready) -> None:
        peer = self.roster.peers.get(ready.member)
        if peer is not None and peer.status == "joining" and peer.serve == ready.serve:
            self.roster.mark(peer.name, "ready")
            peer.committed = ready.step
            self.journal("joiner_caught_up", replica=peer.name, step=ready.step, seconds=max(0.0, now_s - peer.since_s))

    def _on_rejoin(self, now_s: float, rejoin: m.Rejoin) -> None:
        peer = self.roster.peers.get(rejoin.member)
        if peer is None or not peer.alive:
            return
        if peer.name in self.current:
            if self.view is not None and ViewId(epoch=0, n=0) < rejoin.view < self.view.id:
                return  # said of an earlier view, and late: of this one it speaks for itself
            _change.begin(self, f"{peer.name} has no state to act with")
            _change.demote(self, peer.name)
        elif peer.status in ("joining", "ready"):
            self.roster.mark(peer.name, "fresh")

    def _on_leaving(self, now_s: float, leaving: m.Leaving) -> None:
        peer = self.roster.peers.get(leaving.member)
        if peer is not None and peer.alive:
            peer.leaving = self.leaving = True
            if peer.name not in self.current:
                self.tell([peer.name], self._departure())

    def _on_done(self, now_s: float, done: m.Done) -> None:
        peer = self.roster.peers.get(done.member)
        if peer is not None:
            peer.committed = max(peer.committed, done.steps)
            self.done.setdefault(done.view, set()).add(done.member)

    def _on_failed(self, now_s: float, failed: m.Failed) -> None:
        peer = self.roster.peers.get(failed.member)
        if peer is not None:
            peer.committed = max(peer.committed, failed.step)
        self.failures.raised(self, failed)

    _on_stalled, _on_examined, _on_rows = _silence.stalled, _silence.examined, _silence.rows
    _on_continued = _silence.continued
    _on_admitted, _on_accused = _robust_rules.admitted, _robust_rules.accused
    _on_resumed, _on_devicenoted = resumed, noted
    _on_whole, _on_judged, _on_audited = _telling.tell_whole, _step_verdicts.judged, _audit_findings.audited

    # --- what agents and the launcher say ------------------------------------------------------------------------
    def _on_agenthello(self, now_s: float, hello: m.AgentHello) -> None:
        if hello.epoch > self.epoch:
            self._on_superseded(now_s, m.Superseded())
            return
        if not self.roster.agent_here(hello.agent, hello.pid, hello.number):
            return
        self.tell([hello.agent], m.Welcome(epoch=self.epoch))
        listed = set(hello.members)
        for name in hello.members:
            if self.roster.superseded(name):
                self.roster.add(name, hello.agent, "condemned")
            peer = self.roster.peers.get(name) or self.roster.add(name, hello.agent, "spawning")
            peer.agent = hello.agent
            if not peer.alive:
                self.kill(name, "the run went on without this replica")
        started, unstarted = self.roster.unlisted(hello.agent, listed)
        for name in started:
            self._on_exited(now_s, m.Exited(member=name, cause="exit", detail="died while its agent was out of reach"))
        for name in unstarted:
            self.tell([hello.agent], m.Spawn(epoch=self.epoch, member=name, after_s=0.0))

    def _on_agentgone(self, now_s: float, gone: m.AgentGone) -> None:
        lost = [p.name for p in self.roster.peers.values() if p.agent == gone.agent and p.status != "gone"]
        if gone.agent not in self.roster.agents and not lost:
            return
        self.roster.agent_lost(gone.agent)
        self.journal("agent_lost", agent=gone.agent, cause=gone.cause, replicas=lost)
        for name in lost:
            detail = f"its agent {gone.agent} died: {gone.cause}"
            self._on_exited(now_s, m.Exited(member=name, cause="agent_lost", detail=detail))

    def _on_spawned(self, now_s: float, spawned: m.Spawned) -> None:
        peer = self.roster.peers.get(spawned.member)
        if peer is not None:
            peer.pid = spawned.pid
        self.journal("replica_started", replica=spawned.member, agent=spawned.agent, pid=spawned.pid)

    def _on_spawnfailed(self, now_s: float, failed: m.SpawnFailed) -> None:
        self.roster.drop(failed.member, now_s)
        self.journal("notice", level="error", text=f"{failed.member} could not be started: {failed.error}")

    def _on_unjoined(self, now_s: float, told: m.Unjoined) -> None:
        if self.unjoined or any(peer.joined for peer in self.roster.peers.values()):
            return  # told already, or the script does join, and this replica is slow
        self.unjoined = True
        text = (
            f"{told.member} has run for {told.for_s:.0f} s without outlast.join(), which makes it part of this run. A "
            "script that never calls it (a Trainer's, say) trains the whole job in every replica: stop it, and call "
            "outlast.join() and protect() in a loop of its own"
        )
        self.journal("notice", level="warning", text=text)

    def _on_exited(self, now_s: float, exited: m.Exited) -> None:
        name = exited.member
        died = _ending.exited(self, exited) if self.ending is not None else None
        known = self.roster.peers.get(name)
        if known is not None and known.status == "gone":
            return
        if known is None and incarnation_of(name) <= self.roster.incarnations.get(slot_of(name), 0):
            self.roster.drop(name, now_s)  # an agent repeats what an earlier coordinator has dealt with
            return
        self.roster.learn(name, exited.committed)
        planned_departure = known is not None and known.leaving and exited.cause in ("left", "finished", "exit")
        self.roster.drop(name, now_s)
        self.unheard.discard(name)
        fault = died if died is not None else not planned_departure or name in self.current
        self.reports.exited(exited, known.committed if known else None, fault, name in self.current)
        self.failures.ended(self, exited, fault)
        if self.change is not None:
            self.change.waiting.discard(name)
            self.change.acked.discard(name)
        elif name in self.current and not self.over and self.ending is None:
            self._member_gone(name, exited)

    def _member_gone(self, name: str, exited: m.Exited) -> None:
        cause = f"{name}: {exited.cause}"
        if not self.awaiting:
            _change.begin(self, cause)
            return
        self.awaiting.discard(name)
        self.disturbed = cause
        # the rest follows in _progress, once nobody is awaited

    # --- what the driver says ------------------------------------------------------------------------------------
    def _on_timer(self, now_s: float, timer: m.Timer) -> None:
        kind, _, view = timer.name.partition(":")
        change = self.change
        if kind in ("ack", "lease", "doubt"):
            if change is not None and str(change.upto) == view:
                self._change_timer(kind, change)
        elif kind == "probe":
            _silence.probed(self, timer.name)
        elif kind == "form":
            self._form_overdue(view)
        elif kind == "start":
            _beginning.overdue(self)
        elif kind == "gather":
            _beginning.gathered(self)

    def _change_timer(self, kind: str, change: Change) -> None:
        if kind == "ack":
            change.expired = True
            self.timer(f"lease:{change.upto}", self.settings.lease_s * (1.0 + self.settings.clock_margin))
        elif kind == "lease":
            change.lease_out = True
        elif change.doubtful:
            change.doubtful = False
            doubts = {pair for pair in change.doubts if all(map(self.roster.is_alive, pair))}
            _silence.cut(self, doubts, "its connection to a peer ended though both live")

    def _form_overdue(self, which: str) -> None:
        newest = self.planned or self.view
        if newest is None or self.change is not None or str(newest.id) != which:
            return
        late = self.planned_unformed if self.planned is not None else self.unformed
        if (self.planned is not None and not self.planned_entered) or self.probing == newest.id:
            # The step before it still runs; or its paths are being probed, which will say who is at fault.
            self.timer(f"form:{which}", self.settings.formation_s)
        elif late:
            _change.begin(self, f"view {newest.id} did not form: {', '.join(sorted(late)[:5])} late")

    def _on_superseded(self, now_s: float, _: m.Superseded) -> None:
        self.over = True
        self._out = [m.Finish(outcome="stopped", exit_code=0, steps=0, detail="superseded by a newer coordinator")]

    def _on_stop(self, now_s: float, stop: m.Stop) -> None:
        self.finish("stopped", stop.exit_code, 0, stop.reason)

    # --- small things --------------------------------------------------------------------------------------------
    def _spawn(self) -> None:
        started = list(self.roster.vacancies())
        if started:
            self.persist()
        for name, agent, delay in started:
            self.tell([agent], m.Spawn(epoch=self.epoch, member=name, after_s=delay))

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
            self.persist()
            self.tell([agent], m.Kill(epoch=self.epoch, member=name, reason=why))

    def persist(self, **ended: Any) -> None:
        """Also where nothing changed: the write is what proves that this coordinator still is the coordinator."""
        placement = {p.name: p.agent for p in self.roster.peers.values() if p.alive}
        record = m.Record(
            view=self.view, planned=self.planned, incarnations=dict(self.roster.incarnations), placement=placement,
            facts=self.facts, formed=self.ever_formed, offences=dict(self.roster.offences),
            fleeting=dict(self.roster.fleeting), ending=self.ending, **ended,
        )  # fmt: skip
        if not any(isinstance(action, m.Persist) and action.record == record for action in self._out):
            self._out.append(m.Persist(record=record))

    def tell(self, to: Sequence[str], message: m.FromCoordinator) -> None:
        if to:
            self._out.append(m.Tell(to=tuple(to), message=message))

    def timer(self, name: str, after_s: float) -> None:
        self._out.append(m.SetTimer(name=name, after_s=after_s))

    def journal(self, kind: str, **fields: object) -> None:
        self._out.append(m.Journal(kind=kind, fields=fields))

    def finish(
        self, outcome: Literal["finished", "failed", "stopped"], exit_code: int, steps: int, detail: str
    ) -> None:
        if self.over:
            return
        self.over, self.farewell = True, outcome if outcome == "finished" else detail or outcome
        if self.change is None:  # else the last faults were not recovered from
            self.reports.recoveries(self.latest())
        self.reports.end()
        self.persist(outcome=outcome, exit_code=exit_code, steps=steps, detail=detail)
        everyone = [p.name for p in self.roster.peers.values() if p.alive]
        self.tell(everyone, m.Close(epoch=self.epoch, reason=self.farewell))
        self.tell(sorted(self.roster.agents), m.Stop(epoch=self.epoch, reason=outcome))
        self.end(m.Finish(outcome=outcome, exit_code=exit_code, steps=steps, detail=detail))

    def end(self, finish: m.Finish) -> None:
        self._out.append(finish)

    def _after_the_end(self, event: m.Event) -> list[m.Action]:
        if isinstance(event, m.Hello) and self.farewell:
            return [m.Tell(to=(event.member,), message=m.Close(epoch=self.epoch, reason=self.farewell))]
        return []
