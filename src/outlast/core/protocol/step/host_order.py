"""The order of one step's exchange in two levels in one member (protocol, 33). The sibling of `exchange_order.py`.

Several buckets are under way at once. Each stage takes them in order, and none before the stage above is done with it:

    offer     my sums of a bucket are final
    send      all of my host have offered it: add what I carry of its sums, and send it to who reduces it
    reduce    other hosts' sums of my slice are here, and all members have offered the first bucket, which proves that
              all have committed the step before: reduce it, into memory that my host reads, and send it home
    bring     what other hosts have reduced of what I carry is here: into memory that my host reads
    gather    I have brought all buckets, and my host's members have brought this one: copy it

Whoever owns it says `offer`, and then waits for what `rest` names, one after the other: the plane over memory and
networks (`runtime/exchange/host_plane.py`), and the adversary's (`prove/adversary/_host_exchange.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

__all__ = ["Awaited", "HostOrder", "HostStages"]

Awaited = Literal["near", "all", "sums", "lane", "brought"]
"""What is waited for: offers of my host's members, or of all; other hosts' sums, or what they have reduced (for these
one waits no longer than until anything can be done: `HostOrder.ready`); what my host's members have brought."""


class HostStages(Protocol):
    """What has come, and what is done in each stage. None of them waits."""

    def near_offered(self, bucket: int) -> bool:
        """Whether all of my host have offered this bucket."""

    def all_offered(self) -> bool:
        """Whether all members have offered the first bucket."""

    def sums_here(self, bucket: int) -> bool:
        """Whether other hosts' sums of my slice are here."""

    def lane_here(self, bucket: int) -> bool:
        """Whether what other hosts have reduced of what I carry is here."""

    def scattered(self) -> None:
        """All members have offered sums of this step."""

    def send(self, bucket: int) -> None: ...
    def reduce(self, bucket: int) -> None: ...
    def bring(self, bucket: int) -> None: ...
    def gather(self, bucket: int) -> None: ...


class HostOrder:
    """Where an exchange of `num_buckets` is: how many of them each stage is done with."""

    def __init__(self, num_buckets: int, stages: HostStages) -> None:
        self.num_buckets, self._stages = num_buckets, stages
        self.offered = self.sent = self.reduced = self.brought = 0

    def offer(self) -> None:
        """My sums of the next bucket are offered: do what can be done."""
        self.offered += 1
        self.advance()

    def rest(self) -> Iterator[tuple[Awaited, int]]:
        """What to wait for once all is offered, and the bucket. What follows is done as the next one is asked for."""
        yield "near", 0
        self.advance()
        yield "all", 0
        self.advance()
        while self.brought < self.num_buckets:
            yield ("sums", self.reduced) if self.reduced < self.num_buckets else ("lane", self.brought)
            self.advance()
        for bucket in range(self.num_buckets):
            yield "brought", bucket
            self._stages.gather(bucket)

    def ready(self) -> bool:
        """Whether anything can be done now."""
        return self.can_send() or self.can_reduce() or self.can_bring()

    def advance(self) -> None:
        """Do all that can be done: what others wait for comes first. A bucket counts once its stage is over: one whose
        stage ends the view is not taken for done."""
        while True:
            if self.can_send():
                self._stages.send(self.sent)
                self.sent += 1
            elif self.can_reduce():
                if self.reduced == 0:
                    self._stages.scattered()
                self._stages.reduce(self.reduced)
                self.reduced += 1
            elif self.can_bring():
                self._stages.bring(self.brought)
                self.brought += 1
            else:
                return

    def can_send(self) -> bool:
        return self.sent < self.offered and self._stages.near_offered(self.sent)

    def can_reduce(self) -> bool:
        bucket = self.reduced
        return bucket < self.sent and self._stages.sums_here(bucket) and (bucket > 0 or self._stages.all_offered())

    def can_bring(self) -> bool:
        return self.brought < self.reduced and self._stages.lane_here(self.brought)
