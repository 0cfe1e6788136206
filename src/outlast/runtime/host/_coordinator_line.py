"""The launcher's own connection to the coordinator, wherever that is: to tell it what only the launcher knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from outlast.config import TlsFiles
from outlast.errors import WireRefusal
from outlast.runtime.transport.coordinator_place import CoordinatorPlace
from outlast.runtime.transport.endpoints import data_address
from outlast.runtime.transport.frames import Link
from outlast.runtime.transport.tls import tls_of

__all__ = ["CoordinatorLine", "own_endpoint"]


def own_endpoint(host: str, port: int, files: TlsFiles | None) -> str:
    """The address behind the endpoint, at which this host's own processes, too, take its certificate. Raises
    ConfigError, EnvironmentFault."""
    address, tls = data_address(host, (host, port), "the endpoint"), tls_of(files)
    if tls is not None:
        tls.check_own(address)
    return address


class CoordinatorLine:
    """Tells the coordinator what only the launcher knows. What cannot be told is dropped, and the connection with it.
    `place`: None while there is no coordinator; `dial`: how one is called."""

    def __init__(
        self,
        place: CoordinatorPlace | None = None,
        secret: bytes = b"",
        run: str = "",
        files: TlsFiles | None = None,
        dial: Callable[..., Link] = Link,
    ) -> None:
        self._place, self._secret, self._run, self._dial, self._tls = place, secret, run, dial, tls_of(files)
        self._link: Link | None = None
        self._at, self._told = ("", 0), 0

    def tell(self, messages: Sequence[Any], timeout_s: float) -> None:
        """Say these."""
        if self._place is None:
            return
        try:
            if self._moved():
                self.drop()
            if self._link is None:
                self._at = self._place.now()
                self._link = self._dial(self._at, self._secret, "launcher", "launcher", timeout_s, self._run, self._tls)
            for message in messages:
                self._link.send(message)
        except (OSError, WireRefusal, msgspec.DecodeError):
            self.drop()

    def tell_all(self, messages: Sequence[Any], timeout_s: float) -> None:
        """Say those of a growing list that were not said on this connection; all of them on a new one."""
        new = messages[self._told if self._link is not None and not self._moved() else 0 :]
        self.tell(new, timeout_s)
        self._told = len(messages) if self._link is not None else 0

    def elsewhere(self, address: tuple[str, int]) -> bool:
        """Whether the coordinator is no longer at this address."""
        return self._place is not None and self._place.now() != address

    def _moved(self) -> bool:
        return self._place is not None and self._at != self._place.now()

    def drop(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link, self._told = None, 0
