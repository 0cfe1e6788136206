"""A donor's side in the simulated world: streams to joiners, a snapshot on order, outcomes while they catch up."""

from __future__ import annotations

from outlast.core.protocol import Order, ServeId, View
from outlast.prove.adversary import _algebra as algebra
from outlast.prove.adversary._mesh import Feed
from outlast.prove.adversary._spare import Portion, SentOutcome
from outlast.prove.adversary._surroundings import Owner

__all__ = ["SimulatedDonor"]


class SimulatedDonor:
    """One replica's streams, by joiner."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.feeds: dict[str, Feed] = {}

    def _feed_to(self, joiner: str, serve: ServeId = (0, 0)) -> Feed:
        feed = self.feeds.get(joiner)
        if feed is None or feed.broken:
            feed = self.feeds[joiner] = Feed(self.owner.world, self.owner.name, joiner)
            feed.put("begin", serve)
        return feed

    def formed(self, view: View) -> None:
        """A view works: the spares that hang on it learn its last outcome whole, from its first member."""
        member = self.owner.member
        for name in view.attached:
            feed = self._feed_to(name)
            if view.members[0] == self.owner.name and member.keeps_output and member.committed:
                whole = {(0, len(self.owner.out)): tuple(self.owner.out)}
                feed.put("outcome", SentOutcome(member.committed - 1, whole, self.owner.norm, whole=True))

    def decided(self, view: View, step: int) -> None:
        """My slices of an outcome, to every joiner that I serve: it applies them while I do."""
        self.owner.copies.decided(step, feeding=bool(self.feeds), last=self.owner.member.switching)
        self.feeds = {name: feed for name, feed in self.feeds.items() if not feed.broken}
        if not self.feeds:
            return
        lo, hi = algebra.slice_of(view.members.index(self.owner.name), len(view.members))
        spans = [(b * algebra.BLOCKS + lo, b * algebra.BLOCKS + hi) for b in range(algebra.BUCKETS)]
        mine = {(first, last): tuple(self.owner.out[first:last]) for first, last in spans}
        for feed in self.feeds.values():
            feed.put("outcome", SentOutcome(step, mine, self.owner.norm, last=self.owner.member.switching))

    def carry_out(self, order: Order, view: View) -> None:
        """Freeze my share of the state for a joiner, if that is the order."""
        if order.kind == "serve":
            self._serve(order, view.members.index(self.owner.name), len(view.members))

    def _serve(self, order: Order, index: int, n: int) -> None:
        owner, old = self.owner, self.feeds.pop(order.joiner, None)
        if old is not None:
            old.close()
        owner.world.point("serve", owner)
        share = Portion(owner.member.committed, index, n, owner.state)
        self._feed_to(order.joiner, order.serve).put("share", share, owner.world.scenario.snapshot_s)

    def flush(self, view: View) -> None:
        """Nothing of the old view follows; who is not attached to the new one is fed no more."""
        self.owner.copies.flushed()
        for name in list(self.feeds):
            if name in view.members or name in view.attached:
                self.feeds[name].put("flushed", view.id)
            if name not in view.attached:
                self.feeds.pop(name).close()
