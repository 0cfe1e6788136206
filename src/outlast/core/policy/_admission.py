"""Whether a view may go on under a robust rule: the arithmetic of protocol rule 23, alone.

Role: rows are fixed groups of microbatches and the trim count is fixed for the run, but hosts come and go. A host that
computes several rows spoils all of them with one lie. A view is admissible when

    (hosts to be tolerated) x (most rows on one host) <= trim count;

otherwise the run waits for more hosts, stops, or goes on with a lower guarantee by an explicit, journalled decision.
Lowered as far as none, the rule is still applied: it bounds any liar whose rows are no more than the trim count.
Pure: no clock, no membership, no rule; who owns which rows comes in as a count for each host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from outlast.errors import ConfigError

__all__ = ["Admission", "AdmissionPolicy", "most_rows_per_host"]

Shortfall = Literal["wait", "stop", "lower"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """What a view is worth. `action`: go on, or what to do instead; `tolerated_hosts`: how many may lie in it.

    `hosts_needed`: the fewest hosts on which the rows, spread evenly, would make the view admissible (None: no number
    does). `lowered`: true when the view goes on with fewer tolerated hosts than were asked for.
    """

    action: Literal["go", "wait", "stop"]
    tolerated_hosts: int
    most_rows: int
    trim_count: int
    hosts_needed: int | None
    lowered: bool
    reason: str


def most_rows_per_host(num_rows: int, num_hosts: int) -> int:
    """Rows on the fullest host when they are spread evenly. ConfigError without a host."""
    if num_hosts < 1 or num_rows < 0:
        raise ConfigError(f"{num_rows} rows on {num_hosts} hosts: there must be at least one host")
    return -(-num_rows // num_hosts)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionPolicy:
    """Whether a view goes on, waits or stops: the same object for members of a run, the adversary's, and the plan.

    `trim_count`: the f for which the rule was made, in rows. `tolerated_hosts`: how many lying hosts the run wants to
    survive. `on_shortfall`: what to do where a view tolerates fewer; `lower` goes on with as many as the rows allow, be
    it none. `domain`: what the reason calls a host.
    """

    trim_count: int
    tolerated_hosts: int
    on_shortfall: Shortfall = "wait"
    domain: str = "host"

    def __post_init__(self) -> None:
        if self.trim_count < 0 or self.tolerated_hosts < 0:
            raise ConfigError("trim count and tolerated hosts cannot be negative")

    def decide(self, rows_of_host: Mapping[str, int]) -> Admission:
        """Admit a view in which each host owns so many rows, or say what to do instead."""
        if any(rows < 0 for rows in rows_of_host.values()):
            raise ConfigError("rows cannot be negative")
        trim_count, tolerated = self.trim_count, self.tolerated_hosts
        most = max(rows_of_host.values(), default=0)
        if most == 0:
            return _verdict("wait", 0, most, trim_count, None, "no host owns a row")
        possible, needed = trim_count // most, _hosts_needed(sum(rows_of_host.values()), trim_count, tolerated)
        asked = f"{_count(tolerated, f'lying {self.domain}')} x {_count(most, 'row')} on the fullest"
        trimmed = f"{_count(trim_count, 'row')} trimmed"
        if tolerated <= possible:
            return _verdict("go", tolerated, most, trim_count, needed, f"{asked} <= {trimmed}")
        reason = f"{asked} > {trimmed}"
        if self.on_shortfall == "lower":
            told = f"{reason}; lowered from {tolerated} to {possible or 'none'}"
            return _verdict("go", possible, most, trim_count, needed, told, lowered=True)
        way_out = "no number of them is enough" if needed is None else f"it takes {_count(needed, self.domain)}"
        if self.on_shortfall == "wait":
            way_out += f"; tolerated = {possible}, or on_shortfall = lower, would go on"
        return _verdict(self.on_shortfall, possible, most, trim_count, needed, f"{reason}: {way_out}")


def _verdict(
    action: Literal["go", "wait", "stop"],
    tolerated: int,
    most: int,
    trim_count: int,
    needed: int | None,
    reason: str,
    *,
    lowered: bool = False,
) -> Admission:
    return Admission(
        action=action,
        tolerated_hosts=tolerated,
        most_rows=most,
        trim_count=trim_count,
        hosts_needed=needed,
        lowered=lowered,
        reason=reason,
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _hosts_needed(num_rows: int, trim_count: int, tolerated_hosts: int) -> int | None:
    """Fewest hosts whose even share of the rows, times the tolerated hosts, the trim count covers."""
    if tolerated_hosts == 0:
        return 1
    allowed = trim_count // tolerated_hosts
    return None if allowed == 0 else max(1, -(-num_rows // allowed))
