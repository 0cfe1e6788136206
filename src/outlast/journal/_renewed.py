"""Renewed files that cannot be used: told of once, when that is no renewal under way any more."""

from __future__ import annotations

import sys
import time

from outlast.errors import ConfigError

__all__ = ["RenewedFiles"]

_LOOKS = 3  # at which they were wrong in the same way, until that is told
_APART_S = 1.0  # such looks


class RenewedFiles:
    """`taken` and `refused` after each look at them. Somebody has to know before the old files expire."""

    def __init__(self) -> None:
        self._wrong, self._looks, self._looked_s = "", 0, 0.0

    def taken(self) -> None:
        self._wrong, self._looks = "", 0

    def refused(self, error: OSError | ConfigError) -> None:
        """They are half renewed, or wrong."""
        wrong, now_s = error.message if isinstance(error, ConfigError) else str(error), time.monotonic()
        if wrong == self._wrong and now_s - self._looked_s < _APART_S:
            return
        self._looks = self._looks + 1 if wrong == self._wrong else 1
        self._wrong, self._looked_s = wrong, now_s
        if self._looks == _LOOKS:
            print(f"outlast: renewed files are not taken, and the old ones hold: {wrong}", file=sys.stderr, flush=True)
