"""Where the wall time of a run went.

Role: the accounting identity, productive + checkpoint + lost + recovery + degraded + stalled + idle + unexplained =
wall, from the journal's events alone, asserted each time. Pure. Members measure every step from one commit to the next
and say what the time was used for (`outlast.core.protocol.StepTime`); here it is summed. The rules, in words:

- **productive**: committed steps that were not lost, by their own measured time. ETTR is productive / wall.
- **degraded**: of a step's own time in a view of n members of N, the share (N - n) / N that was missing.
- **checkpoint**: steps held up by saves.
- **recovery**: from the last commit before a change of the view to the first one after it, less that step's own time.
- **lost**: work that was done twice or in vain: steps beyond the checkpoint that the run went back to, or that no
  checkpoint holds when a run fails or is stopped; and microbatches of the dead that were computed again.
- **stalled**: what a step took beyond all that is usual, while nothing failed: a process that was stopped, a loader
  that hung, the loop's own code. `Stall` events say when and where.
- **idle**: before the first view has formed, and after the last commit.
- **unexplained**: what is left over. Near zero, or something is wrong with these accounts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from outlast.core import events as ev
from outlast.observe._cycles import Cycles, UsefulTime

__all__ = ["Accounting", "AccountingFold", "accounting", "usual_silence_s"]

_ORDER = ("recovery", "stalled", "lost", "checkpoint", "degraded", "productive")
"""Where clocks disagree and the parts are more than the whole, the last one is told less of."""


_NO_FAILURE = frozenset({"finished", "left"})  # ends of replicas
_NUM_STEPS = 1 << 15
"""How many stretches of steps are remembered apart; a run of a million steps has no more."""


class Accounting(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds by use; they sum to `wall_s`."""

    wall_s: float
    productive_s: float
    checkpoint_s: float
    lost_s: float
    recovery_s: float
    degraded_s: float
    stalled_s: float
    idle_s: float
    unexplained_s: float

    @property
    def ettr(self) -> float:
        """Effective training time ratio: productive over wall; 0 for a run without a wall time."""
        return self.productive_s / self.wall_s if self.wall_s > 0 else 0.0

    def seconds(self) -> dict[str, float]:
        """By name without `_s`, as `RunFinished.seconds` has it; `wall` included."""
        return {name.removesuffix("_s"): value for name, value in msgspec.structs.asdict(self).items()}


class _Steps(msgspec.Struct, array_like=True):
    """Steps `first` up to, not including, `end`, and what their work took."""

    first: int
    end: int
    productive_s: float
    degraded_s: float


class _Facts(msgspec.Struct):
    """What was found in the events. `steps`: those that count, in order; `first`, `end`: of all committed, also
    of those that a guard took back; `sums`: seconds by use; `begin_s`, `commit_s`: from where to where the steps that
    were counted lie."""

    start_s: float = 0.0
    latest_s: float = 0.0
    begin_s: float = 0.0
    commit_s: float | None = None
    step_s: float = 0.0
    heartbeat_s: float = 1.0
    steps: list[_Steps] = []
    sums: dict[str, float] = {}
    first: int | None = None
    end: int = 0
    saved: int = 0
    recovers_s: float = 0.0  # since when others are waited for, unless a step is newer; inf: the fleet was lost
    over: bool = False
    gone: int = 0
    cycles: Cycles = msgspec.field(default_factory=Cycles)


