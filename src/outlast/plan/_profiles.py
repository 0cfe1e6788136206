"""Fleets that were measured or published, as starting points, each with its citation. Data only.

Invariant: a rate in a profile is a published count or a fit whose source is named; what is assumed says so.
"""

from __future__ import annotations

from typing import Any

from outlast.errors import ConfigError, nearest

from ._fleet import Component, FleetLayout, classes_of, ladder_of, step_s_of

__all__ = ["PROFILES", "profile_data", "profile_note"]

_LLAMA_HOURS = 54 * 24 * 16_384
_LLAMA = "Llama 3 (arXiv 2407.21783), table 5: unexpected interruptions in 54 days on 16,384 GPUs"
# cause: (count, counted by, share whose machine needs repair, severity: 1 takes peers with it); the last two assumed
_LLAMA_CAUSES: dict[str, tuple[int, Any, float, int]] = {
    "faulty GPU": (148, "accelerator", 0.5, 0),
    "HBM3": (72, "memory", 0.5, 0),
    "software": (54, "node", 0.0, 0),
    "switch or cable": (35, "network", 0.3, 1),
    "host maintenance": (32, "node", 0.2, 0),
    "SRAM": (19, "accelerator", 0.3, 0),
    "GPU system processor": (17, "accelerator", 0.3, 0),
    "NIC": (7, "accelerator", 0.5, 0),
    "NCCL watchdog": (7, "accelerator", 0.0, 0),
    "silent data corruption": (6, "accelerator", 0.5, 0),
    "thermal": (6, "accelerator", 0.5, 0),
    "SSD": (3, "node", 1.0, 0),
    "power supply": (3, "node", 1.0, 1),
    "chassis": (2, "node", 1.0, 1),
    "IO board": (2, "node", 1.0, 0),
    "CPU": (2, "node", 1.0, 0),
    "DRAM": (2, "node", 1.0, 0),
    "dependency": (2, "node", 0.0, 0),
}


def _llama_components() -> tuple[Component, ...]:
    return tuple(
        Component(
            name=name,
            per=per,
            failures=num,
            hours=_LLAMA_HOURS / (8 if per == "node" else 1),
            repair=repair,
            severity=severity,
            source=f"{_LLAMA}: {num}",
        )
        for name, (num, per, repair, severity) in _LLAMA_CAUSES.items()
    )


def _nodes(name: str, per_1000_node_days: float, source: str, repair: float = 0.5) -> tuple[Component, ...]:
    return (Component(name=name, per="node", failures=per_1000_node_days, hours=24_000, repair=repair, source=source),)


def _research(per_1000_node_days: float) -> tuple[Component, ...]:
    return _nodes("node", per_1000_node_days, f"arXiv 2410.21680: {per_1000_node_days} failures per 1,000 node-days")


