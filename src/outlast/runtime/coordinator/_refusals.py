"""Counts of who was refused at the sockets of a run, and when a count is written down."""

from __future__ import annotations

from collections.abc import Callable

from outlast.runtime.transport.seal import FORGED
from outlast.runtime.transport.tls_socket import about_certificates

__all__ = ["Refusals"]


class Refusals:
    """Counts of who was refused, by place ("": a proved connection) and reason (there are few). An event at the first,
    the tenth, the hundredth, and at the end: a flood of strangers does not become a flood of events."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._counts: dict[tuple[str, str], int] = {}
        self._told: dict[tuple[str, str], int] = {}
        self._first: dict[tuple[str, str], str] = {}

    def add(self, place: str, reason: str, who: str) -> None:
        self.note(place, reason, who, self._counts.get((place, reason), 0) + 1)

    def note(self, place: str, reason: str, who: str, count: int) -> None:
        """So many by now. `who`: the first."""
        key = place, reason
        self._first.setdefault(key, who)
        self._counts[key] = max(count, self._counts.get(key, 0))
        if self._counts[key] >= 10 * self._told.get(key, 0.1):
            self._tell(key)

    def close(self) -> None:
        for key, count in self._counts.items():
            if count > self._told[key]:
                self._tell(key)

    def _tell(self, key: tuple[str, str]) -> None:
        count = self._told[key] = self._counts[key]
        place, reason = key
        known = reason == FORGED or about_certificates(reason)  # whose frames have codes has proved who it is
        stranger = bool(place) and not known
        self._write("refused", place=place, reason=reason, peer=self._first[key], count=count, stranger=stranger)
