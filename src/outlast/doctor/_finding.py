"""What a check says: one record, and the report that they make. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

__all__ = ["Finding", "Level", "HostReport", "report", "verdict"]

Level = Literal["ok", "note", "warning", "error"]
_ORDER: tuple[Level, ...] = ("ok", "note", "warning", "error")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. `error`: a run would fail, or be wrong; `warning`: it would be slow or survive
    less; `note`: worth knowing. `remedy` is empty only where all is well. `figures`: what was measured."""

    check: str
    level: Level
    what: str
    remedy: str = ""
    figures: dict[str, float | int | str] = {}


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """All findings of one host. `facts`: what hosts of one fleet must agree on."""

    host: str
    verdict: Level
    seconds: float
    findings: list[Finding]
    facts: dict[str, str]


def verdict(findings: Iterable[Finding]) -> Level:
    """The worst level among them; `ok` for none."""
    return max((finding.level for finding in findings), key=_ORDER.index, default="ok")


def report(host: str, findings: list[Finding], facts: dict[str, str], seconds: float) -> HostReport:
    """The findings with their verdict, the worst first; checks of one level stay in the order they were made."""
    ranked = sorted(findings, key=lambda finding: -_ORDER.index(finding.level))
    return HostReport(host=host, verdict=verdict(findings), seconds=seconds, findings=ranked, facts=facts)
