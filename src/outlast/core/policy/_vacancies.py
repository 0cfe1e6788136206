"""What a run does whose machines are lost while no spare is there: go on with fewer, wait for another, or stop.

One object decides in the run, under the adversary and in the simulator, of one run or of many. Everything is weighed in
seconds of training at full strength, over the time until another machine is expected:

    go on with fewer:  expected_s x (share - price) - 2 reshape_s      (there and back)
    wait:             -expected_s x price
    stop:             -restart_s, at least 2 reshape_s                (and nothing is paid meanwhile)

Invariant: fewer than `least` never go on. A wait that is worth its while ends at the latest when it has cost as much as
going on would have (Karlin, Manasse, Rudolph & Sleator 1988: at most twice the better choice), and any at `patience_s`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from outlast.errors import ConfigError

from ._arithmetic import clamp, where

__all__ = ["Replacements", "VacancyDecision", "VacancyPolicy", "VacancyState"]

_NEVER_S = 1e12

VacancyKind = Literal["auto", "shrink", "wait", "stop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacements:
    """What is believed of a lost machine's replacement, in seconds: until its place is filled again, what one change of
    the number of machines holds training up for, and what a stop and a start later cost. Floats or arrays."""

    expected_s: Any = 30.0
    reshape_s: Any = 0.5
    restart_s: Any = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class VacancyState:
    """Now: machines running and wanted, the fewest that may go on, and for how long training has waited. `some_come`:
    whether a replacement may come at all, by itself."""

    running: Any
    wanted: Any
    least: Any = 1
    waited_s: Any = 0.0
    some_come: Any = True


@dataclass(frozen=True, kw_only=True, slots=True)
class VacancyDecision:
    """Whether to go on with fewer, or to stop; neither: to wait, for `wait_s` from now (inf: as long as it takes).
    Arrays alike."""

    shrink: Any
    stop: Any
    wait_s: Any

    @property
    def action(self) -> Literal["shrink", "wait", "stop"]:
        """The same in a word, of one run."""
        return "stop" if self.stop else "shrink" if self.shrink else "wait"


@dataclass(frozen=True, kw_only=True, slots=True)
class VacancyPolicy:
    """`kind`: always `shrink`, `wait` or `stop`, or `auto`, what is worth most. `price`: what a second costs, of what a
    second of training at full strength is worth. patience_s: no wait is longer."""

    kind: VacancyKind = "auto"
    patience_s: float = math.inf
    price: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in {"auto", "shrink", "wait", "stop"}:
            raise ConfigError(f"vacancies {self.kind!r}", remedy="one of auto, shrink, wait, stop")
        if not self.price >= 0 or not self.patience_s >= 0:
            raise ConfigError(f"price {self.price}, patience {self.patience_s} s", remedy="zero or more")

    def decide(self, belief: Replacements, state: VacancyState) -> VacancyDecision:
        """What to do about the machines that are missing."""
        enough = state.running >= state.least
        left_s = where(state.some_come, clamp(self._limit_s(belief, state) - state.waited_s, 0.0, math.inf), 0.0)
        over = left_s <= 0
        if self.kind == "auto":
            goes, waits, stops = self.worth(belief, state)
            shrink = enough & (goes >= stops) & ((goes > waits) | over)
            over = over | (stops > waits)
        else:
            shrink = enough & (self.kind != "stop") & (over | (self.kind == "shrink"))
            over = over | (self.kind == "stop")
        return VacancyDecision(shrink=shrink, stop=where(shrink, False, over), wait_s=where(shrink | over, 0.0, left_s))

    def worth(self, belief: Replacements, state: VacancyState) -> tuple[Any, Any, Any]:
        """What going on with fewer, waiting and stopping are worth, in seconds of training at full strength."""
        expected_s = clamp(where(state.some_come, belief.expected_s, _NEVER_S), 0.0, _NEVER_S)
        goes = expected_s * (state.running / state.wanted - self.price) - 2 * belief.reshape_s
        restart_s = where(belief.restart_s > 2 * belief.reshape_s, belief.restart_s, 2 * belief.reshape_s)
        return goes, 0.0 - expected_s * self.price, 0.0 - restart_s

    def _limit_s(self, belief: Replacements, state: VacancyState) -> Any:
        """The longest wait: where enough are left, until it has cost what there and back would have."""
        if self.kind != "auto":
            return self.patience_s
        even_s = 2 * belief.reshape_s * state.wanted / clamp(state.running, 1e-9, math.inf)
        return where(state.running >= state.least, clamp(even_s, 0.0, self.patience_s), self.patience_s)

    def reason(self, belief: Replacements, state: VacancyState) -> str:
        """Why it decides so for one run, in a sentence without its full stop."""
        found = self.decide(belief, state)
        here = f"{state.running:g} of {state.wanted:g} replicas are left and no spare"
        if state.running < state.least:
            here += f", fewer than the {state.least:g} that may go on"
        come = f"another is expected within {belief.expected_s:.3g} s"
        come = come if state.some_come else "no other may be started any more"
        waited = f" after {state.waited_s:.3g} s of waiting" if state.waited_s else ""
        return f"{here}{waited}; {come}; {self._why(belief, state, found)}"

    def _why(self, belief: Replacements, state: VacancyState, found: VacancyDecision) -> str:
        goes, waits, stops = self.worth(belief, state)
        until = "as long as it takes" if found.wait_s == math.inf else f"for up to {found.wait_s:.3g} s"
        does = {"shrink": "goes on with fewer", "wait": f"waits {until}", "stop": "saves and stops"}[found.action]
        if self.kind != "auto":
            return f"it {does}, as on_vacancy = {self.kind} says"
        if not state.some_come:
            return f"it {does}"
        worth = f"worth {goes:.3g} s of full training, waiting {waits:.3g}, stopping {stops:.3g}"
        return f"it {does} (going on with fewer is {worth})"
