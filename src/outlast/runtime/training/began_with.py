"""What the script gave its optimizers and schedulers when training began: part of the training state.

A run that goes on from a checkpoint takes the settings that lie there, whatever the script says now. What the run began
with is kept beside them, so that a script that has another learning rate since is told which of the two holds. Numbers
that a loop or a scheduler changes are no news: only what `protect` was given is compared. Does not decide what holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = ["BEGAN", "BeganWith"]

BEGAN = "outlast.began"
"""Its name in the training state."""
_SIMPLE = (bool, int, float, str, type(None))
_MOST = 16  # items of a setting that is a list


class BeganWith:
    """By name, the value in each group of parameters; one value where all groups have the same."""

    def __init__(self, optimizers: Sequence[Any], schedulers: Sequence[Any]) -> None:
        self._values = dict(_named(optimizers, schedulers))

    def unlike(self, saved: Mapping[str, Any]) -> list[str]:
        """What another one, as `state_dict` told it, has otherwise: a line each, the saved value first."""
        told = []
        for name, mine in self._values.items():
            theirs = saved["values"].get(name, mine)
            groups = range(max(len(mine), len(theirs)))
            odd = [g for g in groups if mine[min(g, len(mine) - 1)] != theirs[min(g, len(theirs) - 1)]]
            if odd:
                place = f" of group {odd[0]}" if len(groups) > 1 else ""
                then, now = theirs[min(odd[0], len(theirs) - 1)], mine[min(odd[0], len(mine) - 1)]
                told.append(f"{name}{place} was {then} when the run began, is {now} in the script")
        return told

    def state_dict(self) -> dict[str, Any]:
        return {"values": {name: list(rows) for name, rows in self._values.items()}}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        self._values = {str(name): [*rows] for name, rows in values["values"].items()}


def _named(optimizers: Sequence[Any], schedulers: Sequence[Any]) -> Iterator[tuple[str, list[str]]]:
    for number, optimizer in enumerate(optimizers):
        place = f" of optimizer {number}" if len(optimizers) > 1 else ""
        for key in dict.fromkeys(key for group in optimizer.param_groups for key in group):
            if key in ("params", "initial_lr"):
                continue
            first = "initial_lr" if key == "lr" else key  # of which a scheduler has made the other one
            rows = [_shown(group.get(first, group.get(key))) for group in optimizer.param_groups]
            if None not in rows:
                yield f"{key}{place}", [str(row) for row in (rows if len({*rows}) > 1 else rows[:1])]
    for number, scheduler in enumerate(schedulers):
        place = f" {number}" if len(schedulers) > 1 else ""
        yield from _of_scheduler(scheduler.state_dict(), f"{type(scheduler).__name__}{place}")


def _of_scheduler(values: Mapping[str, Any], name: str) -> Iterator[tuple[str, list[str]]]:
    for key, value in values.items():
        if key == "_schedulers":  # those that one scheduler has in it
            for number, part in enumerate(value):
                yield from _of_scheduler(part, f"part {number} of {name}")
        shown = _shown(sorted(value.elements()) if isinstance(value, Counter) else value)
        known = key == "_milestones" or not (key.startswith("_") or key in ("base_lrs", "last_epoch"))
        if shown is not None and known:
            yield f"{key.lstrip('_')} of {name}", [shown]


def _shown(value: Any) -> str | None:
    """None for what is no setting."""
    if isinstance(value, Tensor):
        value = value.detach().tolist() if value.numel() <= _MOST else ()
    simple = isinstance(value, _SIMPLE)
    if isinstance(value, list | tuple):
        simple = 0 < len(value) <= _MOST and all(isinstance(item, _SIMPLE) for item in value)
    return repr(value) if simple else None
