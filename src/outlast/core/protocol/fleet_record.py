"""What a coordinator keeps durably, for whoever takes over from it."""

from __future__ import annotations

from typing import Literal

import msgspec

from outlast.core.protocol.types import View

__all__ = ["Ending", "FleetRecord"]


class Ending(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """Training is over after `steps`, and the scripts of the last view's members go on. `ends`: how processes of them
    have ended since: well (exit code 0), badly (another one), or by death (a signal, or with their host)."""

    steps: int
    writer: str
    ends: dict[str, Literal["well", "badly", "death"]] = {}


class FleetRecord(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag="Record"):
    """The coordinator's durable state: the newest view, and a planned successor that may have taken effect."""

    view: View | None = None
    planned: View | None = None
    incarnations: dict[str, int] = {}  # slot -> the newest
    placement: dict[str, str] = {}  # member -> its agent
    addresses: dict[str, str] = {}  # member -> where it is called, of those that have said so
    facts: dict[str, str] = {}
    formed: bool = False  # whether any view ever formed
    outcome: str = ""  # the run is over: how, and the fields of Finish
    exit_code: int = 0
    steps: int = 0
    detail: str = ""
    offences: dict[str, int] = {}  # slot -> how often its state or numbers were wrong
    fleeting: dict[str, int] = {}  # slot -> how often its numbers were wrong, and right when computed again
    ending: Ending | None = None
    wanted: int = 0  # replicas that people asked for; 0: as many as the run was started with
    drained: tuple[str, ...] = ()  # hosts that get none
    leaving: tuple[str, ...] = ()  # members that people asked to go
    outgoing: tuple[str, ...] = ()  # members that the view is without, to be let go once it has formed
    unpaid: tuple[str, ...] = ()  # slots whose next process people asked for
    stopping: str = ""  # why the run saves and stops, where its replicas are too few
    spares: int = -1  # as many as are held where that is left to outlast; -1: as many as the run was started with
    saved: int = 0  # steps in the newest checkpoint that this run has published
