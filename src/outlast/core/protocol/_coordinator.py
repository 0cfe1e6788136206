"""The coordinator: orders membership, and nothing else. It is not on the step's path.

`Coordinator.handle(now_s, event) -> actions` is the whole of it: no clock, no sockets, no randomness. Actions are
carried out in order; a `Persist` must be durable before anything after it (protocol, 2 and 3). Read `_progress` first:
after every event it looks at the whole state and does the one thing that is next.

    no view ── enough fresh members ──► view formed ──(death, Left, eviction)──► change: everyone is told to leave
                                          ▲   │ planned switch / serve a joiner         │ all alive acknowledged
                                          │   ▼ (orders, carried out between steps)     ▼ or the deadline passed
                                          └────────────── successor: durable, then told ┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outlast.core.phases import Phase
from outlast.core.policy._eviction import Evidence, judge, vertex_cover
from outlast.core.protocol import _messages as m
from outlast.core.protocol._roster import Peer, Roster, Settings, slot_of
from outlast.core.protocol._types import Order, View, ViewId

__all__ = ["Change", "Coordinator"]


@dataclass(slots=True)
class Change:
    """A view is over and its successor not yet installed."""

    upto: ViewId
    old: tuple[str, ...]
    cause: str
    acked: set[str] = field(default_factory=set)
    doubts: set[tuple[str, str]] = field(default_factory=set)
    doubtful: bool = True  # doubts still wait for certainty
    expired: bool = False
    lease_out: bool = False


@dataclass(slots=True)
class Fault:
    """One thing that went wrong, until the view after it has formed and it can be reported whole."""

    cause: str
    member: str
    noticed_by: str
    noticed_at_s: float
    last_alive_s: float
    detail: str = ""


class Coordinator:
    """See the module. `record`: what the previous coordinator made durable, None for a new run."""

    def __init__(self, settings: Settings, epoch: int, record: m.Record | None = None) -> None:
        self.settings, self.epoch = settings, epoch
        self.roster = Roster(settings)
        self.view: View | None = None
        self.planned: View | None = None
        self.change: Change | None = None
        self.orders = 0
        self.facts: dict[str, str] = {}
        self.over = False
        self.ever_formed = False
        self.awaiting: set[str] = set()  # after a restart: members of the last view that have not reported
        self._said: dict[str, m.Hello] = {}
        self._placement: dict[str, str] = {}
        self._failures: dict[tuple[int, int], dict[str, str]] = {}
        self._early: dict[str, str] = {}
        self._faults: list[Fault] = []
        self._formed: dict[str, m.Formed] = {}
        self._noticed_s: dict[str, tuple[str, float]] = {}
        self._stalls: dict[str, m.Stalled] = {}
        self._rows: dict[str, tuple[str, ...]] = {}
        self._out: list[m.Action] = []
        if record is not None:
            self._recover(record)

    def handle(self, now_s: float, event: m.Event) -> list[m.Action]:
        """React to one event at monotonic time `now_s`; returns the actions, in order."""
        if self.over:
            return self._after_the_end(event)
        getattr(self, "_on_" + type(event).__name__.lower())(now_s, event)
        self._progress(now_s)
        out, self._out = self._out, []
        return out

    # --- what is next --------------------------------------------------------------------------------------------
    def _progress(self, now_s: float) -> None:
        if self.over:
            return
        if self.awaiting:
            return
        self._spawn()
        if self.change is not None:
            self._try_install(now_s)
        elif self.view is None:
            self._try_start()
        elif self._everyone(lambda p: p.done):
            steps = max(self.roster.peers[name].committed for name in self.view.members)
            self._finish("finished", 0, steps, "")
        elif self.planned is None and self._settled():
            self._report_recoveries()
            self._try_switch() or self._try_serve()

    def _everyone(self, test: Any) -> bool:
        assert self.view is not None
        return all(test(self.roster.peers[name]) for name in self.view.members)

    def _settled(self) -> bool:
        view = self.view
        return view is not None and self._everyone(lambda p: p.view == view.id)

    def _latest(self) -> ViewId:
        newest = self.planned or self.view
        return newest.id if newest else ViewId(self.epoch, 0)

    def _next_id(self) -> ViewId:
        return ViewId(self.epoch, self._latest().n + 1)

    # --- starting ------------------------------------------------------------------------------------------------
    def _try_start(self) -> None:
        wanted = [f"r{i}" for i in range(self.settings.num_replicas)]
        fresh = {slot_of(name): name for name in self.roster.having("fresh")}
        if all(slot in fresh for slot in wanted):
            members = tuple(fresh[slot] for slot in wanted)
            self._install(View(id=self._next_id(), members=members, start=True), "start")

    # --- a view is over ------------------------------------------------------------------------------------------
    def _begin_change(self, cause: str) -> None:
        if self.view is None:
            return
        if self.change is None:
            old = dict.fromkeys(self.view.members + (self.planned.members if self.planned else ()))
            self.change = Change(upto=self._latest(), old=tuple(old), cause=cause)
            for name in self.roster.having("joining"):
                self.roster.peers[name].status = "fresh"
                self._tell([name], m.Rejoin(member=name))
            self._timer("ack", self.settings.ack_s)
            self._tell(self.roster.alive(old), m.Notify(epoch=self.epoch, view=self.change.upto, cause=cause))

    def _try_install(self, now_s: float) -> None:
        change = self.change
        assert change is not None
        alive = self.roster.alive(change.old)
        acked = [name for name in alive if name in change.acked]
        if self._open_doubts():
            return
        if not alive:
            self._without_survivors(change)
        elif acked and (len(acked) == len(alive) or change.expired):
            for name in alive:
                if name not in change.acked:
                    self._condemn(name, f"did not acknowledge leaving view {change.upto}", now_s)
            self._install(self._successor(change.old, acked), change.cause)
        elif change.lease_out:
            for name in alive:
                self._condemn(name, "silent for longer than the lease", now_s)
            self._try_install(now_s)

    def _open_doubts(self) -> bool:
        """Whether a broken connection still waits to be explained by an exit."""
        change = self.change
        assert change is not None
        change.doubts = {pair for pair in change.doubts if all(self.roster.alive([name]) for name in pair)}
        return bool(change.doubts) and change.doubtful

    def _without_survivors(self, change: Change) -> None:
        ready = self.roster.having("ready")
        if ready:  # a spare is a replica that owned nothing; it goes on from its own last step, to the same bits
            self._install(self._successor((), ready[: self.settings.num_replicas]), change.cause)
        elif not self.ever_formed:
            self.view = self.planned = self.change = None
        else:
            self._finish("failed", 6, 0, "every replica that held the training state is gone")

    def _successor(self, old: Sequence[str], carriers: Sequence[str]) -> View:
        """Survivors in their order, ready spares in the places of the dead, the other spares attached."""
        spares = [name for name in self.roster.having("ready") if name not in carriers]
        spares = [name for name in spares if not self.roster.peers[name].leaving]
        staying = [name for name in carriers if not self.roster.peers[name].leaving] or list(carriers)
        members: list[str] = []
        for name in old or carriers:
            if name in staying:
                members.append(name)
            elif spares and self._wanted() > len(staying):
                members.append(spares.pop(0))
                staying.append(members[-1])
        while spares and len(members) < self._wanted():
            members.append(spares.pop(0))
        return View(id=self._next_id(), members=tuple(members), attached=tuple(spares))

    def _wanted(self) -> int:
        return self.settings.num_replicas

    def _install(self, view: View, cause: str) -> None:
        """Durable first, then told (protocol, step 3 of a death)."""
        self.view, self.planned, self.change, self.orders = view, None, None, 0
        self._formed.clear()
        self._rows.clear()
        for name in view.members:
            peer = self.roster.peers[name]
            peer.status, peer.done, peer.heard = "member", False, 0
        self._persist()
        self._journal(
            "view_installed", epoch=view.id.epoch, n=view.id.n, members=list(view.members), cause=cause, planned=False
        )
        self._tell(view.members, self._install_message(view, cause))
        self._timer("form", self.settings.formation_s)

    def _install_message(self, view: View, cause: str) -> m.Install:
        return m.Install(view=view, cause=cause, **self._contacts(view))

    def _contacts(self, view: View) -> dict[str, Any]:
        peers = self.roster.peers
        everyone = view.members + view.attached
        return {
            "addresses": {name: peers[name].address for name in everyone if name in peers},
            "store": peers[view.members[0]].store,
        }

    # --- planned changes -----------------------------------------------------------------------------------------
    def _try_switch(self) -> bool:
        view = self.view
        assert view is not None
        staying = [name for name in view.members if not self.roster.peers[name].leaving]
        ready = [name for name in self.roster.having("ready") if not self.roster.peers[name].leaving]
        vacant = max(0, self._wanted() - len(staying))
        members = (*staying, *ready[:vacant])
        if members == view.members or self._everyone(lambda p: p.done):
            return False
        if not members:
            self._finish("stopped", 0, 0, "every replica was asked to leave")
            return True
        attached = tuple(name for name in ready if name not in members)
        self.planned = View(id=self._next_id(), members=members, attached=attached)
        self._persist()
        self._journal(
            "view_installed", epoch=self.epoch, n=self.planned.id.n, members=list(members), cause="planned",
            planned=True,
        )  # fmt: skip
        order = self._order("switch", next_view=self.planned)
        self._tell(tuple(dict.fromkeys(view.members + members)), m.Take(order=order, **self._contacts(self.planned)))
        self._timer("form", self.settings.formation_s)
        return True

    def _try_serve(self) -> bool:
        view = self.view
        assert view is not None
        fresh = self.roster.having("fresh")
        for name in fresh:
            self.roster.peers[name].status = "joining"
            order = self._order("serve", joiner=name)
            contact = {name: self.roster.peers[name].address}
            self._tell([name], m.BeginServe(epoch=self.epoch, donors=view.members))
            self._tell(view.members, m.Take(order=order, addresses=contact))
        return bool(fresh)

    def _order(self, kind: Any, next_view: View | None = None, joiner: str = "") -> Order:
        assert self.view is not None
        self.orders += 1
        return Order(view=self.view.id, number=self.orders, kind=kind, next=next_view, joiner=joiner)

    # --- what members say ----------------------------------------------------------------------------------------
    def _on_hello(self, now_s: float, hello: m.Hello) -> None:
        if hello.epoch > self.epoch:
            self._on_superseded(now_s, m.Superseded())
            return
        known = self.roster.peers.get(hello.member)
        if known is not None and not known.alive:
            self._tell([hello.member], m.Evict(epoch=self.epoch, reason="the run went on without this replica"))
            return
        if not self._same_facts(hello):
            return
        peer = known or self.roster.add(hello.member, hello.agent, "fresh")
        peer.address, peer.store, peer.joined = hello.address, hello.store, True
        peer.committed, peer.done, peer.heard = hello.committed, hello.done, hello.heard
        if hello.member in self.awaiting:
            self._reported(peer, hello)
        elif peer.status in ("spawning", "fresh"):
            peer.status = hello.state if hello.state in ("joining", "ready") else "fresh"
            if hello.view is not None and hello.state == "member":
                self._condemn(peer.name, "a member of a view that is not this run's newest", now_s)
        else:
            self._remind(peer)

    def _same_facts(self, hello: m.Hello) -> bool:
        if not self.facts:
            self.facts = dict(hello.facts)
            self._persist()
        different = sorted(k for k in self.facts.keys() | hello.facts.keys() if self.facts.get(k) != hello.facts.get(k))
        if not different:
            return True
        shown = "; ".join(f"{k}: {hello.facts.get(k)} here, {self.facts.get(k)} in the run" for k in different)
        self._tell([hello.member], m.Evict(epoch=self.epoch, reason=shown, remedy="facts"))
        self._journal("notice", level="error", text=f"{hello.member} was refused: {shown}")
        return False

    def _remind(self, peer: Peer) -> None:
        """It reconnected and may have missed what was told meanwhile."""
        if self.change is not None and peer.name in self.change.old:
            notice = m.Notify(epoch=self.epoch, view=self.change.upto, cause=self.change.cause)
            self._tell([peer.name], notice)
        elif self.view is not None and peer.name in self.view.members and peer.view != self.view.id:
            self._tell([peer.name], self._install_message(self.view, "reminder"))
        elif self.planned is not None or (self.view is not None and peer.heard < self.orders):
            self._begin_change("an order was missed")

    def _on_left(self, now_s: float, left: m.Left) -> None:
        peer = self.roster.peers.get(left.member)
        if peer is None or not peer.alive:
            return
        peer.left = left.view
        if self.view is None or left.view < self._latest() or left.member not in self._current():
            return
        self._begin_change(left.cause or f"{left.member} left")
        assert self.change is not None
        self.change.acked.add(left.member)
        for name in left.stale:
            self._demote(name)
        for name in left.suspects:
            self._noticed_s.setdefault(name, (left.member, left.at_s))
            self.change.doubts.add((left.member, name))
        if left.suspects:
            self._timer("doubt", self.settings.doubt_s)

    def _current(self) -> set[str]:
        members = set(self.view.members if self.view else ())
        return members | set(self.planned.members if self.planned else ())

    def _demote(self, name: str) -> None:
        """A spare that was too far behind starts again as a joiner."""
        if self.roster.alive([name]):
            assert self.change is not None
            self.roster.peers[name].status = "fresh"
            self.change.old = tuple(member for member in self.change.old if member != name)
            self._tell([name], m.Rejoin(member=name))

    def _on_formed(self, now_s: float, formed: m.Formed) -> None:
        peer = self.roster.peers.get(formed.member)
        if peer is None or not peer.alive:
            return
        peer.view, peer.committed = formed.view, max(peer.committed, formed.step)
        if self.planned is not None and formed.view == self.planned.id:
            self._formed[formed.member] = formed
            if all(self.roster.peers[name].view == formed.view for name in self.planned.members):
                self._switched()
        elif self.view is not None and formed.view == self.view.id:
            self._formed[formed.member] = formed
            self.ever_formed = True
            if self._settled():
                self._report_formed(formed)

    def _switched(self) -> None:
        """Everyone is in the planned view: it is the view now, and who left may go."""
        assert self.view is not None
        assert self.planned is not None
        departed = [name for name in self.view.members if name not in self.planned.members]
        self.view, self.planned, self.orders = self.planned, None, 0
        for name in self.view.members:
            self.roster.peers[name].status = "member"
        for name in departed:
            self._tell([name], m.Close(epoch=self.epoch, reason="left as planned"))
        self._persist()
        self._report_formed(next(iter(self._formed.values())))

    def _on_ready(self, now_s: float, ready: m.Ready) -> None:
        peer = self.roster.peers.get(ready.member)
        if peer is not None and peer.status == "joining":
            peer.status, peer.committed = "ready", ready.step

    def _on_rejoin(self, now_s: float, rejoin: m.Rejoin) -> None:
        peer = self.roster.peers.get(rejoin.member)
        if peer is not None and peer.status in ("joining", "ready"):
            peer.status = "fresh"

    def _on_leaving(self, now_s: float, leaving: m.Leaving) -> None:
        peer = self.roster.peers.get(leaving.member)
        if peer is not None and peer.alive:
            peer.leaving = True
            if peer.status != "member":
                self._tell([peer.name], m.Close(epoch=self.epoch, reason="left as planned"))

    def _on_done(self, now_s: float, done: m.Done) -> None:
        peer = self.roster.peers.get(done.member)
        if peer is not None and self.view is not None and done.view == self.view.id:
            peer.done, peer.committed = True, done.steps

    def _on_failed(self, now_s: float, failed: m.Failed) -> None:
        """Rule 21: two different replicas failing on the same microbatch is the user's fault."""
        by_slot = self._failures.setdefault((failed.step, failed.microbatch), {})
        by_slot[slot_of(failed.member)] = failed.error
        if len(by_slot) > 1:
            where = f"step {failed.step}, microbatch {failed.microbatch}"
            self._finish("failed", 5, failed.step, f"two replicas failed on {where}:\n{failed.error}")

    # --- silence and broken paths --------------------------------------------------------------------------------
    def _on_stalled(self, now_s: float, stalled: m.Stalled) -> None:
        if self.view is None or self.change is not None or stalled.view != self.view.id:
            return
        for name in self.roster.alive(stalled.missing):
            self._stalls[name] = stalled
            self._tell([self.roster.peers[name].agent], m.Examine(member=name))

    def _on_examined(self, now_s: float, seen: m.Examined) -> None:
        stalled = self._stalls.pop(seen.member, None)
        if stalled is None or self.change is not None or not self.roster.alive([seen.member]):
            return
        verdict = judge(
            Evidence(
                state=seen.state, traced=seen.traced, phase=Phase(seen.phase), silent_s=seen.silent_s,
                cpu_advanced=seen.cpu_advanced, allowed_s=seen.allowed_s, waited_s=stalled.waited_s,
                deadline_s=stalled.deadline_s,
            ),
            self.settings.outside_s,
        )  # fmt: skip
        if verdict.decision == "evict":
            self._noticed_s.setdefault(seen.member, (stalled.member, now_s))
            self._journal("suspected", replica=seen.member, evidence=verdict.reason, decision="evict")
            self._kill(seen.member, verdict.reason)
        elif verdict.decision == "probe":
            assert self.view is not None
            self._rows.clear()
            self._tell(self.view.members, m.Probe(view=self.view.id))
            self._timer("probe", self.settings.doubt_s)

    def _on_rows(self, now_s: float, rows: m.Rows) -> None:
        if self.view is not None and rows.view == self.view.id:
            self._rows[rows.member] = rows.reached

    def _broken_pairs(self) -> set[tuple[str, str]]:
        assert self.view is not None
        return {
            (name, other)
            for name, reached in self._rows.items()
            for other in self.view.members
            if other != name
            and other in self._rows
            and other not in reached
            and self.roster.alive([name, other]) == [name, other]
        }

    def _cut(self, pairs: set[tuple[str, str]], why: str) -> None:
        age = {name: index for index, name in enumerate(self.view.members if self.view else ())}
        for name in vertex_cover(pairs, reachable=set(self._rows) or set(self.roster.alive(age)), age=age):
            self._journal("suspected", replica=name, evidence=why, decision="evict")
            self._kill(name, why)

    # --- what agents and the launcher say ------------------------------------------------------------------------
    def _on_agenthello(self, now_s: float, hello: m.AgentHello) -> None:
        self.roster.agents.add(hello.agent)
        for name in hello.members:
            if name not in self.roster.peers:
                self.roster.add(name, hello.agent, "spawning")
            self.roster.peers[name].agent = hello.agent
        for name, agent in self._placement.items():
            if agent == hello.agent and name not in hello.members and self.roster.alive([name]):
                gone = m.Exited(member=name, cause="exit", detail="died while the coordinator was away")
                self._on_exited(now_s, gone)
        self._placement = {name: agent for name, agent in self._placement.items() if agent != hello.agent}

    def _on_agentgone(self, now_s: float, gone: m.AgentGone) -> None:
        if gone.agent not in self.roster.agents and gone.agent not in self._placement.values():
            return
        self.roster.agents.discard(gone.agent)
        lost = [p.name for p in self.roster.peers.values() if p.agent == gone.agent and p.status != "gone"]
        lost += [name for name, agent in self._placement.items() if agent == gone.agent and name not in lost]
        self._journal("agent_lost", agent=gone.agent, cause=gone.cause, replicas=lost)
        for name in lost:
            exited = m.Exited(member=name, cause="agent_lost", detail=f"its agent {gone.agent} died: {gone.cause}")
            self._on_exited(now_s, exited)

    def _on_spawned(self, now_s: float, spawned: m.Spawned) -> None:
        peer = self.roster.peers.get(spawned.member)
        if peer is not None:
            peer.pid = spawned.pid
        self._journal("replica_started", replica=spawned.member, agent=spawned.agent, pid=spawned.pid)

    def _on_spawnfailed(self, now_s: float, failed: m.SpawnFailed) -> None:
        self.roster.drop(failed.member, now_s)
        self._journal("notice", level="error", text=f"{failed.member} could not be started: {failed.error}")

    def _on_exited(self, now_s: float, exited: m.Exited) -> None:
        name = exited.member
        known = self.roster.peers.get(name)
        if known is not None and known.status == "gone":
            return
        step = known.committed if known else None
        clean = known is not None and known.leaving and exited.cause in ("left", "finished", "exit")
        self.roster.drop(name, now_s)
        self.awaiting.discard(name)
        self._placement.pop(name, None)
        noticed_by, noticed_at = self._noticed_s.pop(name, ("agent", exited.noticed_at_s))
        self._journal(
            "replica_exited", replica=name, cause=exited.cause, detail=exited.detail, noticed_by=noticed_by, step=step
        )
        if clean and name not in self._current():
            return
        self._faults.append(Fault(exited.cause, name, noticed_by, noticed_at, exited.last_alive_s, exited.detail))
        if not exited.joined and exited.cause in ("exception", "exit"):
            self._failed_early(exited)
        if name in self._current() and not self.over and not self.awaiting:
            self._begin_change(f"{name}: {exited.cause}")

    def _failed_early(self, exited: m.Exited) -> None:
        """Two replicas that end before they reach protect() are the script's fault, not the machine's."""
        self._early[slot_of(exited.member)] = exited.detail
        if len(self._early) > 1 or self.settings.num_replicas + self.settings.num_spares == 1:
            self._finish("failed", 5, 0, f"the script ends before training starts:\n{exited.detail}")

    # --- what the driver says ------------------------------------------------------------------------------------
    def _on_timer(self, now_s: float, timer: m.Timer) -> None:
        if timer.name == "ack" and self.change is not None:
            self.change.expired = True
            self._timer("lease", self.settings.lease_s * (1.0 + self.settings.clock_margin))
        elif timer.name == "lease" and self.change is not None and self.change.expired:
            self.change.lease_out = True
        elif timer.name == "doubt" and self.change is not None:
            doubts = {pair for pair in self.change.doubts if self.roster.alive(pair) == list(pair)}
            self.change.doubtful = False
            self._cut(doubts, "its connection to a peer ended though both live")
        elif timer.name == "probe" and self.view is not None and self.change is None:
            pairs = self._broken_pairs()
            if pairs:
                self._cut(pairs, "no path between two members")
        elif timer.name == "form":
            self._form_overdue()
        elif timer.name == "start" and self.view is None:
            ready = len(self.roster.having("fresh"))
            reason = f"only {ready} of {self.settings.num_replicas} replicas were ready after {self.settings.start_s} s"
            self._finish("failed", 3, 0, reason)

    def _form_overdue(self) -> None:
        newest = self.planned or self.view
        if newest is None or self.change is not None:
            return
        late = [name for name in newest.members if self.roster.peers[name].view != newest.id]
        if late and self.planned is None:
            self._begin_change(f"view {newest.id} did not form: {', '.join(late)} late")

    def _on_superseded(self, now_s: float, _: m.Superseded) -> None:
        self.over = True
        self._out = [m.Finish(outcome="stopped", exit_code=0, steps=0, detail="superseded by a newer coordinator")]

    def _on_stop(self, now_s: float, stop: m.Stop) -> None:
        self._finish("stopped", 130 if stop.reason == "interrupt" else 0, 0, stop.reason)

    # --- a restarted coordinator ---------------------------------------------------------------------------------
    def _recover(self, record: m.Record) -> None:
        self.view, self.planned, self.facts = record.view, record.planned, dict(record.facts)
        self.roster.incarnations = dict(record.incarnations)
        self._placement = dict(record.placement)
        self.ever_formed = record.view is not None
        self.awaiting = self._current()
        for name in self.awaiting:
            self.roster.add(name, record.placement.get(name, ""), "member")

    def _reported(self, peer: Peer, hello: m.Hello) -> None:
        """Rule 3: nothing is installed until every member of the last view has reported or is reported gone."""
        self.awaiting.discard(peer.name)
        self._said[peer.name] = hello
        peer.view = hello.view.id if hello.view is not None and hello.formed else None
        peer.left = hello.view.id if hello.view is not None and hello.left else None
        if not self.awaiting:
            self._reconcile()

    def _reconcile(self) -> None:
        said = [self._said[name] for name in self.roster.alive(self._current()) if name in self._said]
        views = {hello.view for hello in said}
        whole = len(views) == 1 and not any(h.left or not h.formed for h in said)
        only = next(iter(views)) if whole else None
        same = only is not None and set(only.members) == {hello.member for hello in said}
        if only is not None and same and len({hello.heard for hello in said}) == 1:
            self.view, self.planned, self.orders = only, None, said[0].heard
        else:
            self._begin_change("the coordinator was restarted in the middle of a change")

    # --- small things --------------------------------------------------------------------------------------------
    def _spawn(self) -> None:
        started = list(self.roster.vacancies())
        if started:
            self._persist()
        for name, agent, delay in started:
            self._tell([agent], m.Spawn(member=name, after_s=delay))

    def _condemn(self, name: str, why: str, now_s: float) -> None:
        self.roster.peers[name].status = "condemned"
        self._journal("suspected", replica=name, evidence=why, decision="evict")
        self._kill(name, why)
        self._tell([name], m.Evict(epoch=self.epoch, reason=why))

    def _kill(self, name: str, why: str) -> None:
        self._tell([self.roster.peers[name].agent], m.Kill(member=name, reason=why))

    def _persist(self) -> None:
        placement = {p.name: p.agent for p in self.roster.peers.values() if p.alive}
        record = m.Record(
            view=self.view, planned=self.planned, incarnations=dict(self.roster.incarnations), placement=placement,
            facts=self.facts,
        )  # fmt: skip
        self._out.append(m.Persist(record=record))

    def _tell(self, to: Sequence[str], message: Any) -> None:
        if to:
            self._out.append(m.Tell(to=tuple(to), message=message))

    def _timer(self, name: str, after_s: float) -> None:
        self._out.append(m.SetTimer(name=name, after_s=after_s))

    def _journal(self, kind: str, **fields: object) -> None:
        self._out.append(m.Journal(kind=kind, fields=fields))

    def _finish(self, outcome: Any, exit_code: int, steps: int, detail: str) -> None:
        self.over = True
        self._report_recoveries()
        everyone = [p.name for p in self.roster.peers.values() if p.alive]
        self._tell(everyone, m.Close(epoch=self.epoch, reason=detail or outcome))
        self._tell(sorted(self.roster.agents), m.Stop(reason=outcome))
        self._out.append(m.Finish(outcome=outcome, exit_code=exit_code, steps=steps, detail=detail))

    def _after_the_end(self, event: m.Event) -> list[m.Action]:
        if isinstance(event, m.Hello):
            return [m.Tell(to=(event.member,), message=m.Close(epoch=self.epoch, reason="the run is over"))]
        return []

    # --- reports -------------------------------------------------------------------------------------------------
    def _report_formed(self, formed: m.Formed) -> None:
        spans = [f.formed_at_s - f.left_at_s for f in self._formed.values() if f.left_at_s]
        self._journal(
            "view_formed", epoch=formed.view.epoch, n=formed.view.n, step=formed.step,
            roll_call_s=max(spans, default=0.0),
        )  # fmt: skip

    def _report_recoveries(self) -> None:
        """One record a fault, once the view after it works."""
        formed = list(self._formed.values())
        left = min((f.left_at_s for f in formed if f.left_at_s), default=0.0)
        back = max((f.formed_at_s for f in formed), default=0.0)
        for fault in self._faults:
            noticed = min((t for t in (left, fault.noticed_at_s) if t), default=0.0)
            interrupted = bool(left) and bool(formed)
            self._journal(
                "recovery", cause=fault.cause, replica=fault.member, noticed_by=fault.noticed_by,
                detect_s=max(0.0, noticed - fault.last_alive_s) if fault.last_alive_s else 0.0,
                downtime_s=max(0.0, back - noticed) if interrupted else 0.0,
                microbatches_recomputed=max((f.recomputed for f in formed), default=0) if interrupted else 0,
                lost_steps=0, step=max((f.step for f in formed), default=0),
                view=[self._latest().epoch, self._latest().n], detail=fault.detail,
            )  # fmt: skip
        self._faults.clear()
