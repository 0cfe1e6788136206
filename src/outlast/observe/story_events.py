"""The events that a run's story is told from, without the bulk that no story needs: names of members, most progress.

Role: what `outlast why` reads of a run of any length, folded event by event and kept beside the journal. Pure.
Invariants: all that is told by name is here whole; of what comes with every step (`ProgressMade`, `StateCertified`)
fewer than `2 * _SAMPLES` are, evenly spread, each at its own place; a view has its size and no names.
"""

from __future__ import annotations

from operator import itemgetter

import msgspec

from outlast.core import events as ev

__all__ = ["NamelessMembers", "StoryFold", "counted_view"]

_SAMPLES = 1000
_UNTOLD = (ev.StepAnatomy, ev.ReplicaStarted, ev.AgentStarted)
"""What no story tells: the newest words of members are read by themselves, and starts are told in `--all` only."""


class NamelessMembers(list[str]):
    """As many members as a view had, where their names are of no use: it has a length, and nothing in it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_members = count

    def __len__(self) -> int:
        return self.num_members


class _ViewHead(msgspec.Struct, tag_field="kind", tag="view_installed"):
    """A view as it lies in the journal, its names unread."""

    at_s: float
    epoch: int
    n: int
    members: msgspec.Raw
    cause: str
    planned: bool
    num_microbatches: int = 0


_heads = msgspec.json.Decoder(_ViewHead)


def counted_view(body: str | bytes) -> ev.ViewInstalled:
    """The view of a journal's entry with `NamelessMembers`. In a fleet of thousands that takes a tenth of the time that
    names take. Raises msgspec.DecodeError."""
    head = _heads.decode(body)
    names = bytes(head.members)
    count = names.count(b'","') + 1 if b'"' in names else 0
    return ev.ViewInstalled(
        at_s=head.at_s, epoch=head.epoch, n=head.n, members=NamelessMembers(count), cause=head.cause,
        planned=head.planned, num_microbatches=head.num_microbatches,
    )  # fmt: skip


class _Dumped(msgspec.Struct, array_like=True):
    """A `StoryFold` as bytes; of a view the number of its members stands beside it."""

    seen: int
    stride: int
    told: list[tuple[int, int, ev.AnyEvent]]
    sampled: list[tuple[int, ev.AnyEvent]]


class StoryFold:
    """Takes every event once, in the journal's order, with its number there."""

    def __init__(self) -> None:
        self._seen, self._stride = 0, 1  # of what comes with every step each `_stride`-th is kept
        self._told: list[tuple[int, ev.AnyEvent]] = []
        self._sampled: list[tuple[int, ev.AnyEvent]] = []

    def take(self, event: ev.AnyEvent, seq: int) -> None:
        """Fold one event in."""
        if isinstance(event, ev.ProgressMade | ev.StateCertified):
            self._sample(event, seq)
        elif isinstance(event, ev.ViewInstalled):
            self._told.append((seq, _counted(event, len(event.members))))
        elif not isinstance(event, _UNTOLD):
            self._told.append((seq, event))

    def _sample(self, event: ev.AnyEvent, seq: int) -> None:
        if self._seen % self._stride == 0:
            self._sampled.append((seq, event))
        self._seen += 1
        if len(self._sampled) >= 2 * _SAMPLES:
            self._stride *= 2
            del self._sampled[1::2]

    def entries(self) -> list[tuple[int, ev.AnyEvent]]:
        """All that was kept, in order, each with its number."""
        return sorted(self._told + self._sampled, key=itemgetter(0))

    def dump(self) -> bytes:
        """Return all that was kept, for `load`."""
        told = [(seq, *_plain(event)) for seq, event in self._told]
        return msgspec.msgpack.encode(_Dumped(self._seen, self._stride, told, self._sampled))

    def load(self, data: bytes | msgspec.Raw) -> None:
        """Go on from what `dump` returned. Raises msgspec.MsgspecError."""
        kept = msgspec.msgpack.decode(data, type=_Dumped)
        self._seen, self._stride, self._sampled = kept.seen, kept.stride, kept.sampled
        self._told = [
            (seq, _counted(event, count) if isinstance(event, ev.ViewInstalled) else event)
            for seq, count, event in kept.told
        ]


def _plain(event: ev.AnyEvent) -> tuple[int, ev.AnyEvent]:
    if not isinstance(event, ev.ViewInstalled):
        return 0, event
    return len(event.members), msgspec.structs.replace(event, members=[])


def _counted(event: ev.ViewInstalled, count: int) -> ev.ViewInstalled:
    return msgspec.structs.replace(event, members=NamelessMembers(count))