def _lanl(system: int, nodes: int, gap_h: float, shape: float) -> tuple[tuple[Component, ...], dict[str, Any]]:
    source = (
        f"LANL system {system} ({nodes} nodes; Schroeder & Gibson, DSN 2006): a failure each {gap_h} h, Weibull shape "
        f"{shape}; counted from the public log with `outlast plan fit`"
    )
    part = Component(name="node", per="node", failures=1.0, hours=gap_h * nodes, repair=1.0, shape=shape, source=source)
    return (part,), _OWN | {"accelerators": 8 * nodes, "spares": nodes // 20}


def _titan(batch: str, unit_years: float) -> tuple[tuple[Component, ...], dict[str, Any]]:
    source = f"Titan's GPUs, {batch} batch (Ostrouchov et al., SC20): a death each {unit_years} GPU-years; GPUs only"
    part = Component(name="GPU", per="accelerator", failures=1.0, hours=unit_years * 8766, repair=1.0, source=source)
    return (part,), _OWN | {"accelerators": 16_384, "accelerators_per_node": 1, "spares": 100}


_MEGASCALE = "MegaScale (arXiv 2402.15627, 6.2): over 100 restarts of a run of over 10,000 GPUs in several weeks"
_PHILLY = "Philly (Jeon et al., ATC 2019, table 7): failed trials, repeated ones too, in 75 days of 2,490 GPUs"
_PHILLY_HOURS = 75 * 24 * 2_490
# failure: (trials, counted by, share whose machine needs repair, severity); the last three assumed
_PHILLY_CAUSES: dict[str, tuple[int, Any, float, int]] = {
    "model checkpoint": (1_995, "accelerator", 0.0, 1),
    "MPI error": (634, "accelerator", 0.0, 0),
    "MPI runtime": (478, "accelerator", 0.0, 0),
    "preempted": (147, "accelerator", 0.0, 0),
    "GPU ECC error": (10, "accelerator", 0.5, 0),
}


def _philly_components() -> tuple[Component, ...]:
    return tuple(
        Component(
            name=name, per=per, failures=num, hours=_PHILLY_HOURS, repair=repair, severity=severity,
            source=f"{_PHILLY}: {num:,}",
        )
        for name, (num, per, repair, severity) in _PHILLY_CAUSES.items()
    )  # fmt: skip


def _megascale_components() -> tuple[Component, ...]:
    hours, source = 10_000 * 35 * 24.0, f"{_MEGASCALE}; five weeks are assumed"
    return (Component(name="restart", per="accelerator", failures=100, hours=hours, repair=0.5, source=source),)


_BLUE_WATERS = "Blue Waters (Di Martino et al., DSN 2014): 39 outages of the whole system in 261 days; nothing smaller"
_INFINITEHBD = "InfiniteHBD trace (stepfun-ai/InfiniteHBD-Trace): 400 servers, 348 days; `outlast plan fit` of it"
_OWN: dict[str, Any] = {"accelerators": 16_384, "days": 30.0, "parameters": 7e10, "spares": 100}
_FLEETS: dict[str, tuple[tuple[Component, ...], dict[str, Any]]] = {
    "llama3": (_llama_components(), _OWN | {"parameters": 4.05e11, "days": 54.0}),
    "rsc1": (_research(6.50), _OWN),
    "rsc2": (_research(2.34), _OWN),
    "lanl18": _lanl(18, 1024, 7.33, 0.817),
    "lanl19": _lanl(19, 1024, 7.72, 0.889),
    "lanl20": _lanl(20, 512, 13.17, 0.647),
    "titan-old": _titan("old", 15.1),
    "titan-new": _titan("new", 405.0),
    "bluewaters": (
        (Component(name="whole system", per="job", failures=39.0, hours=261 * 24.0, severity=1, source=_BLUE_WATERS),),
        _OWN | {"accelerators": 25_000, "accelerators_per_node": 1, "spares": 0},
    ),
    "megascale": (
        _megascale_components(),
        _OWN | {"accelerators": 12_288, "parameters": 1.75e11, "days": 35.0},
    ),
    "philly": (_philly_components(), _OWN | {"accelerators": 128, "parameters": 1e9, "days": 7.0, "spares": 0}),
    "infinitehbd": (
        _nodes("server fault", 24_000 / 5_720, _INFINITEHBD, repair=1.0),
        _OWN | {"accelerators": 3_200, "spares": 40, "burst_variance": 0.34, "burst_window_h": 168.0},
    ),
}


def _of_fleet(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """A job on a described fleet; `given` are the job's own parameters, accelerators and topology where it says."""
    components, own = _FLEETS[name]
    data = {"name": name, "topology": "fat-tree", **own, **given}
    layout = FleetLayout(
        parameters=data["parameters"],
        accelerators=data["accelerators"],
        topology=data["topology"],
        per_node=data.get("accelerators_per_node", 8),
    )
    if "accelerators" in given:
        data["spares"] = min(own["spares"], max(0, layout.num_nodes))
    return {
        **data,
        "classes": classes_of(components, layout),
        "tiers": ladder_of(layout),
        "step_s": step_s_of(layout),
    }


def _spot() -> dict[str, Any]:
    source = "Bamboo (NSDI'23) and Oobleck (SOSP'23) preemption traces: p3, 167 in 273 machine-hours, 5.8 at a time"
    preempted = {
        "name": "preemption", "node_mtbf_h": 9.4, "predicted": 1.0, "notice_s": 120.0, "repair": 1.0, "nodes": 6,
        "repair_median_h": 0.4, "repair_mean_h": 0.8, "source": source,
    }  # fmt: skip
    return {
        "name": "spot",
        "parameters": 1e9,
        "accelerators": 24,
        "accelerators_per_node": 1,
        "days": 3.0,
        "classes": [preempted],
        "tiers": [{"name": "store", "write_s": 20.0, "recovery_s": 180.0}],
        "min_share": 0.5,
        "planned_stop_s": 60.0,
    }


TARGET_NODE_HOURS = 1250 * 720
TARGET_CLASSES = (
    ("hardware", 35.2, "Llama 3's hardware causes (350 of 419) scale to 119: assumes 3.4 times better"),
    ("software", 16.3, "Llama 3's software, watchdog and dependency (63 of 419) scale to 21"),
    ("byzantine", 7.1, "Llama 3's 6 silent corruptions scale to 2.0: assumes 3.5 times worse"),
)  # fmt: skip


def _target() -> dict[str, Any]:
    classes = [
        {"name": name, "node_mtbf_h": TARGET_NODE_HOURS / num, "detection_s": 0.0, "source": source}
        for name, num, source in TARGET_CLASSES
    ]
    return {
        "name": "target",
        "parameters": 1.5e12,
        "accelerators": 10_000,
        "days": 30.0,
        "classes": classes,
        "tiers": [{"name": "store", "write_s": 360.0, "recovery_s": 2400.0}],
        "efficiency": 0.882,
        "interval": "fixed",
        "interval_s": 74 * 60.0,
        "planned_stop_s": 900.0,
    }


_SHAPES = ("parameters", "accelerators", "accelerators_per_node", "topology")


def profile_data(name: str, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """A profile as plain data, to be overridden key by key. What is `given` of the job's shape (parameters,
    accelerators, accelerators_per_node, topology) makes its classes and tiers where the profile describes a fleet;
    ConfigError where that makes no sense."""
    shape = {key: value for key, value in (given or {}).items() if key in _SHAPES}
    for key in shape.keys() - {"topology"}:
        if not isinstance(shape[key], int | float) or not 1 <= shape[key] <= 1e18:
            raise ConfigError(f"{key} = {shape[key]} is out of range", remedy=f"{key}: 1 or more")
    makers = {"spot": _spot, "target": _target}
    if name in makers:
        return makers[name]()
    if name not in _FLEETS:
        raise ConfigError(f"no profile {name!r}", remedy=nearest(name, [*_FLEETS, *makers]))
    return _of_fleet(name, shape)


PROFILES: dict[str, str] = {
    "llama3": f"{_LLAMA}; counts, not the paper's percentages, which do not fit them. Repair and ladder are assumed.",
    "rsc1": "Meta's RSC-1, arXiv 2410.21680: 6.50 failures per 1,000 node-days. Repair and ladder are assumed.",
    "rsc2": "Meta's RSC-2, arXiv 2410.21680: 2.34 failures per 1,000 node-days. Repair and ladder are assumed.",
    "lanl18": "LANL system 18: bursts and long repairs of 1,024 nodes over nine years. Ladder and repairs are assumed.",
    "lanl19": "LANL system 19: as 18, another machine of the same size. Ladder and repairs are assumed.",
    "lanl20": "LANL system 20: 512 nodes, the burstiest of the three. Ladder and repairs are assumed.",
    "titan-old": "Titan's first GPUs (SC20): lifetimes of devices only, 27 times shorter than the next batch's.",
    "titan-new": "Titan's second GPUs (SC20): lifetimes of devices only.",
    "bluewaters": "Blue Waters (DSN 2014): outages of the whole system only; nodes' own failures are not among them.",
    "megascale": f"{_MEGASCALE}. The weeks (five), repair and ladder are assumed.",
    "philly": f"{_PHILLY}. Users' own errors are left out; GPUs as in its trace's list of machines.",
    "infinitehbd": "InfiniteHBD trace (Apache-2.0): bursts and heavy-tailed repairs of 400 servers over 348 days.",
    "spot": "Bamboo (NSDI'23) and Oobleck (SOSP'23) preemption traces (MIT); notice and replacement are assumed.",
    "target": "The 1.5T target study: 10,000 GPUs for 30 days; class rates fitted to its published MTBF column.",
}


def profile_note(name: str) -> str:
    """Where a profile's numbers come from."""
    profile_data(name)
    return PROFILES[name]
