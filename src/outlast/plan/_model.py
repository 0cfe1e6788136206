"""The class model: a job on a fleet, its failure classes, its checkpoint ladder. One record for all four engines.

Read from TOML or built in code. Invariant: a `Job` that exists is sensible; nonsense is refused with the reason, the
valid range and the remedy, unknown keys with the nearest known one. It computes nothing but what follows directly.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from outlast.errors import ConfigError, nearest

__all__ = ["FailureClass", "Hardware", "Job", "Tier", "job_from_mapping", "load_job"]


def _check(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = (low < value if open_low else low <= value) and value <= high
    if not inside or math.isnan(value):
        left = "(" if open_low else "["
        valid = f"{left}{low:g}, {high:g}]"
        raise ConfigError(
            f"{name} = {value:g} is out of range", where=f"valid: {valid}", remedy=f"give a value in {valid}"
        )


_BIG = 1e15


class FailureClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of trouble. Shares are of its failures."""

    name: str
    node_mtbf_h: float
    """Mean hours between failures of this class on one node."""
    shape: float = 1.0
    """Weibull shape of the time between the fleet's failures of this class: below 1, bursts."""
    severity: int = 0
    """Nearest tier of the ladder that survives it (0 is the first)."""
    detection_s: float = 15.0
    """From the failure until it is noticed."""
    hangs: bool = False
    """It ends nothing and falls silent: noticed by the deadline that the run learns of its steps, not after
    `detection_s`."""
    coverage: float = 1.0
    """Share noticed that fast; the rest after `late_detection_s`."""
    late_detection_s: float = 600.0
    masked: float = 0.0
    """Share that redundancy or robust aggregation masks: a stall, no rollback."""
    predicted: float = 0.0
    """Share of the unmasked that are foretold `notice_s` ahead: a planned stop, no rollback."""
    precision: float = 1.0
    """Share of predictions that come true; the others stop the job in vain."""
    notice_s: float = 3600.0
    silent: bool = False
    """Corrupts instead of stopping; found by an audit, rolled back to before it."""
    slow_factor: float = 1.0
    """A straggler: speed of the whole job while it lasts; 1 means that the class stops the job instead."""
    slow_s: float = 0.0
    repair: float = 0.0
    """Share of failures after which the machines must be repaired."""
    repair_median_h: float = 20.0
    repair_mean_h: float = 40.0
    nodes: int = 1
    """Machines that one failure takes (a switch, a rack, a power feed)."""
    source: str = ""

    def __post_init__(self) -> None:
        where = f"class {self.name!r}: "
        _check(where + "node_mtbf_h", self.node_mtbf_h, 0, _BIG, open_low=True)
        _check(where + "shape", self.shape, 0.1, 20)
        _check(where + "severity", self.severity, 0, 4)
        for name in ("coverage", "masked", "predicted", "repair"):
            _check(where + name, getattr(self, name), 0, 1)
        _check(where + "precision", self.precision, 0, 1, open_low=True)
        _check(where + "slow_factor", self.slow_factor, 0, 1, open_low=True)
        for name in ("detection_s", "late_detection_s", "notice_s", "slow_s"):
            _check(where + name, getattr(self, name), 0, _BIG)
        _check(where + "nodes", self.nodes, 1, _BIG)
        _check(where + "repair_median_h", self.repair_median_h, 0, _BIG, open_low=True)
        if self.repair_mean_h < self.repair_median_h:
            raise ConfigError(
                f"{where}repair_mean_h = {self.repair_mean_h:g} is below the median {self.repair_median_h:g}",
                remedy="repair times are log-normal here: the mean is at least the median",
            )
        if self.silent and self.slow_factor < 1:
            raise ConfigError(f"{where}both silent and slow", remedy="make it two classes")


