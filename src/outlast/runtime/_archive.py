"""Publishing, tidying and draining on threads, for the process that may publish. No torch.

Role: the store's side of `_keeper.py`: one thread publishes and prunes, in order; another copies the newest generation
to the farther place each time it is free. Says what happened through `said`, from its threads. Decides nothing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from outlast.checkpoint import Drain, Retention, certify, drain, heads, open_store, prune, publish
from outlast.core.phases import Phase
from outlast.core.protocol._commit import PartReport, SaveId
from outlast.errors import CheckpointError
from outlast.runtime._settings import SaveSettings

__all__ = ["Archive"]

_LOOK_BACK = 16
_TRIES, _RETRY_S = 3, 0.5


class Archive:
    """See the module. Raises ConfigError for a place of no known kind."""

    def __init__(
        self,
        settings: SaveSettings,
        run: str,
        said: Callable[[str, dict[str, Any]], None],
        probe: Callable[[Phase, int], None],
    ) -> None:
        self._store = open_store(settings.target)
        self._far = open_store(settings.drain_to) if settings.drain_to else None
        self._retention = Retention(keep_last=settings.keep_last, keep_every=settings.keep_every)
        self._run, self._said, self._probe = run, said, probe
        self.url = self._store.url
        self.publisher = concurrent.futures.ThreadPoolExecutor(1, "outlast-publish")
        self._drainer = concurrent.futures.ThreadPoolExecutor(1, "outlast-drain")
        self._known: dict[int, dict[str, int]] = {}
        self._newest: Drain | None = None
        self._stop = threading.Event()

    def newest_epoch(self) -> int:
        """The highest epoch of the newest generations' views; 0 if there are none. Raises OSError."""
        return max((head.view[0] for head in heads(self._store, newest=_LOOK_BACK)[0]), default=0)

    def publish(self, save: SaveId, reports: Sequence[PartReport], *, certified: bool) -> int:
        """The generation's number. Raises what `checkpoint.publish` does."""
        self._probe(Phase.PUBLISH_BEGAN, save.step)
        number = publish(self._store, save, reports, created_s=time.time(), run=self._run, certified=certified)
        self._probe(Phase.PUBLISH_DONE, save.step)
        return number

    def certify(self, generation: int) -> None:
        """Mark a generation certified, in order with the publishing."""
        self.publisher.submit(self._quietly, "certify", lambda: certify(self._store, generation))

    def tidy(self, generation: int, protected: Collection[int]) -> None:
        """After `generation` was published: prune, and copy it on."""
        self.publisher.submit(self._quietly, "prune", lambda: self._prune(protected))
        if self._far is not None:
            state = self._newest = Drain(generation)
            self._drainer.submit(self._drain, state)

    def _quietly(self, what: str, work: Callable[[], None]) -> None:
        """The generation stands whatever becomes of this."""
        try:
            work()
        except (OSError, CheckpointError) as error:
            self._said("checkpoint_pruned", {"generations": [], "freed_bytes": 0, "note": f"{what}: {error}"})

    def _prune(self, protected: Collection[int]) -> None:
        done = prune(self._store, self._retention, protected=protected, known=self._known)
        if done.generations or done.note:
            fields = {"generations": done.generations, "freed_bytes": done.freed_bytes, "note": done.note}
            self._said("checkpoint_pruned", fields)

    def _drain(self, state: Drain) -> None:
        """A place slower than the saves gets the newest generation each time it is free, not all of them."""
        if state is not self._newest or self._far is None:
            return
        began_s, reason = time.monotonic(), ""
        for attempt in range(_TRIES):
            try:
                state.done_bytes = 0
                drain(self._store, self._far, state.generation, progress=state, stop=self._stop.is_set)
                prune(self._far, self._retention)
                break
            except (OSError, CheckpointError) as error:
                reason = f"{type(error).__name__}: {error}"
                self._stop.wait(_RETRY_S * 2**attempt)
        else:
            self._said("checkpoint_failed", {
                "step": -1, "cause": "drain_failed", "url": self._far.url,
                "reason": f"generation {state.generation} was not copied: {reason}",
            })  # fmt: skip
            return
        self._said("checkpoint_drained", {
            "generation": state.generation, "url": self._far.url, "copied_bytes": state.sent_bytes,
            "seconds": time.monotonic() - began_s,
        })  # fmt: skip

    def close(self) -> None:
        """Finish what was begun."""
        with contextlib.suppress(RuntimeError):
            self.publisher.shutdown(wait=True)
            self._drainer.shutdown(wait=True)
