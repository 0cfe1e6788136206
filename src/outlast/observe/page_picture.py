"""All that the page shows of a run, folded from its events one by one: the model behind page and metrics.

Role: what costs little is always right (state, members, rows, checkpoints, suspects), and taken by `take`; what needs
every `Progress` of a long run (accounts, curves) is taken by `take_history` when there is time, in the journal's order.
Pure. Invariant: it computes no figure of its own that `status`, `why` or the accounts have: it asks their folds, so
that page, terminal and metrics cannot differ.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from outlast.core import events as ev
from outlast.observe._accounting import Accounting
from outlast.observe._clocks import Clock, clocks
from outlast.observe._cycles import UsefulTime
from outlast.observe._history import History
from outlast.observe._why import Why, headline_of, story_of
from outlast.observe.run_status import StatusFold
from outlast.observe.status_records import RUNNING, Status
from outlast.observe.step_anatomy import AnatomyFold
from outlast.observe.timeline_rows import Row, row_of, timeline

__all__ = ["Category", "Generation", "PageRow", "RunFold", "category_of"]

Category = Literal["run", "failure", "view", "member", "checkpoint", "verdict"]

_CATEGORIES: dict[str, Category] = {
    "replica_exited": "failure", "recovery": "failure", "suspected": "failure", "agent_lost": "failure",
    "coordinator_lost": "failure", "fleet_lost": "failure", "stall": "failure",
    "view_installed": "view", "view_formed": "view", "rows_admitted": "view", "vacancy_decided": "view",
    "replica_started": "member", "agent_started": "member", "coordinator_started": "member",
    "joiner_served": "member", "joiner_caught_up": "member",
    "verdict": "verdict", "device_finding": "verdict", "alarm_weighed": "verdict",
    "audit_mismatch": "verdict", "reducer_accused": "verdict", "certified": "verdict",
}  # fmt: skip
_NUM_GENERATIONS = 64
_NUM_SUSPECTS = 200


def category_of(kind: str) -> Category:
    """What an event is about; `run` for all that is about the run itself."""
    return "checkpoint" if kind.startswith("checkpoint_") else _CATEGORIES.get(kind, "run")


class PageRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the timeline for the page. `step`: where the event names one; `story`: whether `why` tells it."""

    row: Row
    category: Category
    step: int | None
    story: bool


class Generation(msgspec.Struct, kw_only=True):
    """One rung of the ladder: a checkpoint that was published, and what became of it."""

    generation: int
    step: int
    at_s: float
    durable_s: float
    blocked_s: float
    state_bytes: int
    written_bytes: int
    num_writers: int
    reason: str
    url: str
    certified: bool = False
    drained_to: str = ""
    pruned: bool = False


