"""One description of a fleet, from which every plan command makes its job: component rates x counts x topology.

Role: the only place where parameters, accelerators and topology become failure classes and checkpoint tiers, so that
one job has one MTBF and one ETTR whichever command is asked. Invariant: on the same devices a larger model never fails
less: its size acts through the memory that it occupies, the devices that it needs, the bytes that its state writes and
the length of its steps, and through nothing that no source gives. What is assumed says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from outlast.core.reliability import Topology, topology_reliability
from outlast.errors import ConfigError, nearest

__all__ = ["TOPOLOGIES", "Component", "FleetLayout", "classes_of", "ladder_of", "step_s_of"]

TOPOLOGIES: tuple[str, ...] = get_args(Topology)

_STATE_BYTES = 16.0  # a parameter: ZeRO (Rajbhandari et al. 2020, section 3.1), mixed-precision Adam
_MEMORY_BYTES = 80e9
_STATE_ROOM = 60e9  # of a device's memory; the rest is activations and buffers
_TOKENS = 16e6 / 16_384  # a step and device: Llama 3 405B, kept as the job grows (weak scaling)
_FLOPS = 400e12  # a device: Llama 3 405B, 380 to 430
_STORE_NODE, _STORE_CAP = 2e9, 2e12  # bytes/s: 16 Gb/s a node (assumed); Llama 3's Tectonic, 2 TB/s sustained
_PEER_BLOCK_S, _PEER_LAG_S = 2.0, 20.0  # assumed, for Llama 3's bytes a device
_LLAMA_SHARE = 4.05e11 * _STATE_BYTES / 16_384
_RESTART_S = {"peers": 300.0, "store": 600.0}  # assumed: reschedule, load and warm up
_SWITCH_H = 1e-6  # failures an hour of one switch: order of a vendor's MTBF, assumed
_MENDED_H = 20.4  # a broken link stays so for this long (InfiniteHBD's median repair): a second may break meanwhile


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """A cause of failures: `failures` of it in `hours` unit-hours, one unit for each `per`.

    per: what it is counted by. "memory" are accelerators by the share of their memory in use; "network" is one link an
    accelerator, with what the topology makes of it; "job" is what strikes all at once. repair, severity, shape: as in
    a failure class.
    """

    name: str
    per: Literal["accelerator", "memory", "network", "node", "job"]
    failures: float
    hours: float
    repair: float = 0.0
    severity: int = 0
    shape: float = 1.0
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetLayout:
    """What is run on what. Refused where the topology is none."""

    parameters: float
    accelerators: int
    per_node: int = 8
    topology: str = "fat-tree"

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise ConfigError(f"no topology {self.topology!r}", remedy=nearest(self.topology, TOPOLOGIES))

    @property
    def num_nodes(self) -> int:
        return -(-self.accelerators // self.per_node)

    @property
    def memory_share(self) -> float:
        """The share of a device's memory that is in use: the state on as few devices as hold it, and room for
        activations."""
        state = self.parameters * _STATE_BYTES
        held = state / math.ceil(max(1.0, state / _STATE_ROOM))
        full = held if state <= _STATE_ROOM else _STATE_ROOM
        return (full + _MEMORY_BYTES - _STATE_ROOM) / _MEMORY_BYTES


def _network_h(links: int, nodes: int, topology: str, link_h: float) -> float:
    """Times an hour that the network no longer joins all, each link failing `link_h` times an hour."""
    p_link, p_switch = math.exp(-link_h * _MENDED_H), math.exp(-_SWITCH_H * _MENDED_H)
    joined = topology_reliability(topology, nodes if topology == "rail" else links, p_link, p_switch)  # type: ignore[arg-type]
    return -math.log(max(joined.value, 1e-300)) / _MENDED_H


def _link_h(component: Component) -> float:
    """A link's failures an hour: the counted ones, less those that a fat tree's leaf switches have."""
    return component.failures / component.hours - _SWITCH_H / 32


def _rate_h(component: Component, layout: FleetLayout) -> float:
    """Failures an hour of one cause on the whole job."""
    each = component.failures / component.hours
    match component.per:
        case "job":
            return each
        case "node":
            return each * layout.num_nodes
        case "accelerator":
            return each * layout.accelerators
        case "memory":
            return each * layout.accelerators * layout.memory_share
        case "network":
            return _network_h(layout.accelerators, layout.num_nodes, layout.topology, _link_h(component))


def classes_of(components: Sequence[Component], layout: FleetLayout) -> list[dict[str, Any]]:
    """A job's failure classes; a cause that this topology has none of is left out."""
    found = []
    for part in components:
        rate_h = _rate_h(part, layout)
        if rate_h > 1e-14:
            found.append(
                {
                    "name": part.name,
                    "node_mtbf_h": layout.num_nodes / rate_h,
                    "repair": part.repair,
                    "severity": part.severity,
                    "shape": part.shape,
                    "repair_median_h": 20.4,
                    "repair_mean_h": 132.8,
                    "source": part.source,
                }
            )
    return found


def ladder_of(layout: FleetLayout) -> list[dict[str, Any]]:
    """Two tiers: a snapshot in peers' memory that survives one node, and a store that survives everything."""
    state = layout.parameters * _STATE_BYTES
    share = state / layout.accelerators / _LLAMA_SHARE
    stored_s = state / min(_STORE_NODE * layout.num_nodes, _STORE_CAP)
    return [
        {
            "name": "peers",
            "write_s": _PEER_BLOCK_S * share,
            "lag_s": _PEER_LAG_S * share,
            "recovery_s": _RESTART_S["peers"] + _PEER_LAG_S * share,
        },
        {"name": "store", "write_s": stored_s, "recovery_s": _RESTART_S["store"] + stored_s, "every": 8},
    ]


def step_s_of(layout: FleetLayout) -> float:
    """Seconds a step: six operations a parameter and token."""
    return max(1e-3, 6 * layout.parameters * _TOKENS / _FLOPS)
