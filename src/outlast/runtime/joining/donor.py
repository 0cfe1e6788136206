"""What a member does for joiners: a snapshot when it is ordered, then its slices of every outcome (protocol, 18).

Sends from the streams' own threads, so a joiner's slowness or death costs no step. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from outlast.core.phases import Phase
from outlast.core.protocol import Member, Order, ServeId, View
from outlast.runtime.joining._feeds import Flushed, Share, Stream
from outlast.runtime.training.frozen import OutcomeShare

if TYPE_CHECKING:
    from torch import Tensor

    from outlast.runtime.host.environment import Environment
    from outlast.runtime.training.engine import Engine
    from outlast.runtime.training.loop_state import Lived
    from outlast.runtime.training.step_checks import Meta

__all__ = ["Donor"]


class Donor:
    """See the module. `streams`: by joiner."""

    def __init__(self, env: Environment, engine: Engine, member: Member, enter: Callable[..., None]) -> None:
        self.env, self.engine, self.member, self.enter = env, engine, member, enter
        self.streams: dict[str, Stream] = {}

    def _stream(self, joiner: str, serve: ServeId = (0, 0)) -> Stream:
        if joiner not in self.streams:
            env, address = self.env, self.member.contacts.get(joiner, "")
            self.streams[joiner] = Stream(env.run_id, env.me, joiner, address, env.secret, serve)
        return self.streams[joiner]

    def carry_out(self, order: Order, view: View) -> None:
        """Freeze my share of the state for a joiner, if that is the order."""
        if order.kind == "serve":
            self.enter(Phase.SERVE_SNAPSHOT)
            old = self.streams.pop(order.joiner, None)
            if old is not None:
                old.close()
            index = view.members.index(self.env.me)
            frozen, lo, hi, total, plain = self.engine.freeze(index, len(view.members))
            meta = b""
            if index == 0 and self.engine.meta is not None and not self.member.held_back:  # the loops are where it says
                meta = msgspec.msgpack.encode(self.engine.meta)
            share = Share(self.member.committed, lo, hi, total, plain if index == 0 else b"", meta)
            self._stream(order.joiner, order.serve).put(share, None, frozen)

    def feed(self, view: View, meta: Meta) -> None:
        """My slices of a decided outcome to every joiner that I serve."""
        live = {name: stream for name, stream in self.streams.items() if not stream.broken}
        self.streams = live
        if not live:
            return
        self.enter(Phase.SERVE_STREAM)
        index = view.members.index(self.env.me)
        slices = [(b.index, *b.slices(len(view.members))[index]) for b in self.engine.layout.buckets]
        outcome, payload = self.engine.portion(meta, slices, whole=False)
        outcome = msgspec.structs.replace(outcome, last=self.member.switching)
        lived = self.engine.loop.copy(meta.step)  # all keep it: who is first now may be gone with the view
        if index == 0:
            outcome = _with_lived(outcome, payload, lived)
        for stream in live.values():
            stream.put(outcome, payload)

    def formed(self, view: View) -> None:
        """Spares that the view feeds learn its last outcome whole, from the first member: the old view's slices may
        have gone with their sender."""
        meta, kept = self.engine.newest, self.engine.loop.kept
        whole = view.members[0] == self.env.me and self.member.keeps_output
        if self.engine.late is not None and self.engine.robust is not None:
            whole = False  # its rows' momentum is not applied yet
        for name in view.attached:
            stream = self._stream(name)  # a spare that became a member has none yet
            if whole and meta is not None:
                outcome, payload = self.engine.portion(meta, (), whole=True)
                if kept is not None and kept.step == meta.step:
                    outcome = _with_lived(outcome, payload, kept)
                stream.put(outcome, payload)

    def flush(self, view: View) -> None:
        """Nothing of the old view follows; who is a member now is fed no more."""
        for name, stream in list(self.streams.items()):
            if name in view.members or name in view.attached:
                stream.put(Flushed(view.id))
            if name not in view.attached:
                stream.close()
                del self.streams[name]

    def close(self) -> None:
        """Send what is queued, then end all streams."""
        for stream in self.streams.values():
            stream.close()
        self.streams.clear()


def _with_lived(outcome: OutcomeShare, payload: list[Tensor], lived: Lived) -> OutcomeShare:
    payload.append(lived.data)
    return msgspec.structs.replace(outcome, lived=lived.plain)
