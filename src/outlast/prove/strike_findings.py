"""What a struck fleet must not show: other bits, a hang, an untrue end, something left behind.

Pure but for the checkpoints, which are read. Each finding says what was seen beside what should have been.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from outlast.core import events as ev
from outlast.errors import Unsaved
from outlast.prove._commit_log import Commit
from outlast.prove._generations import newest_step, wrong_generation
from outlast.prove._strike_numbers import number_findings
from outlast.prove.strike_plan import StruckFleet
from outlast.prove.striker import StrikeRecord

__all__ = ["StrikeFinding", "Outcome", "Watched", "Undisturbed", "judge"]

Outcome = Literal["same bits", "fleet lost", "wrong"]


class StrikeFinding(msgspec.Struct, frozen=True, kw_only=True):
    """`check`: which of the claims does not hold."""

    check: str
    detail: str


class Undisturbed(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of the same setting ends with that nothing happened to. `losses`: by step, as the commit log has
    them; `folder`: where its generations are."""

    fingerprint: str
    losses: dict[int, str]
    folder: str


class Watched(NamedTuple):
    """All that is known of a fleet when it is over. `ends`: (process, what it wrote when it ended); `microbatches` of a
    step, 0 if that is not known."""

    fleet: StruckFleet
    record: StrikeRecord
    commits: Sequence[Commit]
    events: Sequence[ev.AnyEvent]
    ends: Sequence[tuple[str, dict[str, Any]]]
    folder: Path
    microbatches: int = 0

    @property
    def end(self) -> ev.RunFinished | None:
        return next((e for e in reversed(self.events) if isinstance(e, ev.RunFinished)), None)


def judge(seen: Watched, undisturbed: Undisturbed) -> tuple[Outcome, list[StrikeFinding]]:
    """`same bits` and `fleet lost` are the two ends that are right; findings of numbers make neither wrong."""
    wrong = [StrikeFinding(check=check, detail=detail) for check, detail in _wrong(seen, undisturbed)]
    known = seen.fleet, seen.record, seen.commits, seen.events
    numbers = [] if seen.record.hung else number_findings(*known, seen.microbatches)
    more = [StrikeFinding(check=check, detail=detail) for check, detail in numbers]
    if wrong:
        return "wrong", wrong + more
    return ("same bits" if _finished(seen) else "fleet lost"), more


def _wrong(seen: Watched, undisturbed: Undisturbed) -> Iterator[tuple[str, str]]:
    yield from _other_bits(seen, undisturbed)
    if seen.record.hung:
        yield "hang", seen.record.hung
    elif _finished(seen):
        yield from _undone(seen, len(undisturbed.losses))
    else:
        yield from _untrue_loss(seen)
    for left in seen.record.left:
        yield "left behind", left


def _finished(seen: Watched) -> bool:
    """Whether it says that it did all steps: with 0, or, where its disk was struck, with the code that says as well
    that the newest of them are in no checkpoint."""
    struck = any(done.role == "disk" for done in seen.record.done)
    return seen.record.exit_code == 0 or (struck and seen.record.exit_code == Unsaved.exit_code)


def _other_bits(seen: Watched, undisturbed: Undisturbed) -> Iterator[tuple[str, str]]:
    odd = [c for c in seen.commits if undisturbed.losses.get(c.step) != c.loss]
    if odd:
        first = odd[0]
        yield "bits", f"{first.who} committed step {first.step} with another loss, and {len(odd) - 1} more such"
    for who, end in seen.ends:
        if end["fingerprint"] != undisturbed.fingerprint:
            yield "bits", f"{who} ended with other parameters or optimizer state"
    if seen.fleet.keeps and any(isinstance(e, ev.CheckpointSaved) for e in seen.events):
        wrong = wrong_generation(seen.folder / "checkpoints", Path(undisturbed.folder) / "checkpoints", newest=False)
        if wrong:
            yield "checkpoints", wrong


def _undone(seen: Watched, steps: int) -> Iterator[tuple[str, str]]:
    """Exit code 0 is for a run that did every step."""
    missing = set(range(steps)) - {commit.step for commit in seen.commits}
    if missing:
        yield "end", f"exit code 0, but {len(missing)} of {steps} steps were never committed, from {min(missing)} on"
    elif seen.fleet.keeps and not seen.record.exit_code and (kept := newest_step(seen.folder / "checkpoints")) < steps:
        yield "end", f"exit code 0, but the newest checkpoint is of {f'step {kept}' if kept >= 0 else 'no step'}"
    elif not seen.ends:
        yield "end", "exit code 0, but no replica reached the end of the script"


def _untrue_loss(seen: Watched) -> Iterator[tuple[str, str]]:
    """A run may end early only when all who held its state were struck, and nothing of it was kept."""
    end, code = seen.end, seen.record.exit_code
    words = (end.detail if end is not None else seen.record.output).strip()
    said = f"exit code {code}: {words[:600] or 'without a word'}"
    if end is None or code != end.exit_code or code is None or code < 0:
        yield "end", f"{said}; the journal's end says {end.exit_code if end is not None else 'nothing'}"
        return
    if code != 6 and not (end.outcome == "stopped" and "leave" in words):
        yield "end", said
        return
    spared = sorted(_holders(seen) - _struck(seen))
    if spared:
        yield "end", f"{said}; but {', '.join(spared)} held the state and was not struck"
    saved = [e for e in seen.events if isinstance(e, ev.CheckpointSaved)]
    if saved and (code == 6 or "asked to leave" not in saved[-1].reason):  # who is asked to leave saves before it goes
        yield "end", f"{said}; but generation {saved[-1].generation} of step {saved[-1].step} was published"
    done = 1 + max((commit.step for commit in seen.commits), default=-1)
    if saved and code != 6 and saved[-1].step < done:
        yield "end", f"{said}; but {done} steps were committed, and the newest save is of step {saved[-1].step}"


def _holders(seen: Watched) -> set[str]:
    """Who has committed; all ranks, when nobody has."""
    ranks = {life.name for life in seen.record.lives if life.name.startswith("r")}
    return {commit.who for commit in seen.commits} or ranks


def _struck(seen: Watched) -> set[str]:
    """Replicas that were, or whose agents or hosts were."""
    hit = {done.name for done in seen.record.done}
    hit |= {e.agent for e in seen.events if isinstance(e, ev.AgentStarted) and e.host in hit}
    agents = {e.replica: e.agent for e in seen.events if isinstance(e, ev.ReplicaStarted)}
    return hit | {replica for replica, agent in agents.items() if agent in hit}
