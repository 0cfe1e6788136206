"""From a run's journal to the diary: hours that devices worked, how replicas on them ended, what was found. No torch.

A journal is learned once: the diary notes up to which event, and a run that went on since adds what is new. An end that
the script or a person brought about is no failure of a device. A host that joined is known by its own name, and its one
agent as `a0`: as it would be if it had started the run itself; each process of an agent has the name of the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from outlast.core import events as ev
from outlast.core.policy import Prognosis, alarm_name
from outlast.errors import ConfigError
from outlast.health._diary import Diary, DiaryEntry
from outlast.health._slow_places import slow_places
from outlast.journal import Journal

__all__ = ["learn_run", "remember_run"]

_FAILED = {"signal", "evicted", "agent_lost"}
_AT_ONCE_S = 1.0  # replicas of a host that die within that die of one failure


def learn_run(events: Iterable[tuple[int, ev.AnyEvent]], host: str, before: Sequence[DiaryEntry]) -> list[DiaryEntry]:
    """The entries that a run adds. `events`: (number, event) in order; `host`: which machine's; `before`: the diary."""
    rows = list(events)
    run = next((e.run_id for _, e in rows if isinstance(e, ev.RunStarted)), "")
    if not run:
        return []
    done = max((int(e.text) for e in before if e.kind == "learned" and e.run == run and e.text.isdigit()), default=-1)
    reader = _Reader(run, host, done)
    for number, event in rows:
        reader.take(number, event)
    ended = any(number > done and isinstance(event, ev.RunFinished | ev.RunEnded) for number, event in rows)
    told = [event for _, event in rows]
    return reader.entries(rows, [*_bad_links(told, run, host), *reader.slow(told)] if ended else [])


def _bad_links(events: Sequence[ev.AnyEvent], run: str, host: str) -> list[DiaryEntry]:
    """A finding for each link that the exchanges of a run that is over name; the link of h2 is h2/link."""
    launched = {event.agent for event in events if isinstance(event, ev.AgentStarted) and not event.host}
    words = [event for event in events if isinstance(event, ev.StepAnatomy)]
    if not any(wait.resent or wait.late for word in words for wait in word.waits.values()):
        return []
    from outlast.health._run_links import run_links

    try:
        found = run_links(events)
    except ConfigError:  # of one host
        return []
    at_s = events[-1].at_s
    return [
        DiaryEntry(at_s=at_s, device=f"{name}/link", kind="finding", text=text, host=name, run=run)
        for name, text in ((host if link in launched else link, text) for link, text in found.links.items())
    ]


def remember_run(diary: Diary, run_dir: Path, host: str) -> list[DiaryEntry]:
    """Add what a run's journal tells to a diary; returns what was new. Raises what reading and writing raise."""
    with Journal.open_reader(run_dir) as reader:
        events = [(entry.seq, entry.event) for entry in reader.events()]
    found = learn_run(events, host, diary.entries())
    diary.add(*found)
    return found


