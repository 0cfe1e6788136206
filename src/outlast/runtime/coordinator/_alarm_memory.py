"""What runs before this one have taught of alarms, from the diary: where the coordinator's beliefs begin. No torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from outlast.core.policy import AlarmKind
from outlast.errors import OutlastError
from outlast.health import Diary, alarm_kinds, default_diary, records_of

__all__ = ["retired_agents", "taught"]


def taught(environ: Mapping[str, str]) -> Mapping[str, AlarmKind]:
    """By kind of alarm, if OUTLAST_DIARY names a diary; one that cannot be read never holds up a run."""
    if "OUTLAST_DIARY" not in environ:
        return {}
    try:
        return alarm_kinds(Diary(default_diary(dict(environ))).entries())
    except OutlastError as error:
        print(f"outlast: the diary teaches nothing of alarms: {error}", file=sys.stderr, flush=True)
        return {}


def retired_agents(environ: Mapping[str, str], host: str) -> frozenset[str]:
    """Agents that a person has put out of service: `HOST/AGENT` is retired in the diary. They get no replica as long as
    another one is there, which is said."""
    if "OUTLAST_DIARY" not in environ:
        return frozenset()
    try:
        records = records_of(Diary(default_diary(dict(environ))).entries())
    except OutlastError:  # `taught` has said so
        return frozenset()
    names = (record.device.split("/") for record in records if record.state == "retired")
    found = frozenset(parts[1] for parts in names if len(parts) == 2 and parts[0] == host)
    if found:
        print(
            f"outlast: out of service by the diary, so without replicas: {', '.join(sorted(found))}",
            file=sys.stderr,
            flush=True,
        )
    return found
