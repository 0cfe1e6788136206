"""Arithmetic that reads the same on a float and on an array: policies use it so that one code serves both times.

Invariant: a float in gives a float out and imports nothing.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["ceil", "clamp", "log1p", "where"]


def log1p(x: Any) -> Any:
    """ln(1 + x)."""
    if hasattr(x, "shape"):
        import numpy as np

        return np.log1p(x)
    return math.log1p(x)


def ceil(x: Any) -> Any:
    """The next whole number up."""
    if hasattr(x, "shape"):
        import numpy as np

        return np.ceil(x)
    return float(math.ceil(x))


def clamp(x: Any, low: float, high: float) -> Any:
    """x held to [low, high]."""
    if hasattr(x, "shape"):
        import numpy as np

        return np.minimum(np.maximum(x, low), high)
    return min(max(x, low), high)


def where(condition: Any, x: Any, otherwise: Any) -> Any:
    """x where the condition holds; of arrays, entry by entry."""
    if hasattr(condition, "shape"):
        import numpy as np

        return np.where(condition, x, otherwise)
    return x if condition else otherwise
