"""R = R_compute x R_communication x R_synchronisation of one checkpoint segment, from N, M, topology and frequency.

N parameters act through bytes resident x memory error rate, through collective time and bytes x link hazard, and
through state size x checkpoint cost; M nodes through their own failures, links and barriers. Invariant: each factor
falls (weakly) when N, M or the steps between checkpoints grow; tests hold the table to it. Constants carry their
source.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np

from ._check import count, positive
from ._intervals import ettr
from ._topology import Topology, topology_reliability

__all__ = ["Constants", "SystemReliability", "constant_sources", "system_reliability", "system_table"]

_LLAMA_GPU_HOURS = 54 * 24 * 16_384
_LLAMA = "Llama 3 (arXiv 2407.21783, table 5): 54 days, 16,384 GPUs"


def _sourced(source: str) -> dict[str, str]:
    return {"source": source}


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Sourced constants; hazards are per hour. `constant_sources()` lists where each comes from."""

    gpus_per_node: int = 8
    node_hazard: float = 8 * (148 + 19 + 17 + 7 + 6 + 3 + 3 + 2 * 4 + 32) / _LLAMA_GPU_HOURS
    memory_hazard_per_byte: float = 72 / _LLAMA_GPU_HOURS / 80e9
    link_hazard: float = 35 / _LLAMA_GPU_HOURS
    link_hazard_per_byte: float = 1e-19
    switch_hazard: float = 1e-6
    hang_hazard_per_rank: float = 7 / _LLAMA_GPU_HOURS
    state_bytes_per_parameter: float = 16.0
    gradient_bytes_per_parameter: float = 2.0
    tokens_per_gpu: float = 16e6 / 16_384
    flops_per_gpu: float = 400e12
    link_bytes_per_s: float = 50e9
    store_bytes_per_s_per_node: float = 2e9
    store_bytes_per_s_cap: float = 2e12
    restart_s: float = 600.0


_SOURCES = {
    "gpus_per_node": "DGX/HGX H100 node",
    "node_hazard": f"{_LLAMA}: causes inside a node but memory (GPU, SRAM, processor, NIC, SDC, thermal, SSD, power, "
    "the rest, host maintenance)",
    "memory_hazard_per_byte": f"{_LLAMA}: 72 HBM3 errors over 80 GB each; errors taken proportional to bytes resident",
    "link_hazard": f"{_LLAMA}: 35 switch or cable, one link a GPU",
    "link_hazard_per_byte": "an uncorrected frame per 1e19 bytes: IEEE 802.3ck post-FEC frame loss 6e-11, with retry "
    "squared; an assumption, below the per-hour hazard in effect",
    "switch_hazard": "vendor MTBF of 1e6 h, order of magnitude; an assumption",
    "hang_hazard_per_rank": f"{_LLAMA}: 7 NCCL watchdog timeouts, charged to collectives and checkpoint barriers",
    "state_bytes_per_parameter": "ZeRO (Rajbhandari et al. 2020, section 3.1): 16 bytes with mixed-precision Adam",
    "gradient_bytes_per_parameter": "bf16 gradients",
    "tokens_per_gpu": "Llama 3 405B: 16M tokens a step over 16,384 GPUs, kept per GPU as the job grows (weak scaling)",
    "flops_per_gpu": "Llama 3 405B: 380-430 TFLOPs a GPU",
    "link_bytes_per_s": "400 Gb/s NIC a GPU",
    "store_bytes_per_s_per_node": "an assumption: 16 Gb/s of the front-end network to storage",
    "store_bytes_per_s_cap": "Llama 3: Tectonic, 2 TB/s sustained",
    "restart_s": "an assumption: ten minutes to reschedule, load and warm up",
}


