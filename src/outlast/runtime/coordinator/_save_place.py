"""Where a run's saves go, for its coordinator: learnt from the facts that its members share, opened, and told to them.

Its store may hang or refuse, which is said in the journal and never reaches membership. No torch.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from outlast.checkpoint.threads import Threads
from outlast.config import RunConfig
from outlast.core.phases import Phase
from outlast.core.protocol import Coordinator, ViewId
from outlast.journal import Journal
from outlast.runtime.coordinator._publisher import Archive
from outlast.runtime.settings.head_settings import recorded
from outlast.runtime.settings.save_settings import TIMEOUT_S, SaveSettings
from outlast.runtime.transport import save_messages as wire

__all__ = ["SavePlace", "on_thread"]

_AGAIN_S = 30.0  # between two tries to open a store that refuses


def on_thread(
    pool: concurrent.futures.Executor,
    work: Callable[[], Any],
    then: Callable[[concurrent.futures.Future[Any]], None],
    loop: asyncio.AbstractEventLoop,
) -> None:
    """Do `work` on a thread of the pool, and `then` on the loop."""
    pool.submit(work).add_done_callback(lambda done: loop.call_soon_threadsafe(then, done))


class SavePlace:
    """Opens the archive of a run's saves once the members have said where it is, and tells them by how much the epochs
    of saves are higher than the run's (`base`). `opened()` is called on the loop when both are known."""

    def __init__(
        self,
        journal: Journal,
        coordinator: Coordinator,
        *,
        run: str,
        config: RunConfig,
        write: Callable[..., None],
        tell: Callable[[Iterable[str], Any], None],
        probe: Callable[[Phase, int], None],
        opened: Callable[[], None],
    ) -> None:
        self._journal, self._coordinator, self._run, self._config = journal, coordinator, run, config
        self._write, self._tell, self._probe, self._when_open = write, tell, probe, opened
        self.settings: SaveSettings | None = None
        self.archive: Archive | None = None
        self.base: int | None = None
        self._loop = asyncio.get_running_loop()
        self._opening = Threads(1, "outlast-open")

    @property
    def timeout_s(self) -> float:
        """How long the store, or a writer, may give no sign of life."""
        return self.settings.timeout_s if self.settings is not None else TIMEOUT_S

    @property
    def chooses(self) -> bool:
        """Whether when to save is left to outlast; False until the archive is open."""
        return self.base is not None and self.settings is not None and not self.settings.every

    @property
    def url(self) -> str:
        """The archive's; "" until it is open."""
        return self.archive.url if self.archive is not None else ""

    def counted(self, view: ViewId) -> ViewId:
        """A view as saves count it, also where an earlier coordinator alone has opened the place. Raises
        EnvironmentFault."""
        base = self.base if self.base is not None else int(self._journal.get(wire.SAVE_EPOCHS) or 0)
        return ViewId(base + view.epoch, view.n)

    def look(self) -> None:
        """After every event: whether the members have said by now where saves go."""
        shown = self._coordinator.facts.get("checkpoints")
        if self.settings is None and shown:
            self.settings = msgspec.json.decode(shown, type=SaveSettings)
            self._open()

    def greet(self, name: str) -> None:
        """Tell a member that said hello the base, if it is known."""
        if self.base is not None:
            self._tell([name], wire.SaveBase(epoch=self._coordinator.epoch, base=self.base))

    def _open(self) -> None:
        assert self.settings is not None
        extra = recorded(self._config, self.settings, self._coordinator.facts)
        archive = Archive(self.settings, self._run, self._said, self._probe, extra, lambda: self._journal.held)
        late = self._loop.call_later(self.timeout_s, self._not_opened, archive.url)
        on_thread(self._opening, archive.newest_epoch, lambda done: self._opened(archive, done, late), self._loop)

    def _not_opened(self, url: str) -> None:
        reason = f"it has not answered for {self.timeout_s:g} s; nothing is saved until it does"
        self._write("checkpoint_failed", step=-1, cause="unreadable", reason=reason, url=url)

    def _opened(self, archive: Archive, done: concurrent.futures.Future[int], late: asyncio.TimerHandle) -> None:
        late.cancel()  # a refusal is an answer, too
        error = done.exception()
        if error is not None:
            self._write("checkpoint_failed", step=-1, cause="unreadable", reason=str(error), url=archive.url)
            self._loop.call_later(_AGAIN_S, self._open)
            return
        epoch, stored = self._coordinator.epoch, self._journal.get(wire.SAVE_EPOCHS)
        base = int(stored) if stored else done.result()
        if stored is None and not self._journal.put(epoch, wire.SAVE_EPOCHS, str(base).encode()):
            return  # a newer coordinator is there
        self.archive, self.base = archive, base
        self._tell(list(self._coordinator.roster.peers), wire.SaveBase(epoch=epoch, base=base))
        self._when_open()

    def _said(self, kind: str, fields: dict[str, Any]) -> None:
        """From the archive's threads."""
        self._loop.call_soon_threadsafe(lambda: self._write(kind, **fields))

    async def close(self) -> None:
        """Finish what is being published and copied; nothing new is begun."""
        self._opening.leave(0.0)
        if self.archive is not None:
            await asyncio.to_thread(self.archive.close)
