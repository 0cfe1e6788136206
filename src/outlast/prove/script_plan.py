"""How a script's fleets are struck: drawn from a seed, or read from a schedule that somebody wrote. Pure.

A schedule is text, so that a failure is one command that strikes the same way again: items with commas between,
`WAIT:KIND:ROLE:PICK` for a strike from outside, `WAIT` seconds after the one before it, and
`phase:NAME:SIGNAL:REPLICA:STEP` for one from inside. After the item `training` the first strike waits from when all
replicas train, and not from the first process on.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from outlast.core.phases import Phase
from outlast.errors import ConfigError, nearest
from outlast.prove.strike_plan import ROLES, Role, Setting, Strike, StruckFleet
from outlast.runtime.settings.fault_points import Fault

__all__ = [
    "FROM_TRAINING",
    "INSIDE",
    "KINDS",
    "PHASES",
    "RANK_ALONE",
    "Kind",
    "ScriptFleet",
    "Shape",
    "drawn",
    "paced",
    "planned",
    "read_schedule",
    "schedule_of",
    "strikes_of",
]


class Kind(NamedTuple):
    """A way to strike. `signal`: what `_strike_acts` is told; "" for a phase. `roles`: who, or what, can be struck so.
    `lasts`: for a time, and is undone then."""

    signal: str
    weight: int
    roles: tuple[Role, ...] = (*ROLES, "rank")
    lasts: bool = False


_RANKS: tuple[Role, ...] = ("replica", "spare", "rank")
KINDS: dict[str, Kind] = {
    "kill": Kind("SIGKILL", 6),
    "segv": Kind("SIGSEGV", 2),
    "abort": Kind("SIGABRT", 2),
    "bus": Kind("SIGBUS", 2),
    "term": Kind("SIGTERM", 2),
    "stop": Kind("SIGSTOP", 3),
    "pause": Kind("SIGSTOP", 4, lasts=True),
    "slow": Kind("SLOW", 2, _RANKS, lasts=True),
    "memory": Kind("MEMORY", 2, _RANKS),
    "descriptors": Kind("DESCRIPTORS", 2, _RANKS),
    "filesize": Kind("FILESIZE", 2, (*_RANKS, "coordinator")),
    "cputime": Kind("CPUTIME", 2, _RANKS),
    "full": Kind("", 2, ("disk",), lasts=True),
    "readonly": Kind("", 2, ("disk",), lasts=True),
    "frozen": Kind("", 2, ("disk",), lasts=True),
    "clock": Kind("", 2, ("clock",)),
    "power": Kind("", 2, ("host",), lasts=True),
    "cable": Kind("", 2, ("host",), lasts=True),
    "hang": Kind("", 1, ("host",), lasts=True),
    "path": Kind("", 1, ("host",), lasts=True),
    "slowlink": Kind("", 1, ("host",), lasts=True),
    "lossy": Kind("", 1, ("host",), lasts=True),
    "brownout": Kind("SIGKILL", 2),
    "phase": Kind("", 4, _RANKS),
}
"""By the name that schedules and `--faults` have for it."""
RANK_ALONE = "a rank that is not its replica's lead"
"""What is struck besides, where replicas have several."""

PHASES = (
    Phase.LOAD, Phase.BODY, Phase.BACKWARD, Phase.MERGE, Phase.SCATTER, Phase.SCATTERED, Phase.REDUCE, Phase.GATHER,
    Phase.GATHERED, Phase.HEADER, Phase.VERDICT, Phase.OPTIMIZER, Phase.COMMIT,
)  # fmt: skip
"""Phases of a step in which a fault from inside is put."""
INSIDE = ("SIGKILL", "SIGSTOP", "exit", "raise")
"""What is done there."""
_TARGETS: dict[Role, int] = {
    "replica": 9, "spare": 3, "agent": 2, "coordinator": 4, "nursery": 3, "disk": 1, "clock": 1, "host": 1, "rank": 9
}  # fmt: skip
FROM_TRAINING = "training"
"""The item of a schedule by which strikes wait until all replicas train."""
_MOST_COORDINATORS = 4  # beyond a few in a minute the launcher gives up, as it should
_MOST_STRIKES = 7


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same in all fleets of a campaign. `length_s`, `begin_s`: of an undisturbed run, to its end and to
    its first step; `steps`: how many it commits; `hosts`: on how many, 0 for this machine alone; `slots`: places for
    replicas on each, 0: as many as hold all when one host is gone; `ranks`: in a replica."""

    replicas: int = 2
    spares: int = 1
    length_s: float = 20.0
    begin_s: float = 5.0
    steps: int = 100
    hosts: int = 0
    slots: int = 0
    ranks: int = 1


