"""Random numbers that the loop's own lines draw, before and after the loop over a step's batches.

torch's, numpy's and Python's generators are seeded there by position (protocol, 16), as they are before each
microbatch. Else they would be where a replica's last microbatch left them, and each replica has another one. So whoever
goes through these lines draws the same: in a fleet of any size, who joins, and a run that goes on.
"""

from __future__ import annotations

from outlast.core.position import position_seed
from outlast.runtime.training.random_state import seed_everything

__all__ = ["OwnLines"]

_BEFORE, _AFTER = 0xBEF0, 0xAF7E


class OwnLines:
    """Seeds what the lines of a loop draw from. `seed`: the run's."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def before(self, step: int) -> None:
        """The loop is given this step."""
        seed_everything(position_seed(self._seed, step, _BEFORE))

    def after(self, step: int) -> None:
        """The step is committed, and the loop over its batches ends."""
        seed_everything(position_seed(self._seed, step, _AFTER))
