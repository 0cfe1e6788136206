"""How gradients are aggregated: what the script says, and what the run's configuration overrides. Checked here.

The result is one of the facts that all members of a run must share. None stands for the mean, whose path knows nothing
of rows. No tensors.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from outlast.config import RunConfig
from outlast.core.policy import Admission, AdmissionPolicy, check_choice
from outlast.core.protocol import roots
from outlast.errors import ConfigError
from outlast.runtime.settings.protect_records import Aggregation

__all__ = ["GroupRule", "RowSettings", "row_settings"]

_OPTIONS = ("rule", "f", "pre", "m", "bucket_size", "radius", "iterations")


class GroupRule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule and the parameters (by index in the state's order) that it is for."""

    pattern: str
    rule: str
    f: int
    pre: tuple[str, ...] = ()
    options: dict[str, Any] = {}
    params: tuple[int, ...] = ()


class RowSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`trim_count`: rows that may lie, the least over all rules. `tolerated`: hosts that the run wants to survive."""

    groups: tuple[GroupRule, ...]
    num_rows: int
    trim_count: int
    tolerated: int
    on_shortfall: Literal["wait", "stop", "lower"]
    fault_domain: Literal["replica", "host"]
    momentum: float
    check_share: float

    def describe(self) -> str:
        """One line that is equal exactly where the settings are."""
        rules = "; ".join(
            " ".join([g.pattern, g.rule, f"f={g.f}", *g.pre, *(f"{k}={v}" for k, v in sorted(g.options.items()))])
            for g in self.groups
        )
        return f"{rules} on {self.num_rows} rows, momentum {self.momentum}, checks {self.check_share}"

    @property
    def least_hosts(self) -> int:
        """Hosts that replicas have to be on, or the run would wait or stop; 0 where their number does not matter."""
        if self.fault_domain == "replica" or self.on_shortfall == "lower":
            return 0
        row_each = {str(row): 1 for row in range(self.num_rows)}
        return self.admit(row_each).hosts_needed or 0

    def facts(self) -> dict[str, str]:
        """Return what a coordinator must know of where replicas are; nothing where hosts do not matter."""
        return {"fault_domains": str(self.least_hosts)} if self.least_hosts else {}

    def admit(self, rows_of: Mapping[str, int]) -> Admission:
        """Whether a view in which each host can spoil so many rows is good enough."""
        policy = AdmissionPolicy(
            trim_count=self.trim_count,
            tolerated_hosts=self.tolerated,
            on_shortfall=self.on_shortfall,
            domain=self.fault_domain,
        )
        return policy.decide(rows_of)


def row_settings(
    config: RunConfig,
    names: Sequence[str],
    microbatches: int,
    *,
    aggregation: Aggregation = None,
    f: int | None = None,
    pre: str | Sequence[str] | None = None,
    rows: int | None = None,
    row_momentum: float | None = None,
    check_reducers: float | None = None,
) -> RowSettings | None:
    """The settings of a run; None for the mean of all microbatches. Raises ConfigError, each with what would work."""
    given: Aggregation = config.aggregation if config.aggregation != "mean" else aggregation
    f = config.f or f or 0
    pre = config.pre or pre or ()
    if given is None or given == "mean":
        _nothing_else(
            f=f,
            pre=pre,
            rows=config.rows or rows,
            row_momentum=config.row_momentum or row_momentum,
            check_reducers=config.check_reducers or check_reducers,
        )
        return None
    num_rows = config.rows or rows or config.replicas
    if not isinstance(num_rows, int) or not 1 < num_rows <= microbatches:
        raise ConfigError(
            f"a robust rule on {num_rows} rows of {microbatches} microbatches",
            remedy=f"rows (by default one a replica) from 2 to {microbatches}; or more microbatches",
        )
    groups = _groups(given, names, f, pre, num_rows)
    trim = min((g.f for g in groups if g.rule != "mean"), default=0)
    momentum = config.row_momentum or row_momentum or 0.0
    share = config.check_reducers or check_reducers or 0.0
    _in_range("row_momentum", momentum, "0 up to, but not including, 1", 0 <= momentum < 1)
    _in_range("check_reducers", share, "a share from 0 to 1", 0 <= share <= 1)
    return RowSettings(
        groups=groups,
        num_rows=num_rows,
        trim_count=trim,
        tolerated=_tolerated(config, trim, num_rows),
        on_shortfall=config.on_shortfall,
        fault_domain=config.fault_domain,
        momentum=float(momentum),
        check_share=float(share),
    )


def _tolerated(config: RunConfig, trim: int, num_rows: int) -> int:
    domains = min(config.num_agents, config.replicas) if config.fault_domain == "host" else config.replicas
    most = -(-num_rows // domains)
    possible = trim // most
    if config.tolerated > possible:
        raise ConfigError(
            f"{config.tolerated} lying replicas with up to {most} of {num_rows} rows each are more than "
            f"the {trim} rows that the rule tolerates",
            remedy=f"tolerated = {possible} or fewer, a larger f, or more replicas",
        )
    return possible if config.tolerated < 0 else config.tolerated


def _nothing_else(**given: Any) -> None:
    if any(given.values()):
        what = ", ".join(name for name, value in given.items() if value)
        raise ConfigError(
            f"{what} given, but the aggregation is the mean", remedy='aggregation="trimmed_mean", or leave them out'
        )


def _groups(given: Aggregation, names: Sequence[str], f: int, pre: Any, num_rows: int) -> tuple[GroupRule, ...]:
    if isinstance(given, str):
        pairs: list[tuple[str, Any]] = [("*", given)]
    elif isinstance(given, Mapping):
        pairs = list(given.items())
    else:
        pairs = [tuple(pair) for pair in given or ()]
    if not pairs or any(len(pair) != 2 or not isinstance(pair[0], str) for pair in pairs):
        raise ConfigError(
            f"aggregation={given!r} is no rule and no rules by pattern",
            remedy='aggregation="trimmed_mean", or {"embedding*": "median", "*": {"rule": "krum", "f": 1}}',
        )
    made = [_rule(pattern, rule, f, pre, num_rows) for pattern, rule in pairs]
    owner = [_owner(name, made) for name in names]
    used = [
        msgspec.structs.replace(group, params=tuple(i for i, own in enumerate(owner) if own == g))
        for g, group in enumerate(made)
    ]
    for group in used:
        if not group.params:
            raise ConfigError(
                f"the pattern {group.pattern!r} of aggregation matches no parameter that is left for it",
                remedy=f"parameters are named like {names[0]!r}; the first pattern that matches counts",
            )
    return tuple(used)


def _owner(name: str, groups: Sequence[GroupRule]) -> int:
    for index, group in enumerate(groups):
        if fnmatch.fnmatchcase(name, group.pattern):
            return index
    raise ConfigError(f"no pattern of aggregation matches the parameter {name}", remedy='add "*": "mean" at the end')


def _rule(pattern: str, given: Any, f: int, pre: Any, num_rows: int) -> GroupRule:
    table = dict(given) if isinstance(given, Mapping) else {"rule": given}
    for key in table:
        if key not in _OPTIONS:
            raise ConfigError(f"a rule has no setting {key!r}", remedy=f"one of: {', '.join(_OPTIONS)}")
    name = str(table.pop("rule", "trimmed_mean"))
    own_f = int(table.pop("f", 0 if name == "mean" else f))
    own_pre = table.pop("pre", () if name == "mean" else pre)
    steps = tuple(s.strip() for s in own_pre.split(",") if s.strip()) if isinstance(own_pre, str) else tuple(own_pre)
    check_choice(name, num_rows, own_f, steps, bucket_size=table.get("bucket_size", 2))
    return GroupRule(pattern=pattern, rule=name, f=own_f, pre=steps, options=table)


def _in_range(name: str, value: Any, valid: str, good: bool) -> None:
    if not good:
        raise ConfigError(f"{name} = {value} is out of range", remedy=f"give {valid}")


def check_short_batch(sizes: Sequence[int], num_rows: int) -> None:
    """ConfigError if the last batch of an epoch leaves a row without a sample: zeros would count as an honest row."""
    for lo, hi in roots(len(sizes), num_rows):
        if not any(sizes[lo:hi]):
            raise ConfigError(
                f"the last batch of an epoch has {sum(sizes)} samples, too few for {num_rows} rows",
                remedy="drop_last=True, or another batch size",
            )


def check_even_rows(microbatches: int, num_rows: int, width: int) -> None:
    """ConfigError if rows of what `width` ranks compute at a time would be other rows than those of one rank."""
    if width > 1 and microbatches // width % num_rows:
        unit = width * num_rows
        raise ConfigError(
            f"{microbatches} microbatches on {width} ranks are no equal share for each of {num_rows} rows: which "
            "microbatches are in a row would depend on the number of ranks",
            remedy=f"microbatches={-(-microbatches // unit) * unit}, or another number of rows",
        )
