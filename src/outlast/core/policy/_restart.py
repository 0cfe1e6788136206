"""Whether the place of a dead process is filled again, and how long after.

One object decides in the run, under the adversary and in the simulator. Invariant: a place that keeps dying waits twice
as long each time, at most a minute; the budget of restarts is for the whole run, and a first start costs none of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from outlast.errors import ConfigError

from ._arithmetic import clamp, where

__all__ = ["RestartDecision", "RestartPolicy"]

_LONGEST_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartDecision:
    """Whether to start a process (arrays alike), and the delay before that."""

    start: Any
    delay_s: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """`most`: replacements in the whole run; `backoff_s`: the delay after a place's first death within `window_s`."""

    most: float = math.inf
    backoff_s: float = 1.0
    window_s: float = 60.0

    def __post_init__(self) -> None:
        if self.most < 0 or self.backoff_s < 0 or self.window_s <= 0:
            raise ConfigError(
                f"restarts {self.most}, backoff {self.backoff_s} s, window {self.window_s} s", remedy="zero or more"
            )

    def decide(self, *, deaths: Any, restarts: Any, again: Any = True) -> RestartDecision:
        """`deaths` of this place within the window, `restarts` of the run; `again`: whether it has run before."""
        delay_s = clamp(self.backoff_s * 2.0 ** (deaths - 1) * (deaths > 0), 0.0, _LONGEST_S)
        return RestartDecision(start=where(again, restarts < self.most, restarts == restarts), delay_s=delay_s)
