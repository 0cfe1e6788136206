"""Fleets that were measured or published, as starting points, each with its citation. Data only.

Invariant: a rate in a profile is a published count or a fit whose source is named; what is assumed says so.
"""

from __future__ import annotations

from typing import Any

from outlast.errors import ConfigError, nearest

__all__ = ["PROFILES", "profile_data", "profile_note"]

_LLAMA_NODE_HOURS = 54 * 24 * 2048
_LLAMA = "Llama 3 (arXiv 2407.21783), table 5: unexpected interruptions in 54 days on 16,384 GPUs"
# cause: (count, share whose machine needs repair, severity: 1 takes peers with it); the last two are assumed
_LLAMA_CAUSES = {
    "faulty GPU": (148, 0.5, 0),
    "HBM3": (72, 0.5, 0),
    "software": (54, 0.0, 0),
    "switch or cable": (35, 0.3, 1),
    "host maintenance": (32, 0.2, 0),
    "SRAM": (19, 0.3, 0),
    "GPU system processor": (17, 0.3, 0),
    "NIC": (7, 0.5, 0),
    "NCCL watchdog": (7, 0.0, 0),
    "silent data corruption": (6, 0.5, 0),
    "thermal": (6, 0.5, 0),
    "SSD": (3, 1.0, 0),
    "power supply": (3, 1.0, 1),
    "chassis": (2, 1.0, 1),
    "IO board": (2, 1.0, 0),
    "CPU": (2, 1.0, 0),
    "DRAM": (2, 1.0, 0),
    "dependency": (2, 0.0, 0),
}
# Assumed: a snapshot in peers' memory that survives the loss of one node, and a store that survives everything.
_LADDER = [
    {"name": "peers", "write_s": 2.0, "lag_s": 20.0, "recovery_s": 300.0},
    {"name": "store", "write_s": 30.0, "recovery_s": 600.0, "every": 8},
]


def _llama3() -> dict[str, Any]:
    classes = [
        {"name": name, "node_mtbf_h": _LLAMA_NODE_HOURS / num, "repair": repair, "severity": severity,
         "repair_median_h": 20.4, "repair_mean_h": 132.8, "source": f"{_LLAMA}: {num}"}
        for name, (num, repair, severity) in _LLAMA_CAUSES.items()
    ]  # fmt: skip
    return {
        "name": "llama3", "parameters": 4.05e11, "accelerators": 16_384, "days": 54.0, "classes": classes,
        "tiers": _LADDER, "spares": 100,
    }  # fmt: skip


def _research(name: str, per_1000_node_days: float) -> dict[str, Any]:
    source = f"arXiv 2410.21680: {per_1000_node_days} failures per 1,000 node-days"
    node = {
        "name": "node", "node_mtbf_h": 24_000 / per_1000_node_days, "repair": 0.5, "repair_median_h": 20.4,
        "repair_mean_h": 132.8, "source": source,
    }  # fmt: skip
    return {
        "name": name, "parameters": 7e10, "accelerators": 16_384, "days": 30.0, "classes": [node], "tiers": _LADDER,
        "spares": 100,
    }  # fmt: skip


def _infinitehbd() -> dict[str, Any]:
    source = "InfiniteHBD trace (stepfun-ai/InfiniteHBD-Trace): 400 servers, 348 days; `outlast plan fit` of it"
    repair = {"repair": 1.0, "repair_median_h": 20.4, "repair_mean_h": 132.8, "source": source}
    return {
        "name": "infinitehbd", "parameters": 7e10, "accelerators": 3_200, "days": 30.0, "tiers": _LADDER, "spares": 40,
        "classes": [{"name": "server fault", "node_mtbf_h": 5_720.0, **repair}],
        "burst_variance": 0.34, "burst_window_h": 168.0,
    }  # fmt: skip


def _spot() -> dict[str, Any]:
    source = "Bamboo (NSDI'23) and Oobleck (SOSP'23) preemption traces: p3, 167 in 273 machine-hours, 5.8 at a time"
    preempted = {
        "name": "preemption", "node_mtbf_h": 9.4, "predicted": 1.0, "notice_s": 120.0, "repair": 1.0, "nodes": 6,
        "repair_median_h": 0.4, "repair_mean_h": 0.8, "source": source,
    }  # fmt: skip
    return {
        "name": "spot", "parameters": 1e9, "accelerators": 24, "accelerators_per_node": 1, "days": 3.0,
        "classes": [preempted], "tiers": [{"name": "store", "write_s": 20.0, "recovery_s": 180.0}],
        "min_share": 0.5, "planned_stop_s": 60.0,
    }  # fmt: skip


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
        "name": "target", "parameters": 1.5e12, "accelerators": 10_000, "days": 30.0, "classes": classes,
        "tiers": [{"name": "store", "write_s": 360.0, "recovery_s": 2400.0}], "efficiency": 0.882,
        "interval": "fixed", "interval_s": 74 * 60.0, "planned_stop_s": 900.0,
    }  # fmt: skip


def profile_data(name: str) -> dict[str, Any]:
    """A profile as plain data, to be overridden key by key."""
    makers = {
        "llama3": _llama3,
        "rsc1": lambda: _research("rsc1", 6.50),
        "rsc2": lambda: _research("rsc2", 2.34),
        "infinitehbd": _infinitehbd,
        "spot": _spot,
        "target": _target,
    }
    if name not in makers:
        raise ConfigError(f"no profile {name!r}", remedy=nearest(name, makers))
    return makers[name]()


PROFILES: dict[str, str] = {
    "llama3": f"{_LLAMA}; counts, not the paper's percentages, which do not fit them. Repair and ladder are assumed.",
    "rsc1": "Meta's RSC-1, arXiv 2410.21680: 6.50 failures per 1,000 node-days. Repair and ladder are assumed.",
    "rsc2": "Meta's RSC-2, arXiv 2410.21680: 2.34 failures per 1,000 node-days. Repair and ladder are assumed.",
    "infinitehbd": "InfiniteHBD trace (Apache-2.0): bursts and heavy-tailed repairs of 400 servers over 348 days.",
    "spot": "Bamboo (NSDI'23) and Oobleck (SOSP'23) preemption traces (MIT); notice and replacement are assumed.",
    "target": "The 1.5T target study: 10,000 GPUs for 30 days; class rates fitted to its published MTBF column.",
}


def profile_note(name: str) -> str:
    """Where a profile's numbers come from."""
    profile_data(name)
    return PROFILES[name]
