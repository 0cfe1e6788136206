"""From commits to recovery times. Pure: lists of commits in, one `Outcome` out."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks._fleet import Commit, Member

__all__ = ["Outcome", "join_stall", "measure_restart", "measure_survivors", "newest_step", "quiet_wait"]

_USUAL = 60
"""Steps by which a calm fleet's usual one is known."""
GAPS = 3
"""A fault can interrupt the step that a survivor is in, or the one after: the worst of this many gaps is reported."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One fault. `failed` is empty, or says why nothing was measured; then the figures are NaN."""

    system: str = ""
    fault: str = ""
    phase: str = ""
    net_s: float = float("nan")
    gross_s: float = float("nan")
    median_step_s: float = float("nan")
    recomputed: int = 0
    redone_steps: int = 0
    deadline_s: float = 0.0
    join_stall_s: float = 0.0  # since the recovery: the replacement also starts its process on these processors
    later_stall_s: float = 0.0  # the same as far as was looked: ordinary steps of a full fleet are among these
    served_stall_s: float = 0.0  # since the replacement was served; waits alone
    quiet_wait_s: float = 0.0  # the same of as many steps before the fault: what this machine makes of a calm fleet
    struck_s: float = 0.0  # when, by the monotonic clock
    failed: str = ""

    def line(self) -> str:
        if self.failed:
            return f"{self.system} {self.fault} in {self.phase or '?'}: FAILED: {self.failed.partition(chr(10))[0]}"
        return (
            f"{self.system} {self.fault} in {self.phase}: net {self.net_s:.3f} s, gross {self.gross_s:.3f} s, "
            f"step {self.median_step_s * 1e3:.1f} ms, again {self.recomputed} microbatches and {self.redone_steps} "
            f"steps, joiner's stall {self.served_stall_s * 1e3:.0f} ms ({self.join_stall_s * 1e3:.0f} with its start, "
            f"{self.later_stall_s * 1e3:.0f} in all that follows, {self.quiet_wait_s * 1e3:.0f} before the fault)"
        )


def newest_step(members: Sequence[Member], at_s: float) -> int:
    """The highest step that any of them had committed at `at_s`; -1 if none."""
    return max((c.step for member in members for c in member.commits if c.at_s <= at_s), default=-1)


def measure_survivors(survivors: Sequence[Member], at_s: float) -> Outcome:
    """The longest interruption among processes that went on: the worst member's worst gap around the fault."""
    found = [outcome for member in survivors for outcome in _gaps(member.commits, at_s)]
    return max(found, key=lambda outcome: outcome.net_s)


def _gaps(commits: Sequence[Commit], at_s: float) -> list[Outcome]:
    before = [commit for commit in commits if commit.at_s <= at_s][-30:]
    after = [commit for commit in commits if commit.at_s > at_s]
    median_s = _median_gap(before)
    usual = statistics.median_low([commit.num_computed for commit in before])
    one_s = statistics.median(commit.compute_s / max(commit.num_computed, 1) for commit in before)
    found: list[Outcome] = []
    last, redone = before[-1], 0
    for commit in after:
        if commit.step <= last.step:
            redone += 1
            continue
        again = max(0, commit.num_computed - usual) if not redone else 0
        net_s = commit.at_s - last.at_s - median_s * (1 + redone) - again * one_s
        found.append(
            Outcome(
                net_s=net_s, gross_s=commit.at_s - at_s, median_step_s=median_s, recomputed=again, redone_steps=redone
            )
        )
        last, redone = commit, 0
    return found[:GAPS]


def measure_restart(before: Sequence[Member], new: Sequence[Member], at_s: float, reached: int) -> Outcome:
    """Processes that were all replaced: from the last commit to the first step beyond, redone steps taken off."""
    old = [commit for member in before for commit in member.commits if commit.at_s <= at_s]
    median_s = statistics.median(_median_gap([c for c in member.commits if c.at_s <= at_s][-30:]) for member in before)
    beyond_s = max(next(c.at_s for c in member.commits if c.step > reached) for member in new if member.commits)
    first = min(commit.step for member in new for commit in member.commits)
    redone = max(0, reached + 1 - first)
    net_s = beyond_s - max(commit.at_s for commit in old) - median_s * (1 + redone)
    return Outcome(net_s=net_s, gross_s=beyond_s - at_s, median_step_s=median_s, redone_steps=redone)


def join_stall(members: Sequence[Member], since_s: float, until_s: float, waits_only: bool = False) -> float:
    """The longest step of any of them from `since_s` to the end of the one that `until_s` falls into, less its median
    step since `since_s`, and less the microbatches beyond its usual share (those of who is not there yet).
    `waits_only`: of each step only what is not the member's own computing (which takes longer where a starting process
    has the processors)."""
    found = [0.0]
    for member in members:
        commits = member.commits[sum(c.at_s < since_s for c in member.commits) :]
        found.append(_longest(commits, sum(c.at_s <= until_s for c in commits) + 1, waits_only))
    return max(found)


def quiet_wait(members: Sequence[Member], before_s: float, since_s: float, until_s: float) -> float:
    """What `join_stall` says, waits alone, of the last steps before `before_s`, in which nobody came: as many as there
    were from `since_s` to `until_s`."""
    found = [0.0]
    for member in members:
        count = sum(since_s <= commit.at_s <= until_s for commit in member.commits) + 1
        before = [commit for commit in member.commits if commit.at_s < before_s]
        found.append(_longest(before[-_USUAL:], count, waits_only=True, newest=True))
    return max(found)


def _longest(commits: Sequence[Commit], count: int, waits_only: bool, newest: bool = False) -> float:
    """Of the first `count` of these steps (or the newest), less the median of all."""
    if len(commits) < 2 or count < 2:
        return 0.0
    usual = statistics.median_low([commit.num_computed for commit in commits])
    one_s = statistics.median(commit.compute_s / max(commit.num_computed, 1) for commit in commits)
    steps = []
    for a, b in itertools.pairwise(commits):
        own_s = b.compute_s if waits_only else max(0, b.num_computed - usual) * one_s
        steps.append(b.at_s - a.at_s - own_s)
    return max(steps[1 - count :] if newest else steps[: count - 1]) - statistics.median(steps)


def _median_gap(commits: Sequence[Commit]) -> float:
    return statistics.median(b.at_s - a.at_s for a, b in itertools.pairwise(commits))
