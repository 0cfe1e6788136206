"""How a log's columns are read: a small TOML, or a preset for a known format.

Invariant: a mapping that exists names a column for time and machine; unknown keys are refused with the nearest one.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from outlast.errors import ConfigError, nearest

__all__ = ["PRESETS", "Mapping", "load_mapping", "preset"]

_UNITS = {"s": 1 / 3600, "ms": 1 / 3.6e6, "min": 1 / 60, "h": 1.0, "d": 24.0}


class Mapping(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Columns of a CSV or keys of a JSONL (dots reach inside).

    Either `event` with the values that mean down and up, or `end` (both in one row), or neither: each row is a hit.
    """

    format: Literal["csv", "jsonl", "k8s", "xid", "philly", "journal"] = "csv"
    columns: tuple[str, ...] = ()
    """Names of the columns where the file has no header."""
    time: str = "time"
    unit: str = "h"
    """s, ms, min, h, d, iso, or the form of a date as in `%m/%d/%Y %H:%M`."""
    node: str = "node"
    event: str = ""
    down: tuple[str, ...] = ("down",)
    up: tuple[str, ...] = ("up",)
    end: str = ""
    kind: tuple[str, ...] = ()
    """Columns that together name the failure class."""
    only: dict[str, tuple[str, ...]] = {}
    """Keep rows whose column has one of these values (or begins with that word); the others are counted as skipped."""
    delimiter: str = ","
    nodes: int = 0
    """Machines watched; 0: those that appear."""
    joining: bool = False
    """An up of a machine not seen before means that it joins: it is watched only while it is there (spot fleets)."""
    hours: float = 0.0
    """Length watched; 0: until the last row."""
    description: str = ""

    def __post_init__(self) -> None:
        if not self.time or not self.node:
            raise ConfigError(
                "a mapping needs the columns of time and node", remedy='give time = "..." and node = "..."'
            )
        if self.unit not in _UNITS and self.unit != "iso" and "%" not in self.unit:
            raise ConfigError(
                f"no unit {self.unit!r}", remedy=f"{', '.join(_UNITS)}, iso, or the form of a date: %m/%d/%Y %H:%M"
            )
        if self.nodes < 0 or self.hours < 0:
            raise ConfigError("nodes and hours must not be negative", remedy="0 means: as the log shows")

    @property
    def hours_per_unit(self) -> float:
        return _UNITS.get(self.unit, 1.0)


PRESETS: dict[str, Mapping] = {
    "infinitehbd": Mapping(
        time="time_h", node="node", event="event", kind=("level", "class"), nodes=400, hours=348 * 24.0,
        description="InfiniteHBD fault trace as CSV: time_h, node, event down/up, level, class, desc",
    ),
    "bamboo": Mapping(
        time="time_ms", unit="ms", node="node", event="event", down=("remove",), up=("add",), joining=True,
        description="Bamboo and Oobleck preemption traces: trace, time_ms, event add/remove, node",
    ),
    "slurm": Mapping(
        time="End", unit="iso", node="NodeList", only={"State": ("NODE_FAIL", "FAILED", "BOOT_FAIL")}, kind=("State",),
        delimiter="|", description="Slurm: sacct --parsable2 --format=JobID,State,End,NodeList (header included)",
    ),
    "lanl": Mapping(
        time="Prob Started", unit="%m/%d/%Y %H:%M", end="Prob Fixed", node="nodenumz",
        kind=("Facilities", "Hardware", "Human Error", "Network", "Undetermined", "Software"),
        description="LANL's failures of 1996 to 2005 (LA-UR-05-7318); choose a system with --only System=20",
    ),
    "titan": Mapping(
        time="remove", unit="iso", node="location", kind=("event",), only={"event": ("DBE", "OTB")}, nodes=18_688,
        description="Titan's GPUs (olcf/TitanGPULife, gc_full.csv): double-bit errors and GPUs off the bus, by place",
    ),
    "pai": Mapping(
        columns=(
            "job_name", "task_name", "inst_name", "worker_name", "inst_id", "status", "start_time", "end_time",
            "machine",
        ),
        time="end_time", unit="s", node="machine", kind=("task_name",), only={"status": ("Failed",)},
        description="Alibaba PAI 2020 (clusterdata, pai_instance_table.csv): instances that failed, whatever the cause",
    ),
    "philly": Mapping(
        format="philly", time="end_time", unit="iso", node="ip", nodes=552,
        description="Microsoft Philly (philly-traces, cluster_job_log): attempts that failed, whatever the cause",
    ),
    "k8s": Mapping(
        format="k8s", time="lastTimestamp", unit="iso", node="involvedObject.name",
        description="Kubernetes: kubectl get events -A -o json; NodeNotReady to NodeReady, and failures of pods",
    ),
    "xid": Mapping(
        format="xid", time="time", unit="s", node="host",
        description="NVIDIA XID lines of kernel logs: journalctl -k -o short-iso, or dmesg -T / raw seconds",
    ),
    "journal": Mapping(
        format="journal", time="time_s", unit="s", node="host",
        description="outlast's own journal: a run's directory or its SQLite file",
    ),
}  # fmt: skip


def preset(name: str) -> Mapping:
    """A preset by name; an unknown one is refused with the nearest."""
    if name in PRESETS:
        return PRESETS[name]
    raise ConfigError(f"no trace preset {name!r}", remedy=nearest(name, PRESETS))


def load_mapping(path: str) -> Mapping:
    """A mapping from TOML; `preset = "name"` starts from that preset."""
    import tomllib

    try:
        with open(path, "rb") as file:
            data: dict[str, Any] = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"no such file: {path}", remedy="give the path of a mapping TOML") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not TOML: {error}", where=path, remedy="mend the line named") from None
    base = msgspec.to_builtins(preset(data.pop("preset"))) if "preset" in data else {}
    for key in data:
        if key not in Mapping.__struct_fields__:
            known = Mapping.__struct_fields__
            remedy = nearest(key, known, f"known keys: {', '.join(known)}")
            raise ConfigError(f"unknown key {key!r}", where=path, remedy=remedy)
    try:
        return msgspec.convert({**base, **data}, Mapping)
    except msgspec.ValidationError as error:
        raise ConfigError(
            str(error), where=path, remedy="see how-to/plan-traces for the keys and their types"
        ) from None
