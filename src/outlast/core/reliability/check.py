"""Argument checks of the reliability functions: one wording for every refusal (reason, valid range, remedy).

Invariant: a function of this room never returns NaN for bad input; it refuses. It does not coerce or clip.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outlast.errors import ConfigError

__all__ = ["FloatArray", "at_least", "count", "nonnegative", "positive", "probability", "within"]

FloatArray = NDArray[np.float64]


def within(
    name: str, value: ArrayLike, low: float, high: float, *, open_low: bool = False, remedy: str = ""
) -> FloatArray:
    """`value` as float64, refused (ConfigError) outside [low, high], or (low, high] if `open_low`; NaN is refused."""
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} = {value!r} is not a number", remedy=remedy) from None
    bad = ~((array > low) if open_low else (array >= low)) | ~(array <= high)
    if bad.any():
        worst = float(array[bad].flat[0]) if array.ndim else float(array)
        left = "(" if open_low else "["
        valid = f"valid: {left}{low:g}, {high:g}]"
        raise ConfigError(
            f"{name} = {worst:g} is out of range",
            where=valid,
            remedy=remedy or f"give {name} in {left}{low:g}, {high:g}]",
        )
    return array


def positive(name: str, value: ArrayLike) -> FloatArray:
    """Strictly positive and finite."""
    return within(
        name, value, 0.0, float(np.finfo(np.float64).max), open_low=True, remedy=f"{name} must be above zero and finite"
    )


def nonnegative(name: str, value: ArrayLike) -> FloatArray:
    """Zero or more, and finite."""
    return within(name, value, 0.0, float(np.finfo(np.float64).max), remedy=f"{name} must not be negative, and finite")


def probability(name: str, value: ArrayLike) -> FloatArray:
    """A probability: [0, 1]."""
    return within(name, value, 0.0, 1.0, remedy=f"{name} is a probability: give a number from 0 to 1")


def count(name: str, value: int, low: int = 0, high: int | None = None) -> int:
    """A whole number in [low, high]."""
    if isinstance(value, bool) or not float(value).is_integer():
        raise ConfigError(f"{name} = {value!r} is not a whole number", remedy=f"give a whole number of {name}")
    if value < low or (high is not None and value > high):
        top = "" if high is None else f" and at most {high}"
        raise ConfigError(f"{name} = {value} is out of range", remedy=f"{name} must be at least {low}{top}")
    return int(value)


def at_least(name: str, value: ArrayLike, low: float) -> FloatArray:
    """Finite and not below `low`."""
    return within(name, value, low, float(np.finfo(np.float64).max), remedy=f"{name} must be at least {low:g}")