class ScriptFleet(StruckFleet, frozen=True, kw_only=True):
    """A fleet that trains a script of somebody's. `faults`: those from inside."""

    faults: tuple[Fault, ...] = ()
    ranks: int = 1

    @property
    def schedule(self) -> str:
        """As `read_schedule` has it."""
        return schedule_of(self)


def drawn(number: int, seed: int, shape: Shape, kinds: Collection[str]) -> ScriptFleet:
    """The fleet of this number under this seed."""
    rng = random.Random(f"script/{seed}/{number}")
    keeps = rng.random() < (0.9 if shape.replicas + shape.spares == 1 else 0.7)
    strikes: list[Strike] = []
    faults: list[Fault] = []
    count = rng.randint(2, _MOST_STRIKES)
    mean_s = max(0.3, (shape.length_s - shape.begin_s) / count)
    weights = {kind: KINDS[kind].weight for kind in KINDS if kind in kinds}
    while len(strikes) + len(faults) < count:
        kind = rng.choices(list(weights), list(weights.values()))[0]
        if kind == "phase":
            faults.append(_fault(rng, shape, number, len(faults)))
            continue
        wait_s = rng.uniform(0.0, shape.begin_s) if not strikes else rng.expovariate(1 / mean_s)
        if strikes and rng.random() < 0.15:
            wait_s = rng.uniform(0.0, 0.2)
        strikes.append(_strike(rng, kind, round(wait_s, 3), strikes, shape.ranks))
        if kind == "brownout":
            waits_s = (round(rng.uniform(0.0, 0.2), 3) for _ in range(rng.randint(1, 2)))
            strikes += [_strike(rng, kind, next_s, strikes, shape.ranks) for next_s in waits_s]
    return ScriptFleet(
        number=number,
        seed=seed,
        setting=Setting(dtype="script"),
        replicas=shape.replicas,
        spares=shape.spares,
        ranks=shape.ranks,
        agents=1 if shape.hosts else rng.randint(1, 2),
        exchange="auto" if shape.hosts else rng.choice(("shm", "shm", "c10d")),
        keeps=keeps or "disk" in {strike.roles[0] for strike in strikes},
        stranger=False,
        strikes=tuple(strikes),
        faults=tuple(faults),
    )


def paced(shape: Shape, whole_s: Sequence[float]) -> Shape:
    """The shape by which strikes are drawn, once some runs took so long from begin to end: the undisturbed ones may
    have met a busy machine, and strikes for moments that never come prove nothing."""
    length_s = min([shape.length_s, *whole_s])
    return msgspec.structs.replace(shape, length_s=length_s, begin_s=shape.begin_s * length_s / shape.length_s)


def planned(
    number: int, seed: int, shape: Shape, schedule: str, agents: int, exchange: str, keeps: bool
) -> ScriptFleet:
    """A fleet that is struck as `schedule` says. ConfigError for what is none."""
    strikes, faults = read_schedule(schedule)
    return ScriptFleet(
        number=number,
        seed=seed,
        setting=Setting(dtype="script"),
        replicas=shape.replicas,
        spares=shape.spares,
        ranks=shape.ranks,
        agents=agents,
        exchange=exchange,
        keeps=keeps,
        stranger=False,
        strikes=strikes,
        faults=faults,
        from_training=FROM_TRAINING in _items(schedule),
    )


def _strike(rng: random.Random, kind: str, wait_s: float, before: Sequence[Strike], ranks: int) -> Strike:
    targets = {role: weight for role, weight in _TARGETS.items() if role in KINDS[kind].roles}
    if ranks == 1:
        targets.pop("rank", None)
    if sum(strike.roles[0] == "coordinator" for strike in before) >= _MOST_COORDINATORS:
        targets.pop("coordinator", None)
    role = rng.choices(list(targets), list(targets.values()))[0]
    continue_s = round(min(rng.expovariate(1 / 1.5), 8.0), 3) if KINDS[kind].lasts else None
    return _made(kind, wait_s, role, round(rng.random(), 3), continue_s)


