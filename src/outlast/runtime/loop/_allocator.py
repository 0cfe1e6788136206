"""Keep the memory that a step frees for the next step.

By default glibc returns a large tensor's memory to the kernel when it is freed and faults it in again, page by page,
a step later: 3,000 to 10,000 faults a step for a model of three million parameters, a tenth of the step's time. Peak
memory stays what it was: what is kept was in use within the step. Where the user set the allocator, or there is no
glibc, nothing happens.
"""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # mallopt(3)
_MMAP_LIMIT = 32 << 20  # glibc refuses more
_SETTINGS = ((_MMAP_THRESHOLD, _MMAP_LIMIT), (_TRIM_THRESHOLD, 1 << 30), (_TOP_PAD, 64 << 20))


def keep_freed_memory() -> bool:
    """Whether the C library took all settings."""
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(key, value) == 1 for key, value in _SETTINGS)
