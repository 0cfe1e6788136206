"""The order of one step's exchange in one member, bucket by bucket: what is awaited next, and what follows from it.

    sums       everybody's sums of a bucket are here; those of the first prove that all have committed the step before
    reduce     my slice of it
    choose     all are reduced: a robust rule chooses by what is said of all buckets
    slices     what everybody reduced of a bucket is here
    gather     take it
    check      all are gathered: are the slices of others what their sums give?

Whoever owns it waits as it can, or looks without waiting, and says `arrived`: planes over memory
(`runtime/exchange/plane.py`) and over networks (`runtime/exchange/c10d_plane.py`), those of rules, and the adversary's
(`prove/adversary/_exchange.py`). In two levels several buckets are under way at once: `host_order.py`.
"""

from __future__ import annotations

from typing import Literal, Protocol

__all__ = ["ExchangeOrder", "ExchangeStages"]


class ExchangeStages(Protocol):
    """What is done in each stage. None of them waits for a bucket that has not arrived."""

    def scattered(self) -> None:
        """All members have offered sums of this step."""

    def reduce(self, bucket: int) -> None: ...
    def choose(self) -> None: ...
    def gather(self, bucket: int) -> None: ...
    def check(self) -> None: ...


class ExchangeOrder:
    """Where an exchange of `num_buckets` is. `awaits`, `bucket`: what it goes on with; None: it is over."""

    def __init__(self, num_buckets: int, stages: ExchangeStages) -> None:
        self.num_buckets, self._stages = num_buckets, stages
        self.awaits: Literal["sums", "slices"] | None = "sums"
        self.bucket = 0

    def reduces_before(self, bucket: int) -> bool:
        """Whether an earlier bucket is yet to be reduced."""
        return self.awaits == "sums" and self.bucket < bucket

    def arrived(self) -> None:
        """What was awaited is here: do what follows from it."""
        if self.awaits == "sums":
            if self.bucket == 0:
                self._stages.scattered()
            self._stages.reduce(self.bucket)
        else:
            self._stages.gather(self.bucket)
        self.bucket += 1
        if self.bucket == self.num_buckets:
            self.end()

    def end(self) -> None:
        """The stage is over with all buckets."""
        if self.awaits == "sums":
            self._stages.choose()
            self.awaits, self.bucket = "slices", 0
        else:
            self._stages.check()
            self.awaits = None
