"""The lost weekend, re-enacted on processes: a checkpoint every six hours and nobody awake, and its mended form.

A story often told: 512 accelerators, two weeks of training, a checkpoint every six hours; on day nine, at night, a
memory error ends one process. Six hours of everybody's work are gone, and until somebody wakes up nothing is done at
all. The mended form saves every half hour without being waited for, and has a spare. Here a step stands for six minutes
of it, and a SIGKILL for the memory error. What is slept through is told and not waited for.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from outlast.errors import ProveError
from outlast.prove._commit_log import Commit, CommitLog
from outlast.prove._drive import Driven
from outlast.prove._patience import HANG_S
from outlast.runtime.settings.fault_points import Fault

__all__ = ["MINUTES_A_STEP", "WeekendForm", "LostWeekend", "Weekend"]

MINUTES_A_STEP = 6
_SIX_HOURS, _HALF_AN_HOUR = 60, 5  # in steps
_STEPS, _AT = 150, 118  # two steps before the second save of the old form
_MICROBATCHES = 4


class WeekendForm(msgspec.Struct, frozen=True, kw_only=True):
    """How one form of the story went. `twice`: steps that were computed again; `still_s`: the longest time without a
    step after the error, measured; `by_itself`: whether nobody was needed."""

    checkpoint_every: int
    spares: int
    by_itself: bool
    twice: int
    still_s: float
    fingerprint: str


class Weekend(msgspec.Struct, frozen=True, kw_only=True):
    """Both forms, and what they stand for."""

    before: WeekendForm
    after: WeekendForm
    steps: int
    error_at: int
    asleep_h: float

    @property
    def lost_h(self) -> float:
        """Hours of the fleet that the old form lost: work done twice, and what was slept through."""
        return self.before.twice * MINUTES_A_STEP / 60 + self.asleep_h


class LostWeekend:
    """Folders of its runs are made under `base`. ProveError if a run does not end as the story needs."""

    def __init__(self, base: Path, asleep_h: float, watch: Callable[[str, int], None]) -> None:
        self.base, self.asleep_h, self._watch = base, asleep_h, watch

    def run(self) -> Weekend:
        """One form after the other."""
        return Weekend(before=self._before(), after=self._after(), steps=_STEPS, error_at=_AT, asleep_h=self.asleep_h)

    def _before(self) -> WeekendForm:
        """One replica, no restarts: the error ends the run, and a person starts it again."""
        folder = self._folder("before")
        settings = {"replicas": 1, "spares": 0, "max_restarts": 0, "checkpoint_every": _SIX_HOURS}
        code = self._train("before the error", folder, "first", settings, fails=True)
        if code == 0:
            raise ProveError("the old form outlasted the error", remedy=f"logs under {folder}")
        commits = _commits(folder)
        if self._train("begun again by a person", folder, "second", settings, fails=False) != 0:
            raise ProveError("the old form did not begin again", remedy=f"logs under {folder}")
        again = [commit for commit in _commits(folder) if commit not in commits]
        twice = {commit.step for commit in commits} & {commit.step for commit in again}
        still_s = min(commit.at_s for commit in again) - max(commit.at_s for commit in commits)
        return WeekendForm(
            checkpoint_every=_SIX_HOURS,
            spares=0,
            by_itself=False,
            twice=len(twice),
            still_s=still_s,
            fingerprint=_end(folder),
        )

    def _after(self) -> WeekendForm:
        folder = self._folder("after")
        settings = {"replicas": 2, "spares": 1, "checkpoint_every": _HALF_AN_HOUR}
        if self._train("mended", folder, "only", settings, fails=True) != 0:
            raise ProveError("the mended form did not outlast the error", remedy=f"logs under {folder}")
        commits = _commits(folder)
        seen: dict[tuple[str, int], int] = {}
        for commit in commits:
            seen[commit.who, commit.step] = seen.get((commit.who, commit.step), 0) + 1
        late = [commit.at_s for commit in commits if commit.step >= _AT - 1]
        return WeekendForm(
            checkpoint_every=_HALF_AN_HOUR,
            spares=1,
            by_itself=True,
            fingerprint=_end(folder),
            twice=len({step for (_, step), count in seen.items() if count > 1}),
            still_s=max((after - before for before, after in itertools.pairwise(sorted(late))), default=0.0),
        )

    def _folder(self, name: str) -> Path:
        folder = self.base / name
        for place in ("commits", "ends"):
            (folder / place).mkdir(parents=True)
        return folder

    def _train(self, what: str, folder: Path, run: str, settings: dict[str, Any], *, fails: bool) -> int:
        """The run's exit code."""
        keys = {"checkpoint_dir": str(folder / "checkpoints"), "restart_backoff_s": 0.1} | settings
        config = folder / f"{run}.toml"
        config.write_text("[run]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
        script = ["-m", "outlast.prove._strike_training", "--steps", str(_STEPS), "--dtype", "float32"]
        script += ["--microbatches", str(_MICROBATCHES), "--folder", str(folder)]
        error = [Fault(replica="r0.1", phase="backward", action="SIGKILL", step=_AT)]
        with Driven(folder / run, ["--config", str(config)], script, faults=error if fails else []) as driven:
            return driven.finish(HANG_S, lambda: self._watch(what, driven.step))


def _commits(folder: Path) -> list[Commit]:
    log = CommitLog(folder / "commits")
    log.read()
    return log.commits


def _end(folder: Path) -> str:
    ends = [json.loads(path.read_text())["fingerprint"] for path in sorted((folder / "ends").glob("*.json"))]
    if len({*ends}) != 1:
        raise ProveError(f"{len(ends)} replicas ended with {len({*ends})} states", remedy=f"logs under {folder}")
    return str(ends[0])
