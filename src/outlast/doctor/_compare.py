"""Reports of several hosts side by side: what the hosts of one fleet must have in common. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from outlast.doctor._finding import Finding, HostReport

__all__ = ["compare"]

_MAY_DIFFER = frozenset({"kernel"})


def compare(reports: Sequence[HostReport]) -> list[Finding]:
    """What differs between hosts; and each host's own errors and warnings, by name."""
    found: list[Finding] = []
    for name in sorted({name for report in reports for name in report.facts}):
        values: dict[str, list[str]] = {}
        for report in reports:
            values.setdefault(report.facts.get(name, "unknown"), []).append(report.host)
        if len(values) > 1:
            told = "; ".join(f"{value or 'none'} on {', '.join(hosts)}" for value, hosts in values.items())
            found.append(
                Finding(
                    check=name,
                    level="note" if name in _MAY_DIFFER else "error",
                    what=f"{name} differs: {told}",
                    remedy="the same on all hosts, or bitwise = false: results are then equal only nearly",
                )
            )
    for report in reports:
        for finding in report.findings:
            if finding.level in ("warning", "error"):
                found.append(
                    Finding(
                        check=f"{report.host}: {finding.check}",
                        level=finding.level,
                        what=finding.what,
                        remedy=finding.remedy,
                        figures=finding.figures,
                    )
                )
    if not found:
        found.append(Finding(check="fleet", level="ok", what=f"{len(reports)} hosts agree"))
    return found
