"""Who has to go: a suspect that is silent for longer than it may be, or one end of every broken path.

Pure (protocol, 19 and 20). It never looks at a clock: the evidence carries durations.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from itertools import combinations
from typing import Literal

import msgspec

from outlast.core.phases import OWNED, Phase

from .deadlines import Durations, deadline

__all__ = ["SilenceEvidence", "SilenceVerdict", "judge", "silence_s", "vertex_cover"]

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
_EXACT_UP_TO = 16


class SilenceEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a suspect. `state`: the kernel's letter; `allowed_s`: its learned deadline, inf if none."""

    state: str
    traced: bool
    phase: Phase
    silent_s: float
    cpu_advanced: bool
    allowed_s: float
    waited_s: float  # how long a peer has waited for it
    deadline_s: float  # that peer's learned deadline
    deaf: bool = False  # it waits for others, and has long failed to say so


class SilenceVerdict(msgspec.Struct, frozen=True, kw_only=True):
    decision: Literal["evict", "wait", "probe"]
    reason: str


def judge(evidence: SilenceEvidence, outside_s: float) -> SilenceVerdict:
    """Evict, wait, or probe the paths (the suspect itself waits inside the exchange).

    A traced process is never evicted. A stopped one is, once a peer waited beyond its deadline. One that uses its
    processor is a straggler, unless it gives no sign for `outside_s`. In the loop's own body only that counts.
    """
    e = evidence
    if e.state in "XZ":
        return SilenceVerdict(decision="wait", reason="already gone")
    if e.traced:
        return SilenceVerdict(decision="wait", reason="traced by a debugger")
    if e.state == "T":
        if e.waited_s >= e.deadline_s:
            return SilenceVerdict(decision="evict", reason=f"stopped; a peer waited {e.waited_s:.2f} s for it")
        return SilenceVerdict(decision="wait", reason="stopped, within the deadline")
    if e.deaf:
        return SilenceVerdict(
            decision="evict", reason=f"no sign of life for {e.silent_s:.1f} s in {e.phase.name.lower()}"
        )
    if e.phase in _WAITING and not e.cpu_advanced and e.state != "R":
        return SilenceVerdict(decision="probe", reason="it waits for others too")
    limit = min(e.allowed_s, outside_s) if e.phase in OWNED else outside_s
    if e.phase not in _WAITING and e.silent_s > outside_s:
        where = f"in {e.phase.name.lower()}" if e.phase in OWNED else "in the loop's body"
        return SilenceVerdict(decision="evict", reason=f"silent for {e.silent_s:.1f} s {where} (outside_s)")
    if e.cpu_advanced or e.state == "R":
        return SilenceVerdict(decision="wait", reason="slow: its processor time advances")
    if e.silent_s > limit:
        return SilenceVerdict(decision="evict", reason=f"silent for {e.silent_s:.2f} s in {e.phase.name.lower()}")
    return SilenceVerdict(decision="wait", reason=f"silent for {e.silent_s:.2f} s of {limit:.2f} allowed")


def silence_s(usual_s: float, floor_s: float, outside_s: float) -> float:
    """Seconds from a hang to the eviction of who hangs, in a phase of its own that has always taken `usual_s`: what the
    learned deadline allows it, if `judge` evicts it then."""
    seen = Durations()
    while (allowed_s := deadline(seen, floor_s)) == math.inf:
        seen.observe(usual_s)
    evidence = SilenceEvidence(
        state="S",
        traced=False,
        phase=Phase.BACKWARD,
        silent_s=math.nextafter(allowed_s, math.inf),
        cpu_advanced=False,
        allowed_s=allowed_s,
        waited_s=allowed_s,
        deadline_s=allowed_s,
    )
    return min(allowed_s, outside_s) if judge(evidence, outside_s).decision == "evict" else outside_s


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
