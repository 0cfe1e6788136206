"""Whether what a disturbed run saved is whole and, bit for bit, what the undisturbed run saved after the same steps.

No torch. Never called by a run.
"""

from __future__ import annotations

from pathlib import Path

from outlast.checkpoint import LocalStore, Reader, heads, verify
from outlast.prove.resuming import differences

__all__ = ["SAVED", "newest_step", "wrong_generation"]

SAVED = "checkpoints"
"""The folder of a trial's generations."""


def newest_step(place: Path) -> int:
    """The newest step that can be gone on from; -1: none was saved."""
    return max((head.step for head in heads(LocalStore(str(place)))[0]), default=-1) if place.is_dir() else -1


def wrong_generation(place: Path, undisturbed: Path, *, newest: bool = True) -> str:
    """What is wrong with the first wrong generation under `place`; "" if none is. `newest`: it must be comparable."""
    ours, theirs = LocalStore(str(place)), LocalStore(str(undisturbed))
    found, unreadable = heads(ours)
    wanted = {head.step: head for head in heads(theirs)[0]}
    if unreadable:
        return "; ".join(f"generation {number}: {reason}" for number, reason in sorted(unreadable.items()))
    if not found:
        return f"nothing was saved under {place}"
    last = max(found, key=lambda head: head.generation)
    if newest and last.step not in wanted:
        return f"the newest generation is of step {last.step}, which the undisturbed run did not save"
    for head in sorted(found, key=lambda head: head.generation):
        problems = verify(ours, head.generation).problems
        if problems:
            return f"generation {head.generation} is damaged: {problems[0]}"
        if head.step not in wanted:
            continue
        with Reader(head, [ours]) as left, Reader(wanted[head.step], [theirs]) as right:
            rows = differences(left, right)
        if rows:
            return f"generation {head.generation}, of step {head.step}: {rows[0][0]} differs ({rows[0][1]})"
    return ""
