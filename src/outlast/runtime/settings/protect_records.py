"""What a script gives `protect`, in records by owner: `Data`, `Rules`, `Audit`. `Guards` and `Checkpoint` are such too.

Each record holds its owner's defaults. `of` makes one from `protect`'s short forms, in which None stands for what is
not given; a record and short forms of the same owner cannot both be given. No torch; whether the values can work is
judged by their owners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from typing import Any, ClassVar, Literal, Self

from outlast.core.policy import Guards
from outlast.errors import ConfigError
from outlast.runtime.settings.save_settings import Checkpoint

__all__ = ["Aggregation", "Audit", "Data", "Rules", "Wanted"]

Aggregation = str | Mapping[str, Any] | Sequence[tuple[str, Any]] | None
"""A rule's name, or rules by pattern of parameter names; None for the mean."""


@dataclass(frozen=True, eq=False)
class _Record:
    """A record whose first field may be given alone. `_prefix`: of its other fields' names among `protect`'s."""

    _prefix: ClassVar[str] = ""

    @classmethod
    def of(cls, first: Any, **short: Any) -> Self:
        """The record itself, or one of what is given by itself. ConfigError where both are, or something is missing."""
        given = {name: value for name, value in short.items() if value is not None}
        kind, (own, *others) = cls.__name__, fields(cls)
        if isinstance(first, cls):
            if given:
                names = ", ".join(cls._prefix + name for name in given)
                raise ConfigError(
                    f"{names}: given beside outlast.{kind}(…), which holds it",
                    remedy=f"outlast.{kind}(…, {next(iter(given))}=…), and nothing of it beside",
                )
            return first
        missing = [field.name for field in others if field.default is MISSING and field.name not in given]
        if missing:
            raise ConfigError(
                f"protect(…) is not told {' and '.join(missing)}",
                remedy=f"{missing[0]}=N, or outlast.{kind}(…, {missing[0]}=N) in place of the {own.name}",
            )
        return cls(first, **given)  # type: ignore[call-arg]  # each record has a first field


@dataclass(frozen=True, eq=False)
class Data(_Record):
    """What is trained on, and how it is dealt out: `protect(model, optimizer, outlast.Data(dataset, …))`.

    `dataset`: samples by number, or a stream (reference/loop). `global_batch_size`: samples of one step, over all
    replicas. `microbatches`: units of work in a step, the same whoever computes them. `shuffle`: whether each pass has
    an order of its own. `drop_last`: whether a last batch that is not full is left out. `sampler`: the order of each
    epoch, or a function of its number. `collate_fn`: samples to a batch, as in a `DataLoader`; torch's if not given.
    `num_workers`: processes that load samples, in each replica. `bad_samples`: how many samples of the run may be
    skipped because they cannot be read.
    """

    dataset: Any
    _: KW_ONLY
    global_batch_size: int
    microbatches: int
    shuffle: bool = True
    drop_last: bool = False
    sampler: Any = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    bad_samples: int = 0


@dataclass(frozen=True, eq=False)
class Rules(_Record):
    """A robust rule in place of the mean: `protect(…, aggregation=outlast.Rules("median", f=1))` (how-to/rules).

    `rule`: its name, or rules by pattern of parameter names. `f`: how many rows may lie. `pre`: steps in front of the
    rule. `rows`: groups of microbatches that it sees, one a replica if not given. `row_momentum`: of each row.
    `check_reducers`: share of the reduced slices that a second member computes again.
    """

    rule: Aggregation = None
    _: KW_ONLY
    f: int | None = None
    pre: str | Sequence[str] | None = None
    rows: int | None = None
    row_momentum: float | None = None
    check_reducers: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rule, str | Mapping | Sequence | None):
            raise ConfigError(
                f"the aggregation is a {type(self.rule).__name__}",
                remedy='a rule\'s name, a dict from patterns to rules, or outlast.Rules("median", f=1)',
            )

    def arguments(self) -> dict[str, Any]:
        """As `row_settings` takes them."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"aggregation": given.pop("rule"), **given}


@dataclass(frozen=True, eq=False)
class Audit(_Record):
    """What a second replica computes too: `protect(…, audit=outlast.Audit(0.02, params="auto"))` (how-to/audits).

    `share`: of microbatches, 0 to 1, so that a wrong gradient is found before it is applied; "auto" lets the policy
    choose. `params`: names of critical parameters by pattern, or "auto": a second replica reduces their gradients, and
    all compare them and their moments in every step.
    """

    _prefix: ClassVar[str] = "audit_"
    share: float | str = 0.0
    _: KW_ONLY
    params: Sequence[str] | str = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Wanted:
    """All that a script wants of its training, beside the model and what trains it."""

    data: Data
    rules: Rules
    audit: Audit
    guards: Guards | str
    checks: Any
    keep: Checkpoint | Literal["auto", "off"]
    seed: int
    clip_norm: float | None
    bucket_mb: float
