"""The host's memory for snapshots: made by the launcher, handed down to agents and ranks, freed when all are gone.

Every rank of the host has all of it, whoever its agent is, so that a state whose writers had several agents comes back
from memory too. The files are empty until a script that keeps checkpoints sizes its own: a run without any takes
none. It knows nothing of what lies in them (`checkpoint/_memory.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from outlast.errors import EnvironmentFault
from outlast.runtime.settings.save_settings import NUM_SLOTS

if TYPE_CHECKING:
    from outlast.checkpoint import Hold

__all__ = ["hold_memory", "slots_of"]

_KEY = "OUTLAST_HOLD"


def hold_memory(num_ranks: int) -> tuple[Hold, dict[str, str]]:
    """(the memory, what its heirs find it by). Raises EnvironmentFault if there are not descriptors enough."""
    from outlast.checkpoint import Hold

    try:
        hold = Hold.create(num_ranks, NUM_SLOTS)
    except OSError as error:
        raise EnvironmentFault(
            f"no memory files for the snapshots of {num_ranks} ranks: {error.strerror}",
            did="nothing was started",
            remedy=f"allow {NUM_SLOTS * num_ranks + 100} open files or more: ulimit -n",
        ) from error
    return hold, {_KEY: str(hold)}


def slots_of(environ: Mapping[str, str]) -> tuple[int, ...]:
    """The descriptors to hand on; none if none were inherited."""
    text = environ.get(_KEY, "")
    return tuple(int(fd) for fd in text.replace(";", ",").split(",") if fd)