class AccountingFold:
    """Takes events one by one, in the journal's order; `accounting()` may be asked at any time."""

    def __init__(self) -> None:
        self._facts, self._guess = _Facts(), _Facts()
        self._begun = self._counted = False

    def take(self, event: ev.AnyEvent) -> None:
        """Fold one event in."""
        if not self._begun:
            self._begun = True
            for facts in (self._facts, self._guess):
                facts.start_s = facts.latest_s = event.at_s
        progress = isinstance(event, ev.ProgressMade)
        self._counted = self._counted or (isinstance(event, ev.ProgressMade) and event.committed >= 0)
        self._facts.latest_s = max(self._facts.latest_s, event.at_s)  # the wall's clock may be set back; time is not
        _note(event, self._facts)
        if not self._counted:  # perhaps the journal of a version that did not count: both are kept until one is right
            self._guess.latest_s = self._facts.latest_s
            _note(_estimated(event, self._guess) if progress else event, self._guess)  # type: ignore[arg-type]

    def dump(self) -> bytes:
        """Return all that was folded, for `load`."""
        return msgspec.msgpack.encode((self._facts, self._guess, self._begun, self._counted))

    def load(self, data: bytes | msgspec.Raw) -> None:
        """Go on from what `dump` returned. Raises msgspec.MsgspecError."""
        kind = tuple[_Facts, _Facts, bool, bool]
        self._facts, self._guess, self._begun, self._counted = msgspec.msgpack.decode(data, type=kind)

    @property
    def gone(self) -> int:
        """Return how many steps of a run that failed no checkpoint holds."""
        return self._now.gone

    @property
    def start_s(self) -> float:
        """Return when the first event was, in Unix seconds."""
        return self._now.start_s

    def useful(self, account: Accounting) -> UsefulTime:
        """ETTR of an account that `accounting` has just given, with its interval."""
        return self._now.cycles.useful(account.wall_s, account.productive_s)

    @property
    def _now(self) -> _Facts:
        return self._facts if self._counted else self._guess

    def tell_latest(self, at_s: float) -> None:
        """Hear of an event at `at_s` that was not taken as it says nothing of time but when it was."""
        self._facts.latest_s = max(self._facts.latest_s, at_s)
        self._guess.latest_s = self._facts.latest_s

    def accounting(self, *, now_s: float | None = None) -> Accounting:
        """The account so far; of a run that goes on, up to `now_s` (Unix seconds) or else to its last event."""
        facts = self._now
        running = now_s is not None and not facts.over and facts.latest_s > 0
        wall_s = max(facts.latest_s, now_s if running and now_s is not None else 0.0) - facts.start_s
        sums, idle_s = dict(facts.sums), wall_s
        if facts.commit_s is not None:
            tail_s = max(0.0, facts.start_s + wall_s - facts.commit_s)
            tail = _name_of_tail(facts, tail_s, running)
            sums[tail] = sums.get(tail, 0.0) + tail_s
            idle_s = min(wall_s, max(0.0, facts.begin_s - facts.start_s) + sums.get("idle", 0.0))
        left_s, parts = wall_s - idle_s, {}
        for name in _ORDER:
            parts[name] = min(max(0.0, sums.get(name, 0.0)), left_s)
            left_s -= parts[name]
        account = Accounting(
            wall_s=wall_s,
            productive_s=parts["productive"],
            checkpoint_s=parts["checkpoint"],
            lost_s=parts["lost"],
            recovery_s=parts["recovery"],
            degraded_s=parts["degraded"],
            stalled_s=parts["stalled"],
            idle_s=idle_s,
            unexplained_s=left_s,
        )
        assert_identity(account)
        return account


def accounting(events: Iterable[ev.AnyEvent], *, now_s: float | None = None) -> Accounting:
    """The account of a run; of one that goes on, up to `now_s` (Unix seconds) or else to its last event."""
    return _folded(events).accounting(now_s=now_s)


def _folded(events: Iterable[ev.AnyEvent]) -> AccountingFold:
    fold = AccountingFold()
    for event in events:
        fold.take(event)
    return fold


def assert_identity(account: Accounting) -> None:
    """An AssertionError if the parts are not the whole, or one of them is negative: a bug in this module."""
    parts = [value for name, value in msgspec.structs.asdict(account).items() if name != "wall_s"]
    assert min(parts) >= 0, account
    assert math.isclose(math.fsum(parts), account.wall_s, rel_tol=1e-9, abs_tol=1e-6), account


def usual_silence_s(heartbeat_s: float, step_s: float) -> float:
    """How old the newest commit that is known may be while all is well: news comes with heartbeats, and steps are not
    all of one length."""
    return 2 * heartbeat_s + max(0.5, 4 * step_s)


def _name_of_tail(facts: _Facts, tail_s: float, running: bool) -> str:
    """What the time after the last commit was used for."""
    if facts.recovers_s == math.inf or (running and facts.recovers_s > (facts.commit_s or 0.0)):
        return "recovery"
    if not running:
        return "idle"
    return "stalled" if tail_s > usual_silence_s(facts.heartbeat_s, facts.step_s) else "productive"


