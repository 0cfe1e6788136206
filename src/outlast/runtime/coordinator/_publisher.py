"""Publishing, tidying and draining on threads, for the process that may publish. No torch.

Role: the store's side of `_saves.py`: one thread publishes and prunes, in order; another copies the newest generation
to the farther place each time it is free. Says what happened through `said`, from its threads. Work that waited while
another coordinator may have followed this one changes nothing in the store. Decides nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from outlast.checkpoint import Drain, Retention, certify, heads, open_store, prune, publish
from outlast.checkpoint.draining import Drainer
from outlast.checkpoint.neighbours import Neighbours
from outlast.checkpoint.retention import fewer
from outlast.checkpoint.room import give_back
from outlast.checkpoint.threads import Threads
from outlast.core.phases import Phase
from outlast.core.protocol.saves.commit import PartReport, SaveId
from outlast.errors import CheckpointError
from outlast.runtime.settings.save_settings import SaveSettings

__all__ = ["Archive", "Unheld"]

_LOOK_BACK = 16


class Unheld(Exception):
    """This coordinator's claim is not confirmed just now, so the store is left as it is."""


class Archive:
    """Publishes whole saves where the run keeps its checkpoints. `extra`: what each head says besides; `held`: whether
    nobody can have followed this coordinator. Raises ConfigError for a place of no known kind."""

    def __init__(
        self,
        settings: SaveSettings,
        run: str,
        said: Callable[[str, dict[str, Any]], None],
        probe: Callable[[Phase, int], None],
        extra: dict[str, str],
        held: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store = open_store(settings.target)
        far = open_store(settings.drain_to) if settings.drain_to else None
        self._retention = Retention(keep_last=settings.keep_last, keep_every=settings.keep_every)
        self._run, self._said, self._probe, self._extra, self._held = run, said, probe, extra, held
        self._waiting: deque[tuple[str, Callable[[], None]]] = deque()
        self._neighbours = Neighbours(self._store, run)
        self.url = self._store.url
        self.publisher = Threads(1, "outlast-publish", limit_s=settings.timeout_s)
        self._known: dict[int, dict[str, int]] = {}
        self._url_far = settings.drain_to
        self._drainer = (
            None
            if far is None
            else Drainer(
                self._store,
                far,
                self._retention,
                drained=self._drained,
                failed=self._not_drained,
                closing=threading.Event(),
                limit_s=settings.timeout_s,
            )
        )

    def newest_epoch(self) -> int:
        """The highest epoch of the newest generations' views; 0 if there are none. Raises OSError."""
        return max((head.view[0] for head in heads(self._store, newest=_LOOK_BACK)[0]), default=0)

    def publish(self, save: SaveId, reports: Sequence[PartReport], *, certified: bool) -> int:
        """The generation's number. Raises what `checkpoint.publish` does, and Unheld."""
        self._probe(Phase.PUBLISH_BEGAN, save.step)
        number = publish(
            self._store,
            save,
            reports,
            created_s=time.time(),
            run=self._run,
            certified=certified,
            extra=self._extra,
            before=self._check_held,
        )
        other = self._neighbours.after(number)
        if other:
            self._said("notice", {"level": "warning", "text": other})
        self._probe(Phase.PUBLISH_DONE, save.step)
        return number

    def certify(self, generation: int) -> None:
        """Mark a generation certified, in order with the publishing."""
        self.publisher.submit(self._quietly, "certify", lambda: certify(self._store, generation))

    def give_back(self, save: SaveId) -> None:
        """It could not be published: what was written of it goes."""
        self.publisher.submit(self._quietly, "give back", lambda: give_back(self._store, save))

    def tidy(self, generation: int, protected: Collection[int]) -> None:
        """After `generation` was published: prune, and copy it on."""
        self.publisher.submit(self._quietly, "prune", lambda: self._prune(protected), later=False)
        if self._drainer is not None:
            self._drainer.begin(generation)

    def _quietly(self, what: str, work: Callable[[], None], *, later: bool = True) -> None:
        """The generation stands whatever becomes of this. What may not be done now is done first thing once it may, if
        `later`. On the publisher's thread."""
        if later and not self._held():
            self._waiting.append((what, work))
            return
        while self._waiting and self._held():
            self._quietly(*self._waiting.popleft())
        try:
            self._check_held()
            work()
        except (OSError, CheckpointError, Unheld) as error:
            self._said("checkpoint_pruned", {"generations": [], "freed_bytes": 0, "note": f"{what}: {error}"})

    def _check_held(self) -> None:
        if not self._held():
            raise Unheld("another coordinator may have followed this one; nothing was changed")

    def _prune(self, protected: Collection[int]) -> None:
        done = prune(self._store, self._retention, protected=protected, known=self._known)
        if done.generations or done.note:
            fields = {"generations": done.generations, "freed_bytes": done.freed_bytes, "note": done.note}
            self._said("checkpoint_pruned", fields)

    def make_room(self, protected: Collection[int]) -> None:
        """A writer finds no room: older generations go at once, and fewer are kept from here on."""
        self.publisher.submit(self._quietly, "prune", lambda: self._make_room(protected), later=False)

    def _make_room(self, protected: Collection[int]) -> None:
        before, self._retention = self._retention, fewer(self._retention, len(self._store.generations()))
        if before != self._retention:
            text = f"{self.url} is full: {self._retention.keep_last} of its generations stay, not {before.keep_last}"
            self._said("notice", {"level": "warning", "text": text})
        self._prune(protected)

    def _drained(self, state: Drain, seconds: float) -> None:
        self._said(
            "checkpoint_drained",
            {
                "generation": state.generation,
                "url": self._url_far,
                "copied_bytes": state.sent_bytes,
                "seconds": seconds,
            },
        )

    def _not_drained(self, state: Drain, reason: str) -> None:
        self._said(
            "checkpoint_failed",
            {
                "step": -1,
                "cause": "drain_failed",
                "url": self._url_far,
                "reason": f"generation {state.generation} was not copied: {reason}",
            },
        )

    def close(self) -> None:
        """Finish what was begun, but for what its store has not answered for too long."""
        with contextlib.suppress(RuntimeError):
            self.publisher.finish()
            if self._drainer is not None:
                self._drainer.threads.finish()
