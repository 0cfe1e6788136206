"""The coordinator: orders membership, and nothing else. It is not on the step's path.

`Coordinator.handle(now_s, event) -> actions` is the whole of it: no clock, no sockets, no randomness. Actions are
carried out in order; a `Persist` must be durable before anything after it (protocol, 2 and 3). Read `_progress` first:
after every event it does the one thing that is next. `rules` lists the events, and which rule each is for. Rules lie
beside this file and work on the data in `state`: `_members` and `_agents` (what they say), `change` (a view is over),
`_planned` (somebody in or out, a joiner to be served), `_silence` (who is asked to go), `_hosts` (who is not heard of),
`_restart` (a new epoch), `_returning` (a lost connection), `_asked` (what people want), `_spares` (how many wait),
`_vacancies` (what is done where some are missing).

    no view ── enough fresh members ──► view formed ──(death, Left, eviction)──► change: everyone is told to leave
                                          ▲   │ planned switch / serve a joiner         │ all alive acknowledged
                                          │   ▼ (orders, carried out between steps)     ▼ or the deadline passed
                                          └────────────── successor: durable, then told ┘

Nothing that cannot be taken back (a view, a kill, the end of the run) is said before a durable write conditional on
the epoch, so a coordinator that was stopped and resumed after its successor took over does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from outlast.core import events as ev
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.core.protocol import operator_messages as om
from outlast.core.protocol.fleet import (
    _agents,
    _asked,
    _audit_findings,
    _bad_links,
    _beginning,
    _ending,
    _hosts,
    _members,
    _notes,
    _planned,
    _restart,
    _robust_rules,
    _silence,
    _spares,
    _step_verdicts,
    _telling,
    _timers,
    _vacancies,
    _work,
    recalled_alarms,
)
from outlast.core.protocol.fleet import change as _change
from outlast.core.protocol.fleet.roster import Settings
from outlast.core.protocol.fleet.state import FleetState
from outlast.core.protocol.fleet.views import let_go

__all__ = ["Coordinator"]

Rule = Callable[[FleetState, float, Any], None]  # the state, the time, an event of the rule's own kind


def _superseded(c: FleetState, now_s: float, _: m.Superseded) -> None:
    c.superseded()


def _stop(c: FleetState, now_s: float, stop: m.Stop) -> None:
    c.finish("stopped", stop.exit_code, 0, stop.reason)


class Coordinator(FleetState):
    """Decides for the fleet, event by event. `record`: what the previous coordinator made durable, None for a new
    run."""

    rules: ClassVar[Mapping[type, Rule]] = {
        m.Accused: _robust_rules.accused, m.Admitted: _robust_rules.admitted,
        m.AgentContinued: _silence.agent_continued, m.AgentGone: _agents.agent_gone,
        m.AgentHello: _agents.agent_hello, m.Audited: _audit_findings.audited, m.Continued: _silence.continued,
        m.DataNoted: _notes.data_noted, m.DeviceNoted: _notes.noted, m.Done: _members.done,
        m.Examined: _silence.examined, m.Exited: _agents.exited,
        m.Failed: _members.failed, m.Formed: _members.formed, m.Hello: _members.hello,
        om.DrainAsked: _asked.drain, om.EvictAsked: _asked.evict, om.ScaleAsked: _asked.scale,
        hm.HostHere: _hosts.host_here, hm.HostSilent: _hosts.host_silent, hm.LinksJudged: _bad_links.judged,
        hm.SpeedsMeasured: _work.measured,
        m.Departing: _members.departing, m.SparesWorth: _spares.worth,
        m.Judged: _step_verdicts.judged, m.Leaving: _members.leaving, m.Left: _members.left, m.Ready: _members.ready,
        m.Rejoin: _members.rejoin, m.Resumed: _notes.resumed, m.Rows: _silence.rows,
        m.ReplacementsBelieved: _vacancies.believed, m.SaveAwaited: _vacancies.save_awaited,
        m.SavePublished: _notes.save_published,
        m.SpawnFailed: _agents.spawn_failed, m.Spawned: _agents.spawned, m.Stalled: _silence.stalled, m.Stop: _stop,
        m.Superseded: _superseded, m.Timer: _timers.timer, m.Unjoined: _notes.unjoined, m.Whole: _telling.tell_whole,
    }  # fmt: skip

    def __init__(self, settings: Settings, epoch: int, record: m.FleetRecord | None = None) -> None:
        super().__init__(settings, epoch)
        if record is not None:
            _restart.recover(self, record)

    def recall(self, story: Iterable[ev.AnyEvent], apart_s: float) -> None:
        """Take over predecessors' alarms from the run's record, before the first event. `apart_s`: Unix time less
        monotonic time."""
        recalled_alarms.recall(self, story, apart_s)

    def handle(self, now_s: float, event: m.Event) -> list[m.Action]:
        """React to one event at monotonic time `now_s`; returns the actions, in order."""
        self.now_s = now_s
        if self.over:
            return self._after_the_end(event)
        if self.ended is not None:
            _restart.end_again(self, self.ended)
        else:
            self.rules[type(event)](self, now_s, event)
            self._progress(now_s)
        out, self._out = self._out, []
        return out

    def _progress(self, now_s: float) -> None:
        if self.ending is not None and not self.over:
            _hosts.patience(self)
            _ending.progress(self)
        if self.over or self.awaiting or self.ending is not None:
            return
        if self.disturbed and self.change is None:
            _restart.reconcile(self)
        self._spawn()
        if self.change is not None:
            _change.try_install(self, now_s)
        if self.silent and not self.over:
            _hosts.settle(self, now_s)
            self._spawn()  # nothing else may ever happen: of a fleet on one host nobody is left to say a word
        if self.over or self.change is not None:
            return
        if self.outgoing and not self.unformed:
            let_go(self)
        if self.view is None:
            _beginning.try_start(self, now_s)
        elif len(self.done.get(self.view.id, ())) == len(self.view.members):
            steps = max(self.roster.peers[name].committed for name in self.view.members)
            _ending.begin(self, steps)
        elif self.planned is None and not self.unformed:
            self.reports.recoveries(self.latest())
            _vacancies.stop_if_too_few(self)
            _planned.plan_next(self)
            _robust_rules.tell_in_vain(self)

    def _spawn(self) -> None:
        started = list(self.roster.vacancies())
        if started:
            self.persist()
        for name, agent, delay in started:
            self.tell([agent], self.spawn_message(name, agent, delay))

    def _after_the_end(self, event: m.Event) -> list[m.Action]:
        if isinstance(event, m.Superseded):  # the end itself was not written, so it is not this one's to tell
            self.superseded()
            out, self._out = self._out, []
            return out
        if isinstance(event, m.Hello) and self.farewell:
            return [m.Tell(to=(event.member,), message=m.Close(epoch=self.epoch, reason=self.farewell))]
        return []
