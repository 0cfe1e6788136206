"""Telling members their next view: as a difference to who acted in the one before it, whole to everybody else (rule 4).

Who cannot apply the difference (it holds another base, or comes to another digest) asks for the whole and is answered:
a difference saves bytes, and nothing depends on it. The member's end is `core/protocol/rebuild.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from outlast.core.protocol import messages as m
from outlast.core.protocol.delta import diff
from outlast.core.protocol.fleet.state import FleetState
from outlast.core.protocol.types import Order, View

__all__ = ["tell_order", "tell_view", "tell_whole"]


def tell_view(c: FleetState, base: View | None, view: View, cause: str) -> None:
    """`base`: the view that most of its members acted in last."""
    whole = view.members
    if base is not None:
        acted = frozenset(base.members)
        known = tuple(name for name in view.members if name in acted)
        whole = tuple(name for name in view.members if name not in acted)
        c.tell(known, m.Amend(epoch=c.epoch, delta=diff(base, view), cause=cause, **_contacts(c, view, acted)))
    if whole:
        c.tell(whole, c.install_message(view, cause))


def tell_order(c: FleetState, view: View, order: Order) -> None:
    """The planned switch from `view`: everybody in it holds it, who comes in does not."""
    assert order.next is not None
    acted = frozenset(view.members)
    new = _contacts(c, order.next, acted)
    brief = msgspec.structs.replace(order, next=None)
    c.tell(view.members, m.Take(epoch=c.epoch, order=brief, delta=diff(view, order.next), **new))
    incoming = tuple(name for name in order.next.members if name not in acted)
    if incoming:
        c.tell(incoming, m.Take(epoch=c.epoch, order=order, **c.contacts(order.next)))


def _contacts(c: FleetState, view: View, known: frozenset[str]) -> dict[str, Any]:
    """Addresses and hosts of who is not known, and whose store is used."""
    whole = c.contacts(view)
    for table in ("addresses", "hosts"):
        whole[table] = {name: value for name, value in whole[table].items() if name not in known}
    return whole


def tell_whole(c: FleetState, now_s: float, asked: m.Whole) -> None:
    """Somebody could not apply a difference. If the view was superseded meanwhile, it hears of that one anyway."""
    view, planned = c.view, c.planned
    if view is not None and asked.view == view.id and asked.member in view.members:
        c.tell([asked.member], c.install_message(view, "asked for"))
    elif view is not None and planned is not None and asked.view == planned.id:
        order = Order(view=view.id, number=c.orders, kind="switch", next=planned)
        c.tell([asked.member], m.Take(epoch=c.epoch, order=order, **c.contacts(planned)))
