"""Exchanges in two levels as they must not be: each variant does not wait for a part of what its order waits for."""

from __future__ import annotations

from collections.abc import Iterator

from outlast.core.protocol.step.host_order import Awaited, HostOrder, HostStages
from outlast.prove.adversary._variants import Variant

__all__ = ["LEVELS_BROKEN"]


class _Alone(HostOrder):
    def can_send(self) -> bool:
        return self.sent < self.offered


class NeighboursUnawaited(Variant):
    """A host's sums are added before all of its members have offered theirs."""

    def host_order(self, num_buckets: int, stages: HostStages) -> HostOrder:
        return _Alone(num_buckets, stages)


class _Forward(HostOrder):
    def can_reduce(self) -> bool:
        return self.reduced < self.sent and self._stages.sums_here(self.reduced)


class IdleUnawaited(Variant):
    """Whoever has the sums that it needs reduces them, and asks nobody who sends it none."""

    def host_order(self, num_buckets: int, stages: HostStages) -> HostOrder:
        return _Forward(num_buckets, stages)


class _Blind(HostOrder):
    def rest(self) -> Iterator[tuple[Awaited, int]]:
        for what, bucket in super().rest():
            if what != "brought":
                yield what, bucket


class LanesUnawaited(Variant):
    """What others of the host bring is read before they have said that it is there."""

    def host_order(self, num_buckets: int, stages: HostStages) -> HostOrder:
        return _Blind(num_buckets, stages)


class _Shallow(HostOrder):
    def can_bring(self) -> bool:
        return self.brought < self.reduced


class LanesClaimed(Variant):
    """Whoever has reduced its own slice tells its host that what others reduce is there."""

    def host_order(self, num_buckets: int, stages: HostStages) -> HostOrder:
        return _Shallow(num_buckets, stages)


LEVELS_BROKEN: dict[str, tuple[type[Variant], int]] = {
    "neighbours-unawaited": (NeighboursUnawaited, 2000),
    "idle-unawaited": (IdleUnawaited, 2000),
    "lanes-unawaited": (LanesUnawaited, 2000),
    "lanes-claimed": (LanesClaimed, 2000),
}
