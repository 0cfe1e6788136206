"""A member's end of `fleet/_telling.py`: its next view from the one it holds and a difference (protocol, 4).

Who cannot apply the difference (it holds another base, or comes to another digest) asks for the whole and is answered.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from outlast.core.protocol import messages as m
from outlast.core.protocol.delta import ViewDelta, apply
from outlast.core.protocol.types import Order, View
from outlast.errors import ProtocolViolation

__all__ = ["rebuilt", "rebuilt_order"]


def rebuilt(base: View | None, contacts: Mapping[str, str], message: m.Amend) -> m.Install | None:
    """The Install that the difference stands for; None: ask for the whole."""
    view = _applied(base, message.delta)
    if view is None:
        return None
    addresses = {name: contacts[name] for name in view.members + view.attached if name in contacts} | message.addresses
    if any(name not in addresses for name in view.members):
        return None
    return m.Install(
        view=view,
        addresses=addresses,
        hosts=message.hosts,
        store=message.store,
        cause=message.cause,
        epoch=message.epoch,
    )


def rebuilt_order(base: View | None, message: m.Take) -> Order | None:
    """The order to enter the view that the difference describes; None: ask for the whole."""
    assert message.delta is not None
    view = _applied(base, message.delta)
    return msgspec.structs.replace(message.order, next=view) if view is not None else None


def _applied(base: View | None, delta: ViewDelta) -> View | None:
    if base is None or base.id != delta.base:
        return None
    try:
        return apply(base, delta)
    except ProtocolViolation:
        return None