class Tier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rung of the checkpoint ladder, nearest first."""

    name: str
    write_s: float
    """Seconds that a write blocks training."""
    lag_s: float = 0.0
    """Seconds after the block until it is durable (asynchronous part)."""
    recovery_s: float = 600.0
    """From the notice until training goes on from this tier."""
    every: int = 1
    """Base intervals between writes; a multiple of the tier before."""

    def __post_init__(self) -> None:
        where = f"tier {self.name!r}: "
        for name in ("write_s", "lag_s", "recovery_s"):
            _check(where + name, getattr(self, name), 0, _BIG)
        _check(where + "every", self.every, 1, 1_000_000)


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a mixed fleet: its share of nodes, failure rate and speed relative to the first."""

    share: float
    rate: float = 1.0
    speed: float = 1.0

    def __post_init__(self) -> None:
        _check("hardware share", self.share, 0, 1, open_low=True)
        _check("hardware rate", self.rate, 0, 1000, open_low=True)
        _check("hardware speed", self.speed, 0, 1000, open_low=True)


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training job on a fleet, and what it does about failures."""

    classes: tuple[FailureClass, ...]
    name: str = "job"
    parameters: float = 1e9
    accelerators: int = 8
    accelerators_per_node: int = 8
    days: float = 30.0
    topology: str = "fat-tree"
    """fat-tree, rail, ring or tree; a profile makes its network's failures from it."""
    efficiency: float = 1.0
    """Share of peak-equivalent progress with no failures and no checkpoints."""
    step_s: float = 10.0
    tiers: tuple[Tier, ...] = (Tier(name="store", write_s=60.0),)
    interval: Literal["adaptive", "fixed", "young", "daly", "exact"] = "exact"
    interval_s: float = 1800.0
    """The base interval when `interval` is fixed."""
    checkpoint_min_s: float = 10.0
    """No adaptive interval is shorter; as in a run's settings."""
    endless: bool = False
    """`days` are a part of a longer training: an adaptive interval does not count on its end."""
    mask_stall_s: float = 1.0
    planned_stop_s: float = 120.0
    """A planned stop: last write, move, restart."""
    swap_s: float = 0.0
    """Extra seconds to bring a spare in after a machine is lost."""
    reshape_s: float = 60.0
    backoff_s: float = 0.0
    """Delay of a restart, doubled each time that the job goes back again within a minute, at most 60 s."""
    max_restarts: float = math.inf
    """Places that are filled again after a failure, over the whole job; those that fail later stay empty."""
    stall_floor_s: float = 0.5
    """No learned deadline is shorter; as in a run's settings."""
    outside_s: float = 1800.0
    """Silence that is waited for at most, as in a run's settings."""
    spares: int = 0
    auto_spares: bool = False
    """`spares` is where it begins: how many are held is the run's own policy's to say, as in a run with
    `spares = "auto"`."""
    crews: int = 0
    """Machines that can be repaired at once; 0: no limit."""
    min_share: float = 1.0
    """The job may go on with this share of its nodes when no spare is left; 1: it waits."""
    on_vacancy: Literal["auto", "shrink", "wait", "stop"] = "auto"
    """What it does then, as in a run's settings: `auto` is what is worth most."""
    vacancy_wait_s: float = math.inf
    """No wait for a machine is longer; then it goes on with fewer, or stops where they are too few."""
    price: float = 0.0
    """What a second costs, of what a second at full strength is worth."""
    on_alarm: Literal["act", "tell"] = "act"
    """Whether it acts on predictions that are worth it, as in a run's settings."""
    audit_rate: float = 0.0
    """Share of microbatches computed twice; 0: the audit policy decides if a class is silent."""
    burst_variance: float = 0.0
    """Variance of the fleet's rate from window to window (Gamma, mean 1); 0: steady."""
    burst_window_h: float = 168.0
    hardware: tuple[Hardware, ...] = (Hardware(share=1.0),)
    balanced: bool = False
    """Mixed hardware: shares of work follow speed; otherwise the slowest sets the pace."""
    microbatches: int = 0
    """What a step of all nodes is made of: shares are whole ones, as the run's policy gives them; 0: any there is."""
    prior_weight: float = 20.0
    """How many failures' worth the planned rates count in the controller's belief."""
    believed: float = 1.0
    """What a mistaken rate costs: the controller starts from this multiple of the true rates."""

    def __post_init__(self) -> None:
        self._ranges()
        if not self.classes:
            raise ConfigError("a job needs at least one failure class", remedy="add [[classes]], or name a profile")
        names = [c.name for c in self.classes]
        if len(set(names)) < len(names):
            raise ConfigError(f"two failure classes share a name: {sorted(names)}", remedy="name each once")
        for near, far in zip(self.tiers, self.tiers[1:], strict=False):
            if far.every % near.every:
                raise ConfigError(
                    f"tier {far.name!r}: every = {far.every} is no multiple of {near.every}", remedy="use multiples"
                )
        for item in self.classes:
            if item.severity >= len(self.tiers):
                raise ConfigError(
                    f"class {item.name!r} needs tier {item.severity}, the ladder has {len(self.tiers)}",
                    remedy="add a tier that survives it, or lower its severity",
                )
            if item.nodes > self.num_nodes:
                raise ConfigError(
                    f"class {item.name!r} takes {item.nodes} of {self.num_nodes} nodes", remedy="at most all"
                )
        if abs(sum(h.share for h in self.hardware) - 1) > 1e-6:
            raise ConfigError("hardware shares do not add up to 1", remedy="give each part's share of the nodes")

    def _ranges(self) -> None:
        _check("parameters", self.parameters, 1, 1e18)
        _check("accelerators", self.accelerators, 1, 1e8)
        _check("accelerators_per_node", self.accelerators_per_node, 1, 1024)
        _check("days", self.days, 0, 36500, open_low=True)
        for name in ("efficiency", "believed"):
            _check(name, getattr(self, name), 0, 1 if name == "efficiency" else 1e6, open_low=True)
        for name in ("step_s", "interval_s", "checkpoint_min_s", "burst_window_h", "prior_weight"):
            _check(name, getattr(self, name), 0, _BIG, open_low=True)
        _check("stall_floor_s", self.stall_floor_s, 0, _BIG, open_low=True)
        _check("outside_s", self.outside_s, 0, _BIG, open_low=True)
        for name in ("mask_stall_s", "planned_stop_s", "swap_s", "reshape_s", "burst_variance", "backoff_s"):
            _check(name, getattr(self, name), 0, _BIG)
        _check("min_share", self.min_share, 0, 1, open_low=True)
        for name in ("vacancy_wait_s", "max_restarts"):
            _check(name, getattr(self, name), 0, math.inf)
        _check("price", self.price, 0, _BIG)
        _check("audit_rate", self.audit_rate, 0, 1)
        _check("microbatches", self.microbatches, 0, _BIG)
        _check("crews", self.crews, 0, _BIG)
        if not 1 <= len(self.tiers) <= 5 or self.tiers[0].every != 1:
            raise ConfigError("a ladder has 1 to 5 tiers, the first with every = 1", remedy="list tiers nearest first")
        if not 0 <= self.spares <= self.num_nodes:
            raise ConfigError(
                f"spares = {self.spares} for {self.num_nodes} nodes",
                where=f"valid: [0, {self.num_nodes}]",
                remedy="at most one spare per node of the job",
            )

    @property
    def num_nodes(self) -> int:
        return -(-self.accelerators // self.accelerators_per_node)

    @property
    def rate_multiplier(self) -> float:
        """Mean failure rate of the hardware mix, relative to the first part."""
        return sum(h.share * h.rate for h in self.hardware)

    def fleet_rate_h(self, item: FailureClass) -> float:
        """Failures of a class per hour on the whole job."""
        return self.num_nodes * self.rate_multiplier / item.node_mtbf_h


_KINDS: dict[str, type[msgspec.Struct]] = {"classes": FailureClass, "tiers": Tier, "hardware": Hardware}


def _known_keys(data: dict[str, Any], kind: type[msgspec.Struct], where: str) -> None:
    fields = kind.__struct_fields__
    for key, value in data.items():
        if key not in fields:
            remedy = nearest(key, fields, f"known keys: {', '.join(fields)}")
            raise ConfigError(f"unknown key {key!r}", where=where, remedy=remedy)
        if key in _KINDS and kind is Job and isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, dict):
                    _known_keys(item, _KINDS[key], f"{where}: {key}[{i}]")


def job_from_mapping(data: dict[str, Any], where: str = "job") -> Job:
    """A Job from plain data (TOML, JSON). Wrong types, ranges and keys raise ConfigError."""
    _known_keys(data, Job, where)
    try:
        return msgspec.convert(data, Job, strict=True)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise cause from None
        raise ConfigError(str(error), where=where, remedy="see reference/plan for the keys and their types") from None


def load_job(path: str, overrides: dict[str, Any] | None = None) -> Job:
    """A Job from a TOML file; `profile = "name"` starts from that profile, other keys override it, `overrides` all."""
    import tomllib

    from ._profiles import profile_data

    try:
        with open(path, "rb") as file:
            data = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"no such file: {path}", remedy="give the path of a job's TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not TOML: {error}", where=path, remedy="mend the line named") from None
    data |= overrides or {}
    base = profile_data(data.pop("profile"), data) if "profile" in data else {}
    return job_from_mapping({"name": path, **base, **data}, path)
