"""What a host's own diary says of it, for the run that it joins. No torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Literal

from outlast.errors import OutlastError
from outlast.health._diary import Diary, default_diary
from outlast.health._ranking import records_of

__all__ = ["own_note"]


def own_note(environ: Mapping[str, str], host: str) -> Literal["", "probation", "retired"]:
    """What this host's diary says of HOST/a0, the agent that a host joins with, and of its slots: "retired" if a person
    has put the agent out of service; "probation" if it, or a slot, is back since a short while; "" without
    OUTLAST_DIARY. A diary that cannot be read says so and nothing else: a host may join without one."""
    if "OUTLAST_DIARY" not in environ:
        return ""
    try:
        records = records_of(Diary(default_diary(dict(environ))).entries())
    except OutlastError as error:
        print(f"outlast: this host's diary says nothing: {error}", file=sys.stderr, flush=True)
        return ""
    agent = f"{host}/a0"
    states = {r.device: r.state for r in records if r.device == agent or r.device.startswith(f"{agent}/")}
    if states.get(agent) == "retired":
        return "retired"
    return "probation" if "probation" in states.values() else ""
