"""A donor's side in the simulated world: streams to joiners, a snapshot on order, outcomes while they catch up."""

from __future__ import annotations

from outlast.core.protocol import Order, View
from outlast.prove.adversary._mesh import Feed
from outlast.prove.adversary._surroundings import Owner

__all__ = ["SimulatedDonor"]


class SimulatedDonor:
    """One replica's streams, by joiner."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.feeds: dict[str, Feed] = {}

    def feed_to(self, joiner: str) -> Feed:
        feed = self.feeds.get(joiner)
        if feed is None or feed.broken:
            feed = self.feeds[joiner] = Feed(self.owner.world, self.owner.name, joiner)
            feed.put("begin", None)
        return feed

    def serve(self, order: Order, index: int, n: int) -> None:
        owner, old = self.owner, self.feeds.pop(order.joiner, None)
        if old is not None:
            old.close()
        owner.world.point("serve", owner)
        share = (order.serve, owner.member.committed, index, n, owner.state)
        self.feed_to(order.joiner).put("share", share, owner.world.scenario.snapshot_s)

    def flush(self, view: View) -> None:
        """Nothing of the old view follows; who is not attached to the new one is fed no more."""
        for name in list(self.feeds):
            if name in view.members or name in view.attached:
                self.feeds[name].put("flushed", view.id)
            if name not in view.attached:
                self.feeds.pop(name).close()
