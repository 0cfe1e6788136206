"""What runs before this one have taught of alarms, from the diary: where the coordinator's beliefs begin. No torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TypedDict

from outlast.core.policy import AlarmKind
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
    """Agents by what the diary says of them: settings of the coordinator's."""

    retired: frozenset[str]
    probation: frozenset[str]


def agents_of_note(environ: Mapping[str, str], host: str) -> AgentsOfNote:
    """Agents of `host` that a person has put out of service (`HOST/AGENT` is retired: no replica as long as another one
    is there), and those that are back since a short while (probation, of the agent or of a slot of it). Said once."""
    if "OUTLAST_DIARY" not in environ:
        return AgentsOfNote(retired=frozenset(), probation=frozenset())
    try:
        records = records_of(Diary(default_diary(dict(environ))).entries())
    except OutlastError:  # `taught` has said so
        records = []
    places = [(record.state, record.device.split("/")) for record in records]
    here = [(state, parts[1], len(parts)) for state, parts in places if parts[0] == host and 2 <= len(parts) <= 3]
    retired = frozenset(agent for state, agent, depth in here if state == "retired" and depth == 2)
    probation = frozenset(agent for state, agent, _ in here if state == "probation") - retired
    _say("out of service by the diary, so without replicas", retired)
    _say("on probation by the diary, so tested before they train, and the last to be given work", probation)
    return AgentsOfNote(retired=retired, probation=probation)


def _say(what: str, agents: frozenset[str]) -> None:
    if agents:
        print(f"outlast: {what}: {', '.join(sorted(agents))}", file=sys.stderr, flush=True)