def _made(kind: str, wait_s: float, role: Role, pick: float, continue_s: float | None) -> Strike:
    others = tuple(other for other in KINDS[kind].roles if other != role and role != "rank")  # a rank is waited for
    return Strike(
        wait_s=wait_s, signal=KINDS[kind].signal, roles=(role, *others), pick=pick, continue_s=continue_s, named=kind
    )


def _fault(rng: random.Random, shape: Shape, number: int, before: int) -> Fault:
    """Phases take turns, and so do the ways to fail, so that none is left to chance: within as many faults as there are
    of both, each is met with each."""
    turn = number + 5 * before
    phase, action = PHASES[turn % len(PHASES)], INSIDE[(turn // len(PHASES) + turn % len(PHASES)) % len(INSIDE)]
    if action == "SIGSTOP" and phase in (Phase.LOAD, Phase.BODY):
        action = "SIGKILL"  # there a silence may be the loop's own, and is waited for as long
    fields = {
        "replica": f"r{rng.randrange(shape.replicas)}.1", "phase": phase.name.lower(), "action": action,
        "step": rng.randrange(max(1, shape.steps - 1)),
    }  # fmt: skip
    return msgspec.convert(fields, Fault)


# --- as text ---------------------------------------------------------------------------------------------------------
def schedule_of(fleet: ScriptFleet) -> str:
    """What `read_schedule` makes the same strikes of."""
    rows = [FROM_TRAINING] if fleet.from_training else []
    rows += [f"phase:{f.phase}:{f.action}:{f.replica}:{f.step}" for f in fleet.faults]
    for strike in fleet.strikes:
        kind = strike.named if strike.continue_s is None else f"{strike.named}~{strike.continue_s:g}"
        rows.append(f"{strike.wait_s:g}:{kind}:{strike.roles[0]}:{strike.pick:g}")
    return ",".join(rows)


def read_schedule(text: str) -> tuple[tuple[Strike, ...], tuple[Fault, ...]]:
    """ConfigError for what is no schedule, with the item that is none."""
    strikes: list[Strike] = []
    faults: list[Fault] = []
    for item in _items(text):
        parts = item.split(":")
        if item == FROM_TRAINING:
            continue
        if parts[0] == "phase":
            faults.append(_read_fault(item, parts))
        else:
            strikes.append(_read_strike(item, parts))
    return tuple(strikes), tuple(faults)


def _items(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def strikes_of(text: str) -> set[str]:
    """The kinds of strikes from outside in a schedule."""
    return {strike.named for strike in read_schedule(text)[0]}


def _read_strike(item: str, parts: Sequence[str]) -> Strike:
    try:
        wait, told, role, pick = parts
        kind, _, after = told.partition("~")
        wait_s, share, continue_s = float(wait), float(pick), float(after) if after else None
    except ValueError as error:
        raise _no_item(item, "WAIT:KIND:ROLE:PICK, for example 2.5:kill:replica:0.3") from error
    if kind not in KINDS or kind == "phase":
        raise _no_item(item, nearest(kind, KINDS, f"one of {', '.join(k for k in KINDS if k != 'phase')}", both=True))
    roles = KINDS[kind].roles
    lasting = "~SECONDS, ".join(name for name in KINDS if KINDS[name].lasts)
    if role not in roles:
        raise _no_item(item, nearest(role, roles, f"one of {', '.join(roles)}", both=True))
    if not (0.0 <= wait_s < 1e6 and 0.0 <= share < 1.0) or KINDS[kind].lasts != (continue_s is not None):
        raise _no_item(item, f"seconds of 0 or more, a pick from 0 to 0.999, and {lasting}~SECONDS alone")
    return _made(kind, wait_s, next(each for each in roles if each == role), share, continue_s)


def _read_fault(item: str, parts: Sequence[str]) -> Fault:
    remedy = "phase:NAME:SIGNAL:REPLICA:STEP, for example phase:backward:SIGKILL:r0.1:12"
    if len(parts) != 5 or parts[1].upper() not in Phase.__members__ or not parts[4].isdigit():
        raise _no_item(item, remedy)
    fields = {"replica": parts[3], "phase": parts[1], "action": parts[2], "step": int(parts[4])}
    try:
        return msgspec.convert(fields, Fault)
    except msgspec.ValidationError as error:
        raise _no_item(item, remedy) from error


def _no_item(item: str, remedy: str) -> ConfigError:
    return ConfigError(f"--schedule: {item!r} is no strike", remedy=remedy)