class _Reader:
    """Goes through one run's events."""

    def __init__(self, run: str, host: str, done: int) -> None:
        self.run, self.host, self.done = run, host, done
        self._joined: dict[str, str] = {}  # agent -> its host, of those that joined
        self._places: dict[str, str] = {}  # replica -> device
        self._alive: dict[str, float] = {}  # replica -> since when
        self._hours: dict[str, float] = {}
        self._found: list[DiaryEntry] = []
        self._new = False
        self._agents: dict[str, str] = {}  # replica -> agent
        self._prognosis = Prognosis()
        self._failed_s: dict[str, float] = {}

    def take(self, number: int, event: ev.AnyEvent) -> None:
        self._new = number > self.done
        self._alarms(event)
        match event:
            case ev.AgentStarted() if event.host:
                self._joined[event.agent] = event.host
            case ev.ReplicaStarted():
                self._places[event.replica] = self._place(event.agent, event.replica)
                self._alive[event.replica] = event.at_s
            case ev.ReplicaExited():
                self._ended(event.replica, event.at_s)
                if event.cause in _FAILED:
                    self._add("failure", event.at_s, event.replica, f"{event.cause}: {_line(event.detail)}")
            case ev.DeviceFinding() if event.source == "test" and event.action in ("passed", "failed"):
                if self._new:
                    place = self._device(event.host, event.device)
                    device = self._places.get(event.replica, place) if event.replica else place
                    self._found.append(DiaryEntry(
                        at_s=event.at_s, device=device, kind="test", text=event.evidence[:500],
                        host=self._host(event.host), run=self.run, passed=event.action == "passed",
                    ))  # fmt: skip
            case ev.DeviceFinding() if event.replica:
                self._add("finding", event.at_s, event.replica, event.evidence)
            case ev.DeviceFinding() if event.action in ("fatal", "warning") and self._new:
                self._found.append(DiaryEntry(
                    at_s=event.at_s, device=self._device(event.host, event.device), kind="finding",
                    text=event.evidence[:500], host=self._host(event.host), run=self.run,
                ))  # fmt: skip
            case ev.AuditMismatch() if event.culprit:
                self._add("finding", event.at_s, event.culprit, f"audit: {event.evidence} ({event.verdict})")
            case ev.ReducerAccused() if event.replica:
                self._add("finding", event.at_s, event.replica, f"reduced a slice wrongly in step {event.step}")
            case ev.RunFinished() | ev.RunEnded():
                for replica in list(self._alive):
                    self._ended(replica, event.at_s)

    def _alarms(self, event: ev.AnyEvent) -> None:
        """Follow alarms to their ends, as the coordinator did; what was played back from a file is none."""
        before, now = self._prognosis, self._prognosis.closed(event.at_s)
        truth: dict[str, bool] = {}  # host -> whether its alarm was true, where more than time says so
        match event:
            case ev.ReplicaStarted():
                self._agents[event.replica] = event.agent
            case ev.DeviceFinding(source="readings") if not event.evidence.endswith("(recorded)"):
                if event.action in ("notice", "warning", "fatal"):
                    now = now.alarm(event.host, alarm_name(event.action, event.evidence), event.at_s)
            case ev.AlarmWeighed(action="move", told_only=False):
                now = now.emptied(event.host)
            case ev.DeviceFinding(source="test", action="passed", replica=""):
                now, truth = now.cleared(event.host), {event.host: False}
            case ev.DeviceFinding(source="test", action="failed", replica=""):
                now, truth = now.failed(event.host, event.at_s), {event.host: True}
            case ev.ReplicaExited() if event.cause in (*_FAILED, "exception"):
                agent = self._agents.get(event.replica, "")
                if event.at_s - self._failed_s.get(agent, -_AT_ONCE_S) >= _AT_ONCE_S:
                    self._failed_s[agent] = event.at_s
                    now, truth = now.failed(agent, event.at_s), {agent: True}
        self._prognosis = now
        for host in before.open.keys() - now.open.keys():
            if self._new and (host in truth or host not in before.empty):
                self._settled(host, before.open[host], event.at_s, truth.get(host, False))

    def _settled(self, agent: str, alarm: tuple[str, float], at_s: float, true: bool) -> None:
        name, since_s = alarm
        self._found.append(DiaryEntry(
            at_s=at_s, device=self._device(agent), kind="alarm", text=name, host=self._host(agent), run=self.run,
            passed=not true, hours=max(0.0, at_s - since_s) / 3600 if true else 0.0,
        ))  # fmt: skip

    def _host(self, agent: str) -> str:
        return self._joined.get(agent, self.host)

    def _device(self, agent: str, device: str = "") -> str:
        """A device of an agent's host; without a name the agent itself."""
        own = "a0" if agent in self._joined else agent.partition(".")[0]
        return f"{self._host(agent)}/{device or own}"

    def _place(self, agent: str, replica: str) -> str:
        """Host, agent and slot: what a processor's part in a run is known by."""
        return f"{self._device(agent)}/{replica.partition('.')[0]}"

    def _ended(self, replica: str, at_s: float) -> None:
        since = self._alive.pop(replica, None)
        if since is not None and self._new:
            device = self._places[replica]
            self._hours[device] = self._hours.get(device, 0.0) + max(0.0, at_s - since) / 3600

    def _add(self, kind: str, at_s: float, replica: str, text: str) -> None:
        if self._new:
            device = self._places.get(replica) or self._place("", replica)
            self._found.append(DiaryEntry(
                at_s=at_s, device=device, kind=kind, text=text[:500], host=device.partition("/")[0], run=self.run,  # type: ignore[arg-type]
            ))  # fmt: skip

    def slow(self, events: Sequence[ev.AnyEvent]) -> list[DiaryEntry]:
        """A note of each place that was slow in a run that is over."""
        return [
            DiaryEntry(
                at_s=events[-1].at_s, device=device, kind="note", text=text, host=device.partition("/")[0], run=self.run
            )
            for device, text in slow_places(events, self._places).items()
        ]

    def entries(self, rows: Sequence[tuple[int, ev.AnyEvent]], more: Sequence[DiaryEntry] = ()) -> list[DiaryEntry]:
        """What was found, hours by device, and how far the journal was read; nothing if nothing is new."""
        last, at_s = rows[-1][0], rows[-1][1].at_s
        if last <= self.done:
            return []
        hours = [
            DiaryEntry(at_s=at_s, device=device, kind="hours", hours=value, host=device.partition("/")[0], run=self.run)
            for device, value in self._hours.items()
            if value > 0
        ]
        mark = DiaryEntry(at_s=at_s, device="", kind="learned", text=str(last), host=self.host, run=self.run)
        return [*self._found, *more, *hours, mark]


def _line(text: str) -> str:
    return text.partition("\n")[0]
