"""Descriptors that end with what they belong to, whether or not anybody remembers to close it."""

from __future__ import annotations

import os
import weakref
from typing import Any

__all__ = ["closed_with"]


def closed_with(owner: Any, fd: int) -> weakref.finalize[..., Any]:
    """Close `fd`, once: when what is returned is called, or when nobody refers to `owner` any more."""
    closing = weakref.finalize(owner, _close, fd, os.getpid())
    closing.atexit = False
    return closing


def _close(fd: int, pid: int) -> None:
    """Forget the descriptor. A fork's number may be another's."""
    if pid == os.getpid():
        os.close(fd)