class RunFold:
    """Folds a run's events into the picture that the page shows. `version` rises with every event that `take` was
    given; `rows_version` with every row."""

    def __init__(self) -> None:
        self._status, self.history, self.anatomy = StatusFold(), History(), AnatomyFold()
        self.rows: list[PageRow] = []
        self.noted: list[ev.AnyEvent] = []  # for the story; no progress, no installed views
        self.generations: dict[int, Generation] = {}
        self.suspects: list[PageRow] = []
        self.device_rows: list[PageRow] = []  # alarms, what was done about them, and what was found about devices
        self.recoveries: list[ev.Recovery] = []
        self.rewinds: list[ev.VerdictReached] = []
        self.num_saves = self.version = 0
        self._formed = False
        self.written_bytes = 0
        self._certified = -1
        self.refusals: Counter[str] = Counter()
        self.verdicts: Counter[str] = Counter()
        self.start_s: float | None = None
        self.latest_s = 0.0
        self.started: ev.RunStarted | None = None
        self._planned_rows: list[Row] = []
        self._story: tuple[int, list[Row]] = (-1, [])

    # --- at once ------------------------------------------------------------------------------------------------
    def take(self, event: ev.AnyEvent) -> None:
        """Fold one event into what is always right; of `Progress` the newest ones are enough."""
        self.start_s = event.at_s if self.start_s is None else self.start_s
        self.latest_s = max(self.latest_s, event.at_s)
        self.version += 1
        self._status.take(event)
        self.anatomy.take(event)
        if isinstance(event, ev.ProgressMade | ev.StepAnatomy):
            return
        row = row_of(event, self.start_s)
        planned = isinstance(event, ev.ViewInstalled) and event.planned
        if planned:
            self._planned_rows.append(row)
        elif not isinstance(event, ev.ViewInstalled):
            self.noted.append(event)
        page = PageRow(row=row, category=category_of(row.kind), step=getattr(event, "step", None), story=planned)
        self.rows.append(page)
        self._take_figures(event, page)

    def _take_figures(self, event: ev.AnyEvent, page: PageRow) -> None:
        match event:
            case ev.RunStarted():
                self.started = event
            case ev.ViewFormed():
                self._formed = True
            case ev.Recovery():
                self.recoveries.append(event)
            case ev.Refused():
                self.refusals[event.reason] = max(event.count, self.refusals[event.reason])
            case ev.VerdictReached():
                self.verdicts[event.action] += 1
                if event.action == "rewind":
                    self.rewinds.append(event)
        if isinstance(event, ev.VerdictReached | ev.AuditMismatch | ev.ReducerAccused | ev.Suspected):
            self.suspects.append(page)
            del self.suspects[:-_NUM_SUSPECTS]
        if isinstance(event, ev.DeviceFinding | ev.AlarmWeighed):
            self.device_rows.append(page)
            del self.device_rows[:-_NUM_SUSPECTS]
        self._take_checkpoint(event)

    def _take_checkpoint(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.CheckpointSaved():
                self.num_saves += 1
                self.written_bytes += event.written_bytes
                names = {"generation", "step", "at_s", "durable_s", "blocked_s", "state_bytes", "written_bytes",
                         "num_writers", "reason", "url"}  # fmt: skip
                fields = {name: getattr(event, name) for name in names}
                self.generations[event.generation] = Generation(**fields)
                while len(self.generations) > _NUM_GENERATIONS:
                    self.generations.pop(next(iter(self.generations)))
                self.generations[event.generation].certified = event.step <= self._certified
            case ev.StateCertified():
                self._certified = event.step
                if self.generations:  # as in the archive: the newest one, if it is of no later step
                    newest = next(reversed(self.generations.values()))
                    newest.certified = newest.certified or newest.step <= event.step
            case ev.FleetGone():
                self._certified = -1
            case ev.CheckpointDrained() if event.generation in self.generations:
                self.generations[event.generation].drained_to = event.url
            case ev.CheckpointPruned():
                for number in event.generations:
                    if number in self.generations:
                        self.generations[number].pruned = True

    # --- the whole history --------------------------------------------------------------------------------------
    def take_history(self, event: ev.AnyEvent, seq: int) -> None:
        """Fold the entry `seq` into accounts and curves. Every event once, in order, from the first."""
        self.history.take(event, seq)

    # --- asked at any time --------------------------------------------------------------------------------------
    @property
    def people_version(self) -> int:
        """Return a number that rises whenever a member's state may have changed."""
        return self._status.people_version

    def status(self, *, held: bool | None, now_s: float | None, people: bool = True) -> Status:
        """As `outlast status` has it."""
        return self._status.status(held=held, now_s=now_s, people=people)

    def accounting(self, state: Status, now_s: float | None) -> Accounting:
        """As `outlast why` has it, as far as history was read."""
        return self.history.accounts.accounting(now_s=now_s if state.state in RUNNING else None)

    def useful(self, state: Status, now_s: float | None) -> UsefulTime:
        """ETTR with its interval, as `outlast why` has both."""
        return self.history.accounts.useful(self.accounting(state, now_s))

    def clocks(self, state: Status, now_s: float | None) -> list[Clock]:
        """MTBF, MTBI, MTBR over the run's wall time so far."""
        running = state.state in RUNNING and now_s is not None
        end_s = max(self.latest_s, now_s if running and now_s is not None else 0.0)
        return clocks(self.noted, max(0.0, end_s - (self.start_s or end_s)))

    def headline(self, state: Status, now_s: float | None) -> str:
        """As `outlast why` begins, of this moment."""
        events = [] if self._formed else self.noted
        return headline_of(state, self.accounting(state, now_s), self.history.accounts.gone, events)

    def story_rows(self) -> list[Row]:
        """The rows that `outlast why` tells."""
        if self._story[0] != len(self.rows):
            rows = [*timeline(self.noted, start_s=self.start_s), *self._planned_rows]
            self._story = (len(self.rows), sorted(rows, key=lambda row: row.at_s))
        return self._story[1]

    def why(self, state: Status, now_s: float | None) -> Why:
        """As `outlast why` has it, as far as history was read."""
        cost = self.accounting(state, now_s)
        anatomy = self.anatomy.anatomy()
        return story_of(state, cost, self.history.accounts.gone, self.noted, self.story_rows(), anatomy)
