"""Whether another run publishes in the same place, as one publisher sees it. No torch.

Role: an object store, and a file system without locks, cannot refuse a second live run (`occupancy.py`); numbers of
generations tell it afterwards, for between two publications of one run nobody else's should lie. It costs nothing
where there is none: nothing is read. Refuses nothing, and does not see a run that has published nothing since.
"""

from __future__ import annotations

from outlast.checkpoint._publish import read_head
from outlast.checkpoint.store import Store
from outlast.errors import Damage

__all__ = ["Neighbours"]

_LOOK = 8
_IMPORTED = "import-"  # not a run: somebody put a generation there, and was done


class Neighbours:
    """For the one publisher of `run`; runs without a name cannot be told apart."""

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run = store, run
        self._last: int | None = None
        self._told: set[str] = set()

    def after(self, generation: int) -> str:
        """We have published `generation`: what to tell about another run that has, too; of each once, else ""."""
        last, self._last = self._last, generation
        if last is None:
            return ""
        for number in range(max(last + 1, generation - _LOOK), generation):
            try:
                head = read_head(self._store, number)
            except (Damage, OSError):
                continue
            if head.run not in self._told and head.run != self._run and not head.run.startswith(_IMPORTED):
                self._told.add(head.run)
                return (
                    f"another run saves at {self._store.url}, too: run {head.run or '(without a name)'} published "
                    f"generation {number}. Each tidies the other's unfinished saves away: give each a place of its own"
                )
        return ""
