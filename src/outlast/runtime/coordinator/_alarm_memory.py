"""What runs before this one have taught of alarms, from the diary: where the coordinator's beliefs begin. No torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from outlast.core.policy import AlarmKind
from outlast.errors import OutlastError
from outlast.health import Diary, alarm_kinds, default_diary

__all__ = ["taught"]


def taught(environ: Mapping[str, str]) -> Mapping[str, AlarmKind]:
    """By kind of alarm, if OUTLAST_DIARY names a diary; one that cannot be read never holds up a run."""
    if "OUTLAST_DIARY" not in environ:
        return {}
    try:
        return alarm_kinds(Diary(default_diary(dict(environ))).entries())
    except OutlastError as error:
        print(f"outlast: the diary teaches nothing of alarms: {error}", file=sys.stderr, flush=True)
        return {}
