"""Schedules in which a robust rule's rows count by host (`fault_domain = "host"`): of the same seeds, and beside them.

Whoever shares a host lies together, so what a view is worth depends on where its members are. A seed's other schedule
is what it was: `outlast prove protocol --fault-domain host` plays these.
"""

from __future__ import annotations

from random import Random

import msgspec

from outlast.prove.adversary._scenario import Scenario, scenario_of
from outlast.prove.adversary._schedule_faults import ScheduleFault

__all__ = ["host_rows_of"]

_SPAN_S = 1.5
_NOT_HERE = ("flip", "broken", "sum flip", "state flip", "tested badly")
"""What audits and comparisons are for, of which there are none here; and what puts a host out of service for good, so
that the others rightly wait for another."""


def host_rows_of(seed: int) -> Scenario:
    """The fleet and faults of a seed on several hosts, under a robust rule that needs a view on so many of them; in
    three of five somebody reduces wrongly, and in half a host is lost whole. Of its own seed."""
    full, rng = scenario_of(seed), Random(seed ^ 0xD0A4)
    hosts = rng.choice((2, 2, 3, 3, 4))
    replicas = max(full.num_replicas, rng.choice((hosts, hosts, hosts + 1, 2 * hosts)))
    rows = rng.choice((2, 3, 3, 4))
    wrong = rng.choice(((), (), ("slice flip",), ("slice broken",), ("slice flip", "slice flip")))
    kinds = (*wrong, *rng.choice(((), (), ("agent crash",), ("host off",))))
    if not full.silence_s:  # a launcher sees its hosts end, and is told of them
        kinds = tuple("agent crash" if kind == "host off" else kind for kind in kinds)
    faults = [
        ScheduleFault(kind=kind, who=rng.randrange(8), lasts=0.3 + rng.random(), at=0.05 + _SPAN_S * rng.random())
        for kind in kinds
    ]
    kept = [fault for fault in full.faults if fault.kind not in _NOT_HERE]
    faults = [*kept[: rng.choice((1, 2, 4, 8))], *faults]
    return msgspec.structs.replace(
        full,
        faults=tuple(faults),
        rows_by_host=True,
        num_rows=rows,
        rows_from=rng.choice((1, 2, hosts, hosts)),
        num_agents=hosts,
        num_replicas=replicas,
        num_microbatches=max(full.num_microbatches, rows),
        num_steps=max(full.num_steps, rng.choice((4, 8))),
        two_levels=False,
        audit=0.0,
        speeds_s=0.0,
        calm_after_s=max(full.calm_after_s, *(fault.at + fault.lasts for fault in faults)),
    )
