"""Views as differences with a digest, so that a change in a large fleet costs its change and not its size (rule 4).

A delta names what it is a difference from and ends in the digest of what it must come to; whoever holds another base,
or comes to another view, learns it here and asks for the whole. O(members) to make and to apply, O(changes) on a wire.
"""

from __future__ import annotations

import zlib

import msgspec

from outlast.core.protocol.types import View, ViewId
from outlast.errors import ProtocolViolation

__all__ = ["ViewDelta", "apply", "diff", "digest"]


class ViewDelta(msgspec.Struct, frozen=True, kw_only=True):
    """`removed`: positions in the base's order. `added`: (position in the result, member), in this order."""

    id: ViewId
    base: ViewId
    removed: tuple[int, ...]
    added: tuple[tuple[int, str], ...]
    attached: tuple[str, ...]
    digest: int
    relieved: tuple[str, ...] = ()
    work: tuple[int, ...] = ()
    held: bool = False
    saved: int = 0


def digest(view: View) -> int:
    """A 32-bit checksum of a view: its number, the order of the members, the spares attached, the first step, who
    reduces nothing, shares, whether it computes, and what is saved."""
    said = view.id, view.members, view.attached, view.start, view.relieved, view.work, view.held, view.saved
    return zlib.crc32(msgspec.msgpack.encode(said))


def diff(base: View, view: View) -> ViewDelta:
    """What turns `base` into `view`. A member that changed its place is removed and added."""
    kept = _kept(base, view)
    removed = tuple(index for index, name in enumerate(base.members) if name not in kept)
    added = tuple((index, name) for index, name in enumerate(view.members) if name not in kept)
    return ViewDelta(
        id=view.id,
        base=base.id,
        removed=removed,
        added=added,
        attached=view.attached,
        digest=digest(view),
        relieved=view.relieved,
        work=view.work,
        held=view.held,
        saved=view.saved,
    )


def _kept(base: View, view: View) -> set[str]:
    """Members of both whose order among each other is the same: greedily, those that move forward together."""
    place = {name: index for index, name in enumerate(base.members)}
    kept: set[str] = set()
    last = -1
    for name in view.members:
        at = place.get(name, -1)
        if at > last:
            kept.add(name)
            last = at
    return kept


def apply(base: View, delta: ViewDelta) -> View:
    """The view that the delta describes. Raises ProtocolViolation if `base` is not what it is a difference from."""
    if base.id != delta.base:
        raise ProtocolViolation(f"a difference from view {delta.base} cannot be applied to view {base.id}")
    removed = set(delta.removed)
    staying = iter([name for index, name in enumerate(base.members) if index not in removed])
    added = dict(delta.added)
    size = len(base.members) - len(removed) + len(added)
    members = tuple(added[index] if index in added else next(staying, "") for index in range(size))
    view = View(
        id=delta.id,
        members=members,
        attached=delta.attached,
        relieved=delta.relieved,
        work=delta.work,
        held=delta.held,
        saved=delta.saved,
    )
    if digest(view) != delta.digest:
        raise ProtocolViolation(f"view {delta.id} came to another digest than its sender's", remedy="ask for it whole")
    return view
