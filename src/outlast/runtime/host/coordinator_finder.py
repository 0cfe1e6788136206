"""Where the coordinator of a run is, for who is not in the run yet: at the place it was told, or where the record says.

With a record that hosts share the coordinator may have moved to any of them, and move again, so the record is asked
each time. What it says is only where to call: whoever answers has to prove that it knows the run's secret. No torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from outlast.errors import EnvironmentFault
from outlast.journal import RunsInEtcd, Unreachable, access_of
from outlast.runtime.transport.endpoints import read_host_port

__all__ = ["CoordinatorFinder"]

_ASK_S, _AGAIN_S = 2.0, 0.2


class CoordinatorFinder:
    """`told`: HOST:PORT, or the run's record, etcd://…; `environ`: of this host, for access to it. ConfigError."""

    def __init__(self, told: str, secret: bytes, environ: Mapping[str, str]) -> None:
        self.told, self._runs = told, RunsInEtcd(access_of(told, environ), secret) if "://" in told else None
        self._there = ("", 0) if self._runs is not None else read_host_port(told, "--join")

    @property
    def asks(self) -> bool:
        """Whether it may find another place the next time."""
        return self._runs is not None

    def now(self) -> tuple[str, int]:
        """Raises OSError where it cannot be found now, and RunsInEtcd.coordinator's other errors."""
        if self._runs is None:
            return self._there
        try:
            claim = self._runs.coordinator(_ASK_S)
        except Unreachable as error:  # names another member each time
            raise OSError(error.refused or "no member of etcd answers") from error
        if claim is None:
            raise OSError("no run with this secret is there that is not over")
        return read_host_port(claim.address)

    def within(self, seconds: float) -> tuple[str, int]:
        """EnvironmentFault if it is not found in this time."""
        until_s, pause = time.monotonic() + seconds, threading.Event()
        while True:
            try:
                return self.now()
            except OSError as error:
                if time.monotonic() > until_s:
                    raise EnvironmentFault(
                        f"no coordinator by the record at {self.told} in {seconds:g} s: {error}",
                        remedy="see whether the run goes on, and whether this is its secret",
                    ) from error
            pause.wait(_AGAIN_S)

    def close(self) -> None:
        if self._runs is not None:
            self._runs.close()