def _estimated(event: ev.ProgressMade, facts: _Facts) -> ev.ProgressMade:
    """As members now tell it, from the journal of a version that knew only how many steps there were, and their mean
    time."""
    known = facts.steps[-1].end if facts.steps else 0
    steps = max(0, event.stable - known)
    return msgspec.structs.replace(
        event,
        first=known,
        committed=known + steps,
        committed_at_s=event.at_s,
        seconds={"productive": event.step_s * steps},
    )


def _note(event: ev.AnyEvent, facts: _Facts) -> None:
    _note_failure(event, facts)
    match event:
        case ev.RunStarted():
            beat = event.config.get("heartbeat_s")
            facts.heartbeat_s = float(beat) if isinstance(beat, float | int) else facts.heartbeat_s
        case ev.ProgressMade() if event.committed >= 0:
            _count(event, facts)
        case ev.CheckpointSaved():
            facts.saved = event.step
        case ev.FleetGone():
            facts.recovers_s = math.inf
        case ev.VacancyDecided():
            facts.recovers_s = event.at_s if event.action == "wait" else 0.0
        case ev.VerdictReached() if event.action == "rewind" and event.to_step >= 0:
            _lose(event.to_step, facts)
        case ev.RunFinished():
            facts.over = True
            if event.outcome != "finished" and facts.first is not None:
                kept = max(facts.saved, facts.first)
                # Of the last ones it may know only how many they were: news of them came too late.
                facts.gone = max(0, max(facts.end, event.steps) - kept)
                _lose(kept, facts)


def _note_failure(event: ev.AnyEvent, facts: _Facts) -> None:
    """What failed ends a stretch where the last commit before it was; before the first one there is nothing to end."""
    match event:
        case ev.ReplicaExited() if event.cause not in _NO_FAILURE:
            who = event.replica
        case ev.Recovery():
            who = event.replica
        case ev.FleetGone():
            who = "fleet"
        case ev.VerdictReached() if event.action == "rewind":
            who = "rewind"
        case _:
            return
    if facts.commit_s is not None:
        facts.cycles.strike(who, facts.commit_s - facts.start_s, facts.sums.get("productive", 0.0))


def _count(event: ev.ProgressMade, facts: _Facts) -> None:
    facts.cycles.go_on()
    if facts.commit_s is None:
        facts.begin_s = event.committed_at_s - math.fsum(event.seconds.values())
    facts.commit_s, facts.step_s = event.committed_at_s, event.step_s or facts.step_s
    facts.recovers_s = 0.0 if facts.recovers_s == math.inf else facts.recovers_s
    _lose(event.first, facts)
    for name, value in event.seconds.items():
        facts.sums[name] = facts.sums.get(name, 0.0) + value
    if event.committed > event.first:
        used = event.seconds.get("productive", 0.0), event.seconds.get("degraded", 0.0)
        facts.steps.append(_Steps(event.first, event.committed, *used))
        facts.first = event.first if facts.first is None else min(event.first, facts.first)
        facts.end = event.committed
        if len(facts.steps) > _NUM_STEPS:
            facts.steps[: _NUM_STEPS // 2] = _merged(facts.steps[: _NUM_STEPS // 2])


def _merged(steps: list[_Steps]) -> list[_Steps]:
    """Neighbours in pairs: the older steps are, the less is asked which of them took what."""
    return [
        _Steps(a.first, b.end, a.productive_s + b.productive_s, a.degraded_s + b.degraded_s)
        for a, b in zip(steps[::2], steps[1::2], strict=True)
    ]


def _lose(first: int, facts: _Facts) -> None:
    """Steps `first` and later, as far as they were counted, were in vain."""
    while facts.steps and facts.steps[-1].end > first:
        steps = facts.steps.pop()
        share = (steps.end - max(first, steps.first)) / (steps.end - steps.first)
        for name, value in (("productive", steps.productive_s), ("degraded", steps.degraded_s)):
            facts.sums[name] = facts.sums.get(name, 0.0) - value * share
            facts.sums["lost"] = facts.sums.get("lost", 0.0) + value * share
        if share < 1:
            facts.steps.append(
                _Steps(steps.first, first, steps.productive_s * (1 - share), steps.degraded_s * (1 - share))
            )
