"""Numbers that the loop gives for a microbatch beside its loss, reduced over the whole batch as the loss is.

A metric is a weighted mean. Sums of values and of weights are trees over the microbatch's number, so the result does
not depend on who computed what (protocol, 9). A microbatch that gave none of a name counts as weight 0. Does not know
headers' journeys or steps: an owner keeps one `Metrics`, and everybody concludes the same from the same headers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from outlast.core.protocol import Header, combine
from outlast.errors import StepMisuse

__all__ = ["Metrics", "mean_of", "metric_outside", "number_of", "reduced"]

Row = tuple[int, str, float, float]  # (microbatch, name, value, weight)


class Metrics:
    """What one replica's loop gave in the step that is under way."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, tuple[float, float]]] = {}

    def begin(self, leaf: int) -> None:
        """The microbatch is computed, or computed again."""
        self._rows.pop(leaf, None)

    def put(self, leaf: int, name: Any, value: Any, weight: Any) -> None:
        """Raises StepMisuse for what is no name, number or weight, and for a name that the microbatch has already."""
        if not isinstance(name, str) or not name:
            raise StepMisuse(f"a metric's name is {name!r}", remedy='step.metric("accuracy", value)')
        rows = self._rows.setdefault(leaf, {})
        if name in rows:
            raise StepMisuse(
                f"step.metric({name!r}, …) was called twice for one batch", remedy="one value a batch; or two names"
            )
        share = number_of(f"the weight of {name!r}", weight)
        if not 0.0 <= share < math.inf:
            raise StepMisuse(f"the weight of metric {name!r} is {share}", remedy="a number of samples or tokens")
        rows[name] = number_of(f"metric {name!r}", value), share

    def told(self, leaves: Iterable[int]) -> tuple[Row, ...]:
        """My part of the header, of the microbatches that count as mine."""
        return tuple((leaf, name, *row) for leaf in leaves for name, row in sorted(self._rows.get(leaf, {}).items()))

    def means(self, num_leaves: int) -> tuple[tuple[str, float], ...]:
        """Each metric over a batch that was computed here as a whole."""
        rows = {(leaf, name): row for leaf, found in self._rows.items() for name, row in found.items()}
        return _means(rows, num_leaves)

    def clear(self) -> None:
        """The step is applied."""
        self._rows.clear()


def number_of(what: str, value: Any) -> float:
    """The value as a number. Raises StepMisuse for what is none."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach())
    if isinstance(value, Real) or (hasattr(value, "item") and getattr(value, "ndim", 1) == 0):
        return float(value)
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise StepMisuse(f"{what} is {shown}, not one number", remedy="give its mean over the batch, as a number or tensor")


def metric_outside(name: str) -> StepMisuse:
    """The error for a number that belongs to no microbatch."""
    return StepMisuse(
        f"step.metric({name!r}, …) was called outside of the loop over the step's batches",
        remedy="call it inside `for batch in step`, once a batch",
    )


def reduced(headers: Sequence[Header], num_leaves: int) -> tuple[tuple[str, float], ...]:
    """Each metric over the whole batch, by name."""
    return _means(
        {(leaf, name): (value, weight) for h in headers for leaf, name, value, weight in h.metrics}, num_leaves
    )


def _means(rows: Mapping[tuple[int, str], tuple[float, float]], num_leaves: int) -> tuple[tuple[str, float], ...]:
    names = sorted({name for _, name in rows})
    return tuple((name, mean_of([rows.get((leaf, name)) for leaf in range(num_leaves)])) for name in names)


def mean_of(rows: Sequence[tuple[float, float] | None]) -> float:
    """The weighted mean of (value, weight) by number, None where there is none; NaN where nothing has weight."""
    kept = [row if row is not None and row[1] else (0.0, 0.0) for row in rows]
    root = (0, len(kept))
    total = combine([(i, i + 1, weight) for i, (_, weight) in enumerate(kept)], root)
    products = [(i, i + 1, value * weight) for i, (value, weight) in enumerate(kept)]
    return combine(products, root) / total if total else math.nan
