"""One reading of the wall clock for a run on one host: what is told of it is counted from there, without jumps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

__all__ = ["VARIABLE", "apart_s"]

VARIABLE = "OUTLAST_CLOCKS_APART"


def apart_s(environ: Mapping[str, str]) -> float:
    """Unix time less monotonic time: as the launcher of this host read it when the run began, or, where none did, as it
    is now. Two coordinators of a run agree on it though the wall clock was set between them."""
    with contextlib.suppress(KeyError, ValueError):
        return float(environ[VARIABLE])
    return time.time() - time.monotonic()
