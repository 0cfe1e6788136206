"""What a member does for joiners: a snapshot when it is ordered, then its slices of every outcome (protocol, 18).

Sends from the streams' own threads, so a joiner's slowness or death costs no step. Decides nothing. Each rank of a
replica serves the rank of equal place of one that joins, with what lies here: the lead says when (`LaneDonor` is told
the same on all of them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from outlast.core.phases import Phase
from outlast.core.protocol import Member, Order, ServeId, View
from outlast.core.protocol.step.loop_copies import LoopCopies
from outlast.runtime.joining._feeds import Flushed, Share, Stream
from outlast.runtime.training.frozen import OutcomeShare
from outlast.runtime.transport.endpoints import lane_address
from outlast.runtime.transport.rank_words import CloseStreams, FeedJoiners, FeedWhole, FlushStreams, ServeJoiner

if TYPE_CHECKING:
    from torch import Tensor

    from outlast.runtime.host.environment import Environment
    from outlast.runtime.training.engine import Engine
    from outlast.runtime.training.loop_state import Lived
    from outlast.runtime.training.step_checks import Meta

__all__ = ["Donor", "LaneDonor"]


class LaneDonor:
    """What one rank does. `streams`: by joiner."""

    def __init__(self, env: Environment, engine: Engine, enter: Callable[..., None]) -> None:
        self.env, self.engine, self.enter = env, engine, enter
        self.streams: dict[str, Stream] = {}
        self._copies = LoopCopies()

    def _stream(self, joiner: str, address: str, serve: ServeId = (0, 0)) -> Stream:
        if joiner not in self.streams:
            env, at = self.env, lane_address(address, self.env.place)
            self.streams[joiner] = Stream(env.run_id, env.me, joiner, at, env.secret, serve, env.tls)
        return self.streams[joiner]

    def serve(self, order: ServeJoiner, committed: int) -> None:
        """Freeze my share of the state as it is now, for a joiner."""
        self.enter(Phase.SERVE_SNAPSHOT)
        old = self.streams.pop(order.joiner, None)
        if old is not None:
            old.close()
        frozen, lo, hi, total, plain = self.engine.freeze(order.index, order.count)
        newest = self.engine.meta if order.told else None
        meta = msgspec.msgpack.encode(newest) if newest is not None else b""
        given = self.engine.loop.given_of(newest.step) if newest is not None else b""
        share = Share(committed, lo, hi, total, plain if order.index == 0 else b"", meta, given)
        self._stream(order.joiner, order.address, order.serve).put(share, None, frozen)

    def keep(self, order: FeedJoiners, meta: Meta) -> None:
        """A step is decided. Before it is applied, whenever its outcome is fed: keep what the loops had made of their
        state by then, if somebody is fed it, or may be handed it."""
        wanted = self._copies.decided(meta.step, feeding=bool(self.streams), last=order.last)
        self.engine.loop.keep(meta.step if wanted else None)

    def feed(self, order: FeedJoiners, meta: Meta) -> None:
        """My slices of a decided outcome to every joiner that I serve, with what was kept."""
        live = self.streams = {name: stream for name, stream in self.streams.items() if not stream.broken}
        lived = self.engine.loop.kept
        if not live:
            return
        self.enter(Phase.SERVE_STREAM)
        slices = [(b.index, *b.slices(order.count)[order.index]) for b in self.engine.layout.buckets]
        outcome, payload = self.engine.portion(meta, slices, whole=False)
        outcome = msgspec.structs.replace(outcome, last=order.last)
        if order.index == 0 and lived is not None:
            outcome = _with_lived(outcome, payload, lived)
        for stream in live.values():
            stream.put(outcome, payload)

    def feed_whole(self, order: FeedWhole) -> None:
        """Spares that a new view feeds learn its last outcome whole: the old view's slices may have gone with their
        sender."""
        meta, kept = self.engine.newest, self.engine.loop.kept
        for name, address in order.addresses.items():
            stream = self._stream(name, address)  # a spare that became a member has none yet
            if order.whole and meta is not None:
                outcome, payload = self.engine.portion(meta, (), whole=True)
                if kept is not None and kept.step == meta.step:
                    outcome = _with_lived(outcome, payload, kept)
                stream.put(outcome, payload)

    def flush_for(self, view: View) -> None:
        """Nothing of the old view follows; who is a member now is fed no more, nor is who was still catching up."""
        self._copies.flushed()
        for name, stream in list(self.streams.items()):
            if name in view.members or name in view.attached:
                stream.put(Flushed(view.id))
            if name not in view.attached:
                stream.close()
                del self.streams[name]

    def close_all(self) -> None:
        """Send what is queued, then end all streams."""
        for stream in self.streams.values():
            stream.close()
        self.streams.clear()


class Donor(LaneDonor):
    """The member's: says what each of its ranks is to do. `others` takes a word for them."""

    def __init__(
        self,
        env: Environment,
        engine: Engine,
        member: Member,
        enter: Callable[..., None],
        others: Callable[[Any], None] = lambda word: None,
    ) -> None:
        super().__init__(env, engine, enter)
        self.member, self._others = member, others

    def carry_out(self, order: Order, view: View) -> None:
        """Freeze my share of the state for a joiner, if that is the order."""
        if order.kind == "serve":
            index = view.members.index(self.env.me)
            told = index == 0 and not self.member.held_back  # the loops are where the newest step left them
            address = self.member.contacts.get(order.joiner, "")
            word = ServeJoiner(order.joiner, address, order.serve, index, len(view.members), told)
            self._others(word)
            self.serve(word, self.member.committed)

    def feeding(self, view: View) -> FeedJoiners:
        """What each rank is to do for joiners with the outcome that has just been decided."""
        return FeedJoiners(view.members.index(self.env.me), len(view.members), self.member.switching)

    def formed(self, view: View) -> None:
        """The view works: its first member has the newest outcome for the spares that hang on it."""
        whole = view.members[0] == self.env.me and self.member.keeps_output
        if self.engine.late is not None and self.engine.robust is not None:
            whole = False  # its rows' momentum is not applied yet
        word = FeedWhole({name: self.member.contacts.get(name, "") for name in view.attached}, whole)
        self._others(word)
        self.feed_whole(word)

    def flush(self, view: View) -> None:
        """As `flush_for`, on all ranks."""
        self._others(FlushStreams(view))
        self.flush_for(view)

    def close(self) -> None:
        """As `close_all`, on all ranks."""
        self._others(CloseStreams())
        self.close_all()


def _with_lived(outcome: OutcomeShare, payload: list[Tensor], lived: Lived) -> OutcomeShare:
    payload.append(lived.data)
    return msgspec.structs.replace(outcome, lived=lived.plain)
