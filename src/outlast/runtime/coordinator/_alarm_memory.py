"""What runs before this one have taught of alarms, from the diary: where the coordinator's beliefs begin. No torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TypedDict

from outlast.core.policy import AlarmKind
from outlast.core.protocol.fleet.roster import noted_as
from outlast.errors import OutlastError
from outlast.health import Diary, alarm_kinds, default_diary, records_of

__all__ = ["agents_of_note", "taught"]


def taught(environ: Mapping[str, str]) -> Mapping[str, AlarmKind]:
    """By kind of alarm, if OUTLAST_DIARY names a diary; one that cannot be read never holds up a run."""
    if "OUTLAST_DIARY" not in environ:
        return {}
    try:
        return alarm_kinds(Diary(default_diary(dict(environ))).entries())
    except OutlastError as error:
        print(f"outlast: the diary teaches nothing of alarms: {error}", file=sys.stderr, flush=True)
        return {}


class AgentsOfNote(TypedDict):
    """Agents by what the diary says of them, as `noted_as` names them: settings of the coordinator's."""

    retired: frozenset[str]
    probation: frozenset[str]


def agents_of_note(environ: Mapping[str, str], host: str) -> AgentsOfNote:
    """Agents that a person has put out of service (`HOST/AGENT` is retired: no replica as long as another one is
    there), and those that are back since a short while (probation, of the agent or of a slot of it): of `host`, where
    the run is started, and of any other that may join. Said once."""
    if "OUTLAST_DIARY" not in environ:
        return AgentsOfNote(retired=frozenset(), probation=frozenset())
    try:
        records = records_of(Diary(default_diary(dict(environ))).entries())
    except OutlastError:  # `taught` has said so
        records = []
    rows = [(record.state, _noted(record.device, host), record.device.count("/")) for record in records]
    retired = frozenset(name for state, names, depth in rows if state == "retired" and depth == 1 for name in names)
    probation = frozenset(name for state, names, _ in rows if state == "probation" for name in names) - retired
    _say("out of service by the diary, so without replicas", retired)
    _say("on probation by the diary, so tested before they train, and the last to be given work", probation)
    return AgentsOfNote(retired=retired, probation=probation)


def _noted(device: str, host: str) -> list[str]:
    """Which agents a device of the diary belongs to, as the roster names them (`noted_as`): the launcher's are of its
    own host, of every other host there is one; and one may join on the launcher's host as well."""
    where, *rest = device.split("/")
    if not 1 <= len(rest) <= 2 or rest == ["link"]:
        return []
    joined = [noted_as(f"{where}:")] if rest[0] == "a0" else []
    return [rest[0], *joined] if where == host else joined


def _say(what: str, agents: frozenset[str]) -> None:
    if agents:
        names = sorted({name.removesuffix(":") for name in agents})
        print(f"outlast: {what}: {', '.join(names)}", file=sys.stderr, flush=True)
