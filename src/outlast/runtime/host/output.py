"""A rank's standard output and error: logs under the run directory, whose disk may fill. Training outlasts that.

What does not fit is lost, as the documentation of the run directory says; every other error is the script's to see.
"""

from __future__ import annotations

import errno
import io
import sys
from typing import Any

__all__ = ["PatientFile", "outlast_full_disks"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PatientFile(io.FileIO):
    """A file that swallows what its disk has no room for."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return len(memoryview(data).cast("B"))


def outlast_full_disks() -> None:
    """Put such files under `sys.stdout` and `sys.stderr`, unless the script has put its own there."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            stream.flush()
            raw = PatientFile(fd, "w", closefd=False)
            patient = io.TextIOWrapper(raw, stream.encoding, stream.errors, write_through=True)
            setattr(sys, name, patient)
