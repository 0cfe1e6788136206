"""What agents that join from other hosts say of these, and what they are told; and what becomes of a host's silence.

Frozen tagged records beside `messages.py`. An agent that `outlast run` has started itself sends none of them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Awaited", "Briefing", "HostEvent", "HostHere", "HostSilent", "LinksJudged", "SpeedsMeasured", "Turned"]


class HostHere(msgspec.Struct, frozen=True, kw_only=True, tag="HostHere"):
    """An agent, before its first greeting on each connection. `agent`: the host's name and a part that no other process
    of that name has. `place`: who shares it reads the same clock and memory. `slots`: replicas that may run here, 0 for
    as many as there are. `address`: at which the other hosts reach it. `sent_s`: by its monotonic clock. `noted`: what
    the host's own diary says of it; it can speak against itself only."""

    agent: str
    host: str
    place: str
    pid: int
    address: str = ""
    slots: int = 0
    sent_s: float = 0.0
    noted: Literal["", "probation", "retired"] = ""


class Awaited(msgspec.Struct, frozen=True, kw_only=True, tag="Awaited"):
    """From a member of a run on several hosts: I wait for these, longer than a moment. It accuses nobody, and is said
    before there is a deadline; whether their hosts are heard of is the coordinator's matter."""

    member: str
    missing: tuple[str, ...]


class Briefing(msgspec.Struct, frozen=True, kw_only=True, tag="Briefing"):
    """To an agent that joins: what it needs to start replicas. `config`: as `outlast.config.encoded` writes it."""

    epoch: int
    run_id: str
    command: tuple[str, ...]
    folder: str  # from which the run was started
    config: str
    hash_seed: str


class Turned(msgspec.Struct, frozen=True, kw_only=True, tag="Turned"):
    """To an agent: this run does not take it, and would not later. `run`: the one that is here, where the agent is of
    another one, which is over."""

    epoch: int
    reason: str
    remedy: str
    run: str = ""


class HostSilent(msgspec.Struct, frozen=True, kw_only=True, tag="HostSilent"):
    """To the coordinator from its driver: nothing is heard of an agent nor of any of its members for so long."""

    agent: str
    for_s: float
    why: str


class LinksJudged(msgspec.Struct, frozen=True, kw_only=True, tag="LinksJudged"):
    """To the coordinator from its driver: the links of these agents' hosts are bad, and no others; what shows it."""

    agents: dict[str, str]


class SpeedsMeasured(msgspec.Struct, frozen=True, kw_only=True, tag="SpeedsMeasured"):
    """To the coordinator from its driver: seconds that a microbatch takes each member, of late."""

    leaf_s: dict[str, float]


HostEvent = HostHere | HostSilent | LinksJudged | SpeedsMeasured
"""What is told of hosts to the coordinator."""
