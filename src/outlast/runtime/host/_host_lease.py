"""For how long an agent on another host than the coordinator's may go without its word: others may have gone on."""

from __future__ import annotations

from outlast.config import RunConfig
from outlast.runtime.host.silence import excused

__all__ = ["HostLease"]


class HostLease:
    """`lease_s`: after that its replicas end; `patience_s`: after that the agent does."""

    def __init__(self, config: RunConfig, now_s: float) -> None:
        self.lease_s = config.lease_s
        self.patience_s = config.lease_s + config.start_s
        self._answered_s = self._looked_s = now_s

    def answered(self, sent_s: float) -> None:
        """The coordinator has answered what was sent then, which may have lain here unread through a pause."""
        self._answered_s = max(self._answered_s, sent_s)

    def tried(self, for_s: float) -> None:
        """A call took so long, in vain or not: that was no pause."""
        self._looked_s += for_s

    def alone_s(self, now_s: float) -> float:
        """Return for how long nothing was answered. Call it at each heartbeat: a pause was this process's own."""
        paused_s, self._looked_s = now_s - self._looked_s, now_s
        self._answered_s = excused(self._answered_s, paused_s, now_s, self.lease_s)
        return now_s - self._answered_s