def constant_sources() -> dict[str, tuple[float, str]]:
    """Each constant's value and where it comes from, or that it is an assumption."""
    defaults = Constants()
    return {field.name: (float(getattr(defaults, field.name)), _SOURCES[field.name]) for field in fields(Constants)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemReliability:
    """One row: probabilities that a segment (interval + write) passes, the interruption clock, and ETTR."""

    parameters: float
    num_nodes: int
    topology: Topology
    steps_per_checkpoint: int
    r_compute: float
    r_communication: float
    r_synchronisation: float
    communication_exact: bool
    step_s: float
    collective_s: float
    write_s: float
    mtbi_h: float
    ettr: float

    @property
    def r(self) -> float:
        """The product of the three."""
        return self.r_compute * self.r_communication * self.r_synchronisation


def _layout(parameters: float, gpus: int, c: Constants) -> tuple[float, float]:
    """(GPUs over which one replica's state is cut so that 60 GB fit each, replicas)."""
    shards = max(1.0, parameters * c.state_bytes_per_parameter / 60e9)
    return shards, max(1.0, gpus / shards)


def _step(parameters: float, num_nodes: int, c: Constants) -> tuple[float, float, float]:
    """(step seconds, collective seconds, bytes a link carries a step): 6 N D flops; a ring all-reduce of the shard."""
    gpus = num_nodes * c.gpus_per_node
    compute_s = 6 * parameters * c.tokens_per_gpu / c.flops_per_gpu
    shards, replicas = _layout(parameters, gpus, c)
    link_bytes = 2 * (1 - 1 / replicas) * parameters * c.gradient_bytes_per_parameter / min(shards, gpus)
    collective_s = link_bytes / c.link_bytes_per_s
    return compute_s + collective_s, collective_s, link_bytes


def _link_hazard(parameters: float, num_nodes: int, c: Constants) -> float:
    step_s, _, link_bytes = _step(parameters, num_nodes, c)
    return c.link_hazard + c.link_hazard_per_byte * link_bytes * 3600 / step_s


def system_reliability(
    parameters: float, num_nodes: int, topology: Topology, steps_per_checkpoint: int, constants: Constants | None = None
) -> SystemReliability:
    """R of one segment and what follows from it: MTBI (the segment's length over -ln R) and the exact ETTR."""
    c = constants or Constants()
    n, m = float(positive("parameters", parameters)), count("num_nodes", num_nodes, 1)
    step_s, collective_s, _ = _step(n, m, c)
    interval_s = step_s * count("steps_per_checkpoint", steps_per_checkpoint, 1)
    state = n * c.state_bytes_per_parameter
    # every replica holds the weights in bf16; the rest of the state is sharded over all (HSDP)
    resident = 2 * n * _layout(n, m * c.gpus_per_node, c)[1] + (c.state_bytes_per_parameter - 2) * n
    write_s = state / min(c.store_bytes_per_s_per_node * m, c.store_bytes_per_s_cap)
    hours = (interval_s + write_s) / 3600
    r_compute = float(np.exp(-(m * c.node_hazard + resident * c.memory_hazard_per_byte) * hours))
    p_link, p_switch = float(np.exp(-_link_hazard(n, m, c) * hours)), float(np.exp(-c.switch_hazard * hours))
    if topology == "rail":  # a rail carries the accelerators' links: m nodes on each of gpus_per_node rails
        network = topology_reliability(topology, m, p_link, p_switch)
    else:
        network = topology_reliability(topology, m * c.gpus_per_node, p_link, p_switch)
    waiting = interval_s * collective_s / step_s + write_s
    r_sync = float(np.exp(-c.hang_hazard_per_rank * m * c.gpus_per_node * waiting / 3600))
    total = max(r_compute * network.value * r_sync, 1e-300)
    mtbi_s = (interval_s + write_s) / max(-np.log(total), 1e-300)
    return SystemReliability(
        parameters=n,
        num_nodes=m,
        topology=topology,
        steps_per_checkpoint=steps_per_checkpoint,
        r_compute=r_compute,
        r_communication=network.value,
        r_synchronisation=r_sync,
        communication_exact=network.exact,
        step_s=step_s,
        collective_s=collective_s,
        write_s=write_s,
        mtbi_h=float(mtbi_s / 3600),
        ettr=float(ettr(interval_s, write_s, mtbi_s, c.restart_s)),
    )


def system_table(
    parameters: Iterable[float],
    num_nodes: Iterable[int],
    topologies: Iterable[Topology],
    steps_per_checkpoint: int = 100,
) -> list[SystemReliability]:
    """The table over N x M x topology."""
    nodes, shapes = list(num_nodes), list(topologies)
    return [system_reliability(n, m, t, steps_per_checkpoint) for n in parameters for m in nodes for t in shapes]
