"""Who has to go: a suspect that is silent for longer than it may be, or one end of every broken path.

`EvictionPolicy` decides in the run, under the adversary and for the plan's hangs. Pure (protocol, 19, 20 and 27). It
never looks at a clock: the state carries durations.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from outlast.core.phases import OWNED, Phase
from outlast.errors import ConfigError

from .deadlines import DeadlinePolicy, DeadlineState, Durations

__all__ = ["EvictionBelief", "EvictionDecision", "EvictionPolicy", "EvictionState", "silence_s", "vertex_cover"]

# More than `WAITS`: also phases of joining and handing over, in which whoever is silent waits for one that may be dead.
_WAITING = frozenset(
    {
        Phase.SCATTERED,
        Phase.GATHERED,
        Phase.HEADER,
        Phase.LEAVE,
        Phase.CONNECT,
        Phase.ROLL_CALL,
        Phase.HAND_OVER_SEND,
        Phase.HAND_OVER_RECEIVE,
        Phase.FINAL,
        Phase.DEPART,
        Phase.JOIN_HELLO,
        Phase.JOIN_SNAPSHOT,
        Phase.JOIN_READY,
    }
)
"""Phases that last as long as somebody else takes."""
_TURNS = frozenset({Phase.JOIN_HELLO, Phase.JOIN_SNAPSHOT, Phase.JOIN_READY})
"""Phases that a joiner leaves every second, whoever it waits for. It is in no view: nobody names it."""
_EXACT_UP_TO = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class EvictionBelief:
    """Learned deadlines, inf where there is none: the suspect's own, and that of the peer that waits for it."""

    allowed_s: float
    awaited_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EvictionState:
    """What is known of a suspect. `kernel`: the kernel's letter for its state; `waited_s`: how long a peer has waited
    for it; `deaf`: it waits for others, and has long failed to say so; `full`: it waits to be connected, and has no
    descriptor left; `asked`: a peer has named it; `seated`: it is in the view; `alone`: nobody else has the state."""

    kernel: str
    phase: Phase
    silent_s: float
    waited_s: float
    cpu_advanced: bool = False
    traced: bool = False
    deaf: bool = False
    full: bool = False
    asked: bool = True
    seated: bool = True
    alone: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EvictionDecision:
    """Evict it, leave it (`wait`), probe the paths (the suspect itself waits inside the exchange), or `continue` one
    that is stopped; and why."""

    action: Literal["evict", "wait", "probe", "continue"]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EvictionPolicy:
    """`outside_s`: nobody is silent for longer, in a phase that does not wait for others."""

    outside_s: float = 1800.0

    def __post_init__(self) -> None:
        if not self.outside_s > 0:
            raise ConfigError(f"outside_s {self.outside_s}", remedy="more than none")

    def decide(self, belief: EvictionBelief, state: EvictionState) -> EvictionDecision:
        """What to do about one suspect.

        A traced process is never evicted. One that uses its processor is a straggler, unless it gives no sign for
        `outside_s`. In the loop's own body only that counts.
        """
        s = state
        if s.kernel in "XZ":
            return EvictionDecision(action="wait", reason="already gone")
        if s.traced:
            return EvictionDecision(action="wait", reason="traced by a debugger")
        if s.kernel == "T":
            return self._stopped(belief, s)
        if s.deaf:
            reason = f"no sign of life for {s.silent_s:.1f} s in {s.phase.name.lower()}"
            return EvictionDecision(action="evict", reason=reason)
        if s.full and not s.alone:
            return EvictionDecision(action="evict", reason="out of file descriptors: its peers cannot connect to it")
        if (s.phase not in _WAITING or s.phase in _TURNS) and s.silent_s > self.outside_s:
            reason = f"silent for {s.silent_s:.1f} s {_where(s.phase)} (outside_s)"
            return EvictionDecision(action="evict", reason=reason)
        if s.phase in _WAITING and not s.cpu_advanced and s.kernel != "R":
            return EvictionDecision(action="probe", reason="it waits for others too")
        limit = min(belief.allowed_s, self.outside_s) if s.phase in OWNED else self.outside_s
        if s.cpu_advanced or s.kernel == "R":
            return EvictionDecision(action="wait", reason="slow: its processor time advances")
        if s.silent_s > limit:
            return EvictionDecision(action="evict", reason=f"silent for {s.silent_s:.2f} s in {s.phase.name.lower()}")
        return EvictionDecision(action="wait", reason=f"silent for {s.silent_s:.2f} s of {limit:.2f} allowed")

    def _stopped(self, belief: EvictionBelief, s: EvictionState) -> EvictionDecision:
        """The only holder of the state is continued, as long as a script may be silent. Whoever is in no view has been
        continued once by its agent (27), and is replaced. Of others, one is evicted once a peer's deadline is over."""
        if not s.seated:
            if s.asked:
                return EvictionDecision(action="wait", reason="stopped, in no view")
            return EvictionDecision(action="evict", reason="stopped again, though it was continued")
        if s.alone and s.silent_s <= self.outside_s:
            return EvictionDecision(action="continue", reason="stopped, and nobody else has the state")
        if s.waited_s >= belief.awaited_s:
            return EvictionDecision(action="evict", reason=f"stopped; a peer waited {s.waited_s:.2f} s for it")
        return EvictionDecision(action="wait", reason="stopped, within the deadline")

    def cut(
        self, pairs: Iterable[tuple[str, str]], reachable: Collection[str], age: Mapping[str, int]
    ) -> tuple[str, ...]:
        """Who goes where pairs of members have no path between them: `vertex_cover`."""
        return vertex_cover(pairs, reachable, age)


