"""Many schedules, in parallel; the first violation shrunk to what is needed for it.

The result depends on the seeds alone, never on the number of jobs: schedules are numbered, and the lowest number wins.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from outlast.errors import ConfigError
from outlast.prove.adversary._broken import BROKEN
from outlast.prove.adversary._host_rows import host_rows_of
from outlast.prove.adversary._oracle import Violation
from outlast.prove.adversary._scenario import Scenario, scenario_of
from outlast.prove.adversary._variants import Variant
from outlast.prove.adversary._world import ScheduleOutcome, World

__all__ = ["Domain", "ScheduleFinding", "Tally", "play", "replayed", "search", "shrink", "variant_named"]

Domain = Literal["replica", "host"]  # what lies together; of hosts, each seed has another schedule

_CHUNK = 250
_SIMPLER: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("num_spares", (0, 1)),
    ("num_agents", (1,)),
    ("num_replicas", (1, 2, 3)),
    ("num_steps", (1, 2, 3, 4)),
    ("num_microbatches", (4,)),
    ("tail", (0.0,)),
)


class ScheduleFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A violation, what is left of its schedule after shrinking, and the command that plays it again."""

    seed: int
    violation: Violation
    faults: tuple[str, ...]
    num_runs: int  # that shrinking took
    command: str


@dataclass(slots=True)
class Tally:
    """Counts over schedules."""

    num_schedules: int = 0
    num_events: int = 0
    num_views: int = 0
    endings: dict[str, int] = field(default_factory=dict)
    violations: list[tuple[int, Violation]] = field(default_factory=list)

    def add(self, seed: int, outcome: ScheduleOutcome) -> None:
        self.num_schedules += 1
        self.num_events += outcome.events
        self.num_views += outcome.views
        if outcome.violation is not None:
            self.violations.append((seed, outcome.violation))
        ending = "violated" if outcome.violation is not None or outcome.finish is None else outcome.finish.outcome
        self.endings[ending] = self.endings.get(ending, 0) + 1

    def merge(self, other: Tally) -> None:
        self.num_schedules += other.num_schedules
        self.num_events += other.num_events
        self.num_views += other.num_views
        self.violations += other.violations
        for ending, count in other.endings.items():
            self.endings[ending] = self.endings.get(ending, 0) + count


def variant_named(name: str) -> Variant:
    """The protocol as it is (""), or one of its broken variants. Raises ConfigError."""
    if not name:
        return Variant()
    if name not in BROKEN:
        raise ConfigError(f"no variant {name!r}", remedy=f"one of {', '.join(BROKEN)}")
    return BROKEN[name][0]()


def play(scenario: Scenario, variant: str = "", trace: Callable[[float, str], None] | None = None) -> ScheduleOutcome:
    """Run one schedule."""
    return World(scenario, variant_named(variant), trace).run()


def _drawn(seed: int, domain: Domain) -> Scenario:
    return host_rows_of(seed) if domain == "host" else scenario_of(seed)


def _chunk(work: tuple[int, int, str, Domain]) -> Tally:
    first, count, variant, domain = work
    tally = Tally()
    with _newest_garbage_alone():
        for seed in range(first, first + count):
            tally.add(seed, play(_drawn(seed, domain), variant))
    return tally


@contextmanager
def _newest_garbage_alone() -> Iterator[None]:
    """Every schedule leaves a world of cycles behind. While many are played these alone are looked through, not all
    that was imported, which takes longer."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _chunks(seed: int, num_schedules: int, variant: str, domain: Domain) -> Iterator[tuple[int, int, str, Domain]]:
    for start in range(0, num_schedules, _CHUNK):
        yield seed + start, min(_CHUNK, num_schedules - start), variant, domain


def search(
    num_schedules: int,
    seed: int = 0,
    *,
    jobs: int = 1,
    variant: str = "",
    domain: Domain = "replica",
    progress: Callable[[Tally], None] | None = None,
) -> Tally:
    """Schedules `seed` … `seed + num_schedules - 1`; ends early after the first chunk with a violation."""
    tally = Tally()
    work = _chunks(seed, num_schedules, variant, domain)
    if jobs == 1:
        _collect(map(_chunk, work), tally, progress)
    else:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            _collect(pool.imap(_chunk, work), tally, progress)
    return tally


def _collect(parts: Iterator[Tally], tally: Tally, progress: Callable[[Tally], None] | None) -> None:
    for part in parts:
        tally.merge(part)
        if progress is not None:
            progress(tally)
        if tally.violations:
            return


# --- shrinking -------------------------------------------------------------------------------------------------------
def shrink(seed: int, variant: str = "", domain: Domain = "replica") -> ScheduleFinding:
    """Leave out faults, then make the fleet smaller, as long as the same invariant breaks."""
    full = _drawn(seed, domain)
    first = play(full, variant).violation
    if first is None:
        raise ConfigError(f"schedule {seed} breaks nothing", remedy="a seed that does")
    violation: Violation = first
    kept, runs = list(range(len(full.faults))), 1
    changes: dict[str, Any] = {}

    def breaks(faults: Sequence[int], **changed: Any) -> Violation | None:
        nonlocal runs
        runs += 1
        found = play(_changed(full, faults, changed), variant).violation
        return found if found is not None and found.invariant == first.invariant else None

    for index in reversed(range(len(full.faults))):
        fewer = [other for other in kept if other != index]
        if (found := breaks(fewer)) is not None:
            kept, violation = fewer, found
    for name, values in _SIMPLER:
        for value in values:
            if value >= getattr(full, name):
                break
            if (found := breaks(kept, **changes, **{name: value})) is not None:
                changes[name], violation = value, found
                break
    spec = ",".join([str(seed), "faults=" + "+".join(map(str, kept)), *(f"{k}={v}" for k, v in changes.items())])
    option = (f" --variant {variant}" if variant else "") + (" --fault-domain host" if domain == "host" else "")
    return ScheduleFinding(
        seed=seed,
        violation=violation,
        faults=tuple(str(full.faults[i]) for i in kept),
        num_runs=runs,
        command=f"outlast prove protocol --replay {spec}{option}",
    )


def replayed(spec: str, domain: Domain = "replica") -> Scenario:
    """The schedule of `SEED[,faults=I+J][,num_steps=N]…`. Raises ConfigError."""
    seed, *parts = spec.split(",")
    try:
        full = _drawn(int(seed), domain)
        kept, changes = list(range(len(full.faults))), {}
        for part in parts:
            name, _, value = part.partition("=")
            if name == "faults":
                kept = [int(index) for index in value.split("+") if index]
            else:
                changes[name] = type(getattr(full, name))(value)
        return _changed(full, kept, changes)
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"--replay {spec!r} is not a schedule: {error}", remedy="SEED, or the line that a violation printed"
        ) from None


def _changed(full: Scenario, kept: Sequence[int], changes: dict[str, Any]) -> Scenario:
    return msgspec.structs.replace(full, faults=tuple(full.faults[index] for index in kept), **changes)
