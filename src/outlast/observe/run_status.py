"""The state of a run, folded from its events: who is alive, in which view, at which step.

Role: one fold, used at once by `outlast status` and step by step by the live view. Pure: what the journal does not
say (whether anybody still holds the run's lock, what time it is) is passed in. Invariants: folding the events in
pieces or at once gives the same status; every figure is of a moment that is told with it, so that what was true a
minute ago is never shown as if it were true now.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from outlast.core import events as ev
from outlast.observe._accounting import usual_silence_s
from outlast.observe.checkpoint_words import PLAIN_FAILURES
from outlast.observe.rounding import format_s
from outlast.observe.status_records import OVER_DETAIL, Process, ReplicaStatus, RunState, Status
from outlast.observe.story_events import NamelessMembers

__all__ = ["NUM_NEWEST", "StatusFold", "status"]

NUM_NEWEST = 20
"""As many of the newest entries about progress say all that a status knows from them: who reads a long journal reads no
others, and who has followed the run from its beginning must not know more."""

_NO_PACE = frozenset({"starting", "forming", "stalled", "ending"})
"""States in which the pace of before is none of now; a run that is over is told by its last steps."""
_GONE = frozenset({"exited", "ended"})
"""States of a replica without a process."""


class StatusFold:
    """Takes events one by one; `status()` may be asked at any time."""

    def __init__(self) -> None:
        self._started: ev.RunStarted | None = None
        self._finished: ev.RunFinished | None = None
        self._coordinator: Process | None = None
        self._agents: dict[str, Process] = {}
        self._drained: set[str] = set()  # hosts that were asked to be emptied
        self._wanted = 0  # replicas that were asked for while it trained
        self._replicas: dict[str, ReplicaStatus] = {}  # `view` and the states of a view's members are in what follows
        self._inside: frozenset[str] = frozenset()
        self._suspected: set[str] = set()
        self._people = 0  # rises with every change of who is there and how they are
        self._view: tuple[int, int] | None = None
        self._formed = self._begins_again = False
        self._ended: ev.TrainingEnded | None = None
        self._planned: ev.ViewInstalled | None = None
        self._progress: ev.ProgressMade | None = None
        self._step: int | None = None
        self._loss: float | None = None
        self._without_loss = 0  # entries about progress since
        self._recoveries = 0
        self._last_recovery: ev.Recovery | None = None
        self._verdicts = 0
        self._last_verdict: ev.VerdictReached | None = None
        self._updated_at_s: float | None = None
        self._saved: ev.CheckpointSaved | None = None
        self._failed_save: ev.CheckpointFailed | None = None
        self._failed_saves = 0
        self._step_at_s: float | None = None
        self._mismatches = 0
        self._certified: int | None = None
        self._waits: ev.VacancyDecided | None = None  # of those that are left, for others

    def take(self, event: ev.AnyEvent) -> None:
        """Fold one event in."""
        self._updated_at_s = max(event.at_s, self._updated_at_s or event.at_s)
        if (take := _TAKES.get(type(event))) is not None:
            take(self, event)

    def _take_rare(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.CheckpointSaved():
                self._saved, self._failed_save = event, None
            case ev.RunStarted():
                self._started = event
            case ev.RunFinished():
                self._finished = event
                self._step = max(event.steps, self._step or 0) if event.steps else self._step
            case ev.Recovery():
                self._recoveries, self._last_recovery = self._recoveries + 1, event
                if event.lost_steps and (self._step or 0) >= event.step + event.lost_steps:
                    self._step = event.step
            case ev.VerdictReached():
                self._verdicts, self._last_verdict = self._verdicts + 1, event
            case ev.CheckpointFailed() if event.cause not in PLAIN_FAILURES:
                self._failed_save, self._failed_saves = event, self._failed_saves + 1
            case ev.FleetGone():
                self._step = self._step_at_s = None  # what follows begins at an earlier one
                self._formed, self._begins_again = False, True
                self._ended = None
            case ev.TrainingEnded():
                self._ended, self._step = event, max(event.steps, self._step or 0)
                self._people += 1
            case ev.AuditMismatch():
                self._mismatches += 1
            case ev.StateCertified():
                self._certified = event.step
            case ev.Asked() if event.accepted:
                self._take_asked(event)
            case ev.VacancyDecided():
                self._waits = event if event.action == "wait" else None

    @property
    def people_version(self) -> int:
        """Return a number that rises whenever a replica's state may have changed; its step is no part of that."""
        return self._people

    def status(self, *, held: bool | None = None, now_s: float | None = None, people: bool = True) -> Status:
        """The state now. `held`: whether a process holds the run's lock; None if that is not known. `now_s`: Unix time;
        without it nothing is known of how old anything is. `people`: whether `replicas` is wanted, which takes time in
        a fleet of thousands."""
        over = self._finished is not None or held is False
        agents = [self._placed(agent, over) for agent in self._agents.values()]
        age_s = max(0.0, now_s - self._step_at_s) if now_s is not None and self._step_at_s is not None else None
        as_of_s = self._updated_at_s if now_s is None or over else now_s
        state, detail = self._state(held, age_s)
        silent = f"silent for {format_s(age_s)}" if state == "stalled" and age_s is not None and not self._wait else ""
        return Status(
            run_id=self._started.run_id if self._started else "",
            state=state,
            detail=detail,
            started_at_s=self._started.at_s if self._started else None,
            updated_at_s=self._updated_at_s,
            view=self._view,
            step=self._step,
            until=(self._progress.until if self._progress else 0) or None,
            step_s=self._progress.step_s if self._progress and state not in _NO_PACE else None,
            loss=self._loss,
            num_replicas=self._wanted or (self._started.num_replicas if self._started else 0),
            num_recoveries=self._recoveries,
            last_recovery=self._last_recovery,
            num_verdicts=self._verdicts,
            last_verdict=self._last_verdict,
            coordinator=self._placed(self._coordinator, over) if self._coordinator else None,
            agents=agents,
            replicas=[self._replica(name, over, silent) for name in self._shown()] if people else [],
            last_save=self._saved,
            failed_save=self._failed_save,
            num_audit_mismatches=self._mismatches,
            step_at_s=self._step_at_s,
            step_age_s=age_s,
            num_failed_saves=self._failed_saves,
            certified_step=self._certified,
            as_of_s=as_of_s,
            save_age_s=max(0.0, as_of_s - self._saved.at_s) if self._saved is not None and as_of_s else None,
        )

    def _state(self, held: bool | None, age_s: float | None) -> tuple[RunState, str]:
        if self._finished:
            return self._finished.outcome, self._finished.detail
        if held is False:
            return "lost", "no process holds the run, and it did not finish: its launcher was killed"
        if self._view is None or (not self._formed and self._step is None):
            return "starting", "every replica was gone, and the run begins again" if self._begins_again else ""
        if not self._formed:
            return "forming", "a view is being formed"
        until = self._progress.until if self._progress else 0
        if self._ended is not None:
            return "ending", f"training is done; the script of {self._ended.writer}, which writes, is not"
        if until and self._step is not None and self._step >= until:
            return "ending", "all steps are done; the end of the script is awaited"
        step_s = self._progress.step_s if self._progress else 0.0
        if age_s is not None and self._wait:
            return "stalled", f"those that are left wait for others, {format_s(age_s)} since the last step"
        if age_s is not None and age_s > usual_silence_s(self._heartbeat_s, step_s):
            usual = f", and steps take {format_s(step_s)}" if step_s else ""
            return "stalled", f"silent for {format_s(age_s)}{usual}"
        return "training", ""

    @property
    def _wait(self) -> bool:
        """Whether those that are left wait for others, in place of making steps."""
        return self._waits is not None and self._waits.at_s > (self._step_at_s or 0.0)

    @property
    def _heartbeat_s(self) -> float:
        beat = self._started.config.get("heartbeat_s") if self._started else None
        return float(beat) if isinstance(beat, float | int) else 1.0

    def _placed(self, process: Process, over: bool) -> Process:
        state = "ended" if over and process.state == "running" else process.state
        if {process.host, process.name.partition(":" if ":" in process.name else ".")[0]} & self._drained:
            process = msgspec.structs.replace(process, detail=process.detail or "drained: it gets no replica")
        return msgspec.structs.replace(process, state=state, view=self._view, step=self._step)

    def _take_asked(self, event: ev.Asked) -> None:
        if event.what == "scale":
            self._wanted = int(event.about)
        elif event.what == "drain":
            self._drained.add(event.about)
        elif event.what == "undrain":
            self._drained.discard(event.about)

    def _shown(self) -> list[str]:
        newest = {name.partition(".")[0]: name for name in sorted(self._replicas, key=_natural)}
        alive = {name for name, replica in self._replicas.items() if replica.state not in _GONE}
        manned = {name.partition(".")[0] for name in alive}
        return sorted(alive | {name for slot, name in newest.items() if slot not in manned}, key=_natural)

    def _replica(self, name: str, over: bool, silent: str) -> ReplicaStatus:
        """`silent`: what is known of members whose run is stalled, "" of one that is not."""
        replica = self._replicas[name]
        if name in self._inside:
            state, step = replica.state, replica.step
            if state not in {*_GONE, "suspected"}:
                state = "ending" if self._ended else "training" if self._formed else "forming"
            if state in {"training", "suspected", "ending"}:
                step = self._step
            replica = msgspec.structs.replace(replica, state=state, step=step, view=self._view)
            if silent and state == "training":
                replica = msgspec.structs.replace(replica, state="stalled", detail=silent)
        if over and replica.state not in _GONE:
            replica = msgspec.structs.replace(replica, state="ended", detail=OVER_DETAIL)
        return replica

    def _take_progress(self, event: ev.ProgressMade) -> None:
        self._progress = event
        known, before = max(event.stable, event.committed), self._step if self._step is not None else -1
        if 0 <= event.committed == known:
            self._step_at_s = event.committed_at_s
        elif known > before:
            self._step_at_s = event.at_s  # it is told, and when it was made will be with that of those before it
        self._step = max(known, before)
        self._without_loss = 0 if event.losses else self._without_loss + 1
        if event.losses:
            self._loss = event.losses[-1][1]
        elif self._without_loss >= NUM_NEWEST:  # none of them was finite: the last that was is none of now
            self._loss = None
        for name in [name for name in self._suspected if name in self._inside]:
            self._change(name, state="training", detail="")  # steps go on, so it does too

    def _take_process(self, event: ev.CoordinatorStarted | ev.CoordinatorLost | ev.AgentStarted | ev.AgentLost) -> None:
        match event:
            case ev.CoordinatorStarted():
                detail = f"epoch {event.epoch}" + (", took over" if event.takeover else "")
                self._coordinator = _process("coordinator", event.pid, detail)
            case ev.CoordinatorLost() if self._coordinator:
                self._coordinator = _lost(self._coordinator, event.cause)
            case ev.AgentStarted():
                self._agents[event.agent] = msgspec.structs.replace(
                    _process(event.agent, event.pid, ""), host=event.host, address=event.address, slots=event.slots
                )
            case ev.AgentLost():
                if event.agent in self._agents:
                    self._agents[event.agent] = _lost(self._agents[event.agent], event.cause)
                for replica in event.replicas:
                    self._change(replica, state="exited", detail=f"agent {event.agent} was lost")

    def _take_view(self, event: ev.ViewInstalled | ev.ViewFormed) -> None:
        if isinstance(event, ev.ViewInstalled):
            self._planned = event if event.planned else None
            if not event.planned:  # a planned one leaves the old view at work until it has formed
                self._enter(event)
            return
        if self._planned is not None and (self._planned.epoch, self._planned.n) == (event.epoch, event.n):
            self._enter(self._planned)
            self._planned = None
        self._view, self._formed = (event.epoch, event.n), True
        self._people += 1
        self._step = max(event.step, self._step or 0)  # its members all committed that many

    def _enter(self, event: ev.ViewInstalled) -> None:
        """Only who comes and who goes is touched: a view of thousands changes by one of them. One whose names were not
        read touches nobody; a later one does."""
        self._view, self._formed = (event.epoch, event.n), False
        if self._waits is not None and len(event.members) >= self._waits.wanted:
            self._waits = None
        if isinstance(event.members, NamelessMembers):
            self._people += 1
            return
        members, self._inside = self._inside, frozenset(event.members)
        self._people += 1
        new = self._inside - members
        if unknown := new.difference(self._replicas):
            self._inside -= unknown
        for name in members - self._inside:
            if self._replicas[name].state not in _GONE:
                self._change(name, state="leaving")
        for name in new | (self._inside & self._suspected):
            self._change(name, state="forming")

    def _take_replica(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.ReplicaStarted():
                self._people += 1
                self._replicas[event.replica] = ReplicaStatus(
                    replica=event.replica, agent=event.agent, pid=event.pid, state="starting", view=None, step=None
                )
            case ev.ReplicaExited():
                detail = f"{event.cause}: {event.detail}" if event.detail else event.cause
                state = "ended" if event.cause == "finished" else "exited"
                self._change(event.replica, state=state, detail=detail, step=event.step)
            case ev.JoinerServed():
                self._change(event.replica, state="joining", step=event.step)
            case ev.JoinerCaughtUp():
                self._change(event.replica, state="spare", step=event.step)
            case ev.Suspected():
                self._change(event.replica, state="suspected", detail=event.evidence)

    def _change(self, name: str, **changes: object) -> None:
        if name in self._replicas:
            self._replicas[name] = msgspec.structs.replace(self._replicas[name], **changes)
            (self._suspected.add if changes.get("state") == "suspected" else self._suspected.discard)(name)
            self._people += 1


_RARE = (
    ev.RunStarted, ev.RunFinished, ev.Recovery, ev.VerdictReached, ev.CheckpointFailed, ev.FleetGone, ev.TrainingEnded,
    ev.AuditMismatch, ev.StateCertified, ev.CheckpointSaved, ev.Asked, ev.VacancyDecided,
)  # fmt: skip
_PROCESSES = (ev.CoordinatorStarted, ev.CoordinatorLost, ev.AgentStarted, ev.AgentLost)
_REPLICAS = (ev.ReplicaStarted, ev.ReplicaExited, ev.JoinerServed, ev.JoinerCaughtUp, ev.Suspected)
_TAKES: dict[type[ev.AnyEvent], Callable[[StatusFold, Any], None]] = {
    **dict.fromkeys(_RARE, StatusFold._take_rare),
    **dict.fromkeys(_REPLICAS, StatusFold._take_replica),
    **dict.fromkeys(_PROCESSES, StatusFold._take_process),
    **dict.fromkeys((ev.ViewInstalled, ev.ViewFormed), StatusFold._take_view),
    ev.ProgressMade: StatusFold._take_progress,
}
"""What each kind changes. To ask each of a long run's thousands of events what it is took most of a status's time."""


def status(events: Iterable[ev.AnyEvent], *, held: bool | None = None, now_s: float | None = None) -> Status:
    """The status after all `events`, in the journal's order; `held` and `now_s` as in `StatusFold.status`."""
    fold = StatusFold()
    for event in events:
        fold.take(event)
    return fold.status(held=held, now_s=now_s)


def _process(name: str, pid: int, detail: str) -> Process:
    return Process(name=name, pid=pid, state="running", view=None, step=None, detail=detail)


def _lost(process: Process, cause: str) -> Process:
    return msgspec.structs.replace(process, state="lost", detail=cause)


@functools.lru_cache(maxsize=1 << 16)
def _natural(name: str) -> list[tuple[int, str]]:
    """`r10.1` after `r9.2`: digits compare as numbers."""
    slot, _, incarnation = name[1:].partition(".")
    if name[:1] == "r" and slot.isdecimal() and incarnation.isdecimal():  # as nearly all are, at a tenth of the time
        return [(-1, "r"), (int(slot), ""), (-1, "."), (int(incarnation), ""), (-1, "")]
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