def _where(phase: Phase) -> str:
    if phase is Phase.IDLE:
        return "in the script's code before its loop"
    return f"in {phase.name.lower()}" if phase in OWNED else "in the loop's body"


def silence_s(usual_s: float, deadlines: DeadlinePolicy, evictions: EvictionPolicy) -> float:
    """Seconds from a hang to the eviction of who hangs, in a phase of its own that has always taken `usual_s`: what the
    learned deadline allows it, if it is evicted then."""
    seen = Durations()
    while not (found := deadlines.decide(seen, DeadlineState())).learned:
        seen.observe(usual_s)
    belief = EvictionBelief(allowed_s=found.allowed_s, awaited_s=found.allowed_s)
    over_s = math.nextafter(found.allowed_s, math.inf)
    state = EvictionState(kernel="S", phase=Phase.BACKWARD, silent_s=over_s, waited_s=found.allowed_s)
    evicted = evictions.decide(belief, state).action == "evict"
    return min(found.allowed_s, evictions.outside_s) if evicted else evictions.outside_s


def vertex_cover(
    pairs: Iterable[tuple[str, str]], reachable: Collection[str], age: Mapping[str, int]
) -> tuple[str, ...]:
    """The fewest members whose removal leaves no broken pair; ties: first who is out of the coordinator's reach,
    then the newest (largest `age` number). Exact up to 16 members in broken pairs, greedy by degree beyond."""
    edges = {tuple(sorted(pair)) for pair in pairs}
    names = sorted({name for edge in edges for name in edge})

    def weight(name: str) -> tuple[bool, int, str]:
        return (name in reachable, -age.get(name, 0), name)

    if len(names) > _EXACT_UP_TO:
        return _greedy(edges, weight)
    for size in range(len(names) + 1):
        covers = [c for c in combinations(names, size) if all(a in c or b in c for a, b in edges)]
        if covers:
            return min(covers, key=lambda c: sorted(map(weight, c)))
    return ()


def _greedy(edges: set[tuple[str, ...]], weight: object) -> tuple[str, ...]:
    out: list[str] = []
    while edges:
        degree: dict[str, int] = {}
        for edge in edges:
            for name in edge:
                degree[name] = degree.get(name, 0) + 1
        worst = min(degree, key=lambda name: (-degree[name], weight(name)))  # type: ignore[operator]
        out.append(worst)
        edges = {edge for edge in edges if worst not in edge}
    return tuple(sorted(out))
