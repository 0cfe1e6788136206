"""Which fleet, and when it is struck by what: drawn from a seed and a number. Pure.

Moments are seconds from one strike to the next, whatever the run does meanwhile: nothing here knows a phase.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec

__all__ = [
    "EVERY",
    "MICROBATCHES",
    "MOST_COORDINATORS",
    "ROLES",
    "ROWS",
    "STEPS",
    "Role",
    "Setting",
    "Strike",
    "StruckFleet",
    "fleet_of",
]

STEPS, MICROBATCHES, EVERY, ROWS = 400, 8, 25, 4

Role = Literal["replica", "spare", "rank", "agent", "coordinator", "nursery", "disk", "clock", "host"]
"""`rank`: one of a replica of several that is not its lead; `replica` and `spare` are the leads."""
ROLES: tuple[Role, ...] = ("replica", "spare", "agent", "coordinator", "nursery")
"""Those that are processes of any run."""

_SIGNALS = {"SIGKILL": 7, "SIGSEGV": 4, "SIGTERM": 3, "SIGSTOP": 3, "SIGSTOP, SIGCONT": 4}
_TARGETS: dict[Role, int] = {"replica": 9, "spare": 3, "agent": 2, "coordinator": 4, "nursery": 3}
MOST_COORDINATORS = 6
"""In a minute: beyond a few the launcher gives up, as it should."""
_RULES = ("median", "trimmed_mean", "krum_all_honest", "geometric_median")


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What decides about the bits of a run: two fleets that share it must end alike."""

    dtype: str
    aggregation: str = "mean"
    audit: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.dtype}-{self.aggregation}" + (f"-audit-{self.audit:g}" if self.audit else "")


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """`wait_s` after the strike before (or the start), `signal` for one of `roles`: the first that lives, the `pick`-th
    part of its processes. `continue_s`: SIGCONT after so long; None: never by us."""

    wait_s: float
    signal: str
    roles: tuple[Role, ...]
    pick: float
    continue_s: float | None = None
    named: str = ""  # as a schedule has it

    @property
    def kind(self) -> str:
        return self.signal if self.continue_s is None or self.signal == "SLOW" else f"{self.signal}, SIGCONT"


class StruckFleet(msgspec.Struct, frozen=True, kw_only=True):
    """One fleet and all that may strike it; what is left when it ends is not used."""

    number: int
    seed: int
    setting: Setting
    replicas: int
    spares: int
    agents: int
    exchange: str
    keeps: bool  # checkpoints
    stranger: bool  # speaks to all of its sockets meanwhile
    strikes: tuple[Strike, ...]
    from_training: bool = False  # the first waits from when all replicas train, and not from the first process on

    def __str__(self) -> str:
        size = f"{self.replicas}{f'+{self.spares}' if self.spares else ''} replicas, {self.agents} agents"
        more = [
            self.exchange,
            self.setting.dtype,
            *([self.setting.aggregation] if self.setting.aggregation != "mean" else []),
        ]
        more += [f"audit {self.setting.audit:g}"] * bool(self.setting.audit) + ["checkpoints"] * self.keeps
        more += ["a stranger"] * self.stranger
        return ", ".join([size, *more])


def fleet_of(number: int, seed: int) -> StruckFleet:
    """The fleet of this number under this seed."""
    rng = random.Random(f"{seed}/{number}")
    special = rng.choice(("", "", "audit", "rule"))
    replicas = rng.choice((1, 2, 2, 3, 3, 4))
    setting = Setting(
        dtype=rng.choice(("float32", "bfloat16")),
        aggregation=rng.choice(_RULES) if special == "rule" else "mean",
        audit=0.2 if special == "audit" and replicas > 1 else 0.0,
    )
    spares = rng.randint(0, 1)
    # Who is alone and keeps nothing is lost with the first strike that hits: that is seldom worth a fleet.
    keeps = rng.random() < (0.9 if replicas + spares == 1 else 0.5)
    return StruckFleet(
        number=number,
        seed=seed,
        setting=setting,
        replicas=replicas,
        spares=spares,
        agents=rng.randint(1, 2),
        exchange=rng.choice(("shm", "shm", "c10d")),
        keeps=keeps,
        strikes=_strikes(rng, keeps),
        stranger=True,
    )


def _strikes(rng: random.Random, keeps: bool) -> tuple[Strike, ...]:
    """5 to 17, at exponential distances, some of them close together."""
    mean_s = rng.choice((1.0, 2.0, 3.0))
    targets = dict(_TARGETS) if keeps else _TARGETS | {"agent": 1}
    found: list[Strike] = []
    for _ in range(rng.randint(5, 17)):
        if sum(strike.roles[0] == "coordinator" for strike in found) == MOST_COORDINATORS:
            targets["coordinator"] = 0
        first = rng.choices(list(targets), list(targets.values()))[0]
        others = [role for role in ROLES if role != first]
        rng.shuffle(others)
        kind = rng.choices(list(_SIGNALS), list(_SIGNALS.values()))[0]
        close = rng.random() < 0.2
        found.append(
            Strike(
                wait_s=rng.uniform(0.0, 0.2) if close else rng.expovariate(1 / mean_s),
                signal=kind.split(",")[0],
                roles=(first, *others),
                pick=rng.random(),
                continue_s=min(rng.expovariate(1 / 1.5), 8.0) if kind.endswith("CONT") else None,
            )
        )
    return tuple(found)
