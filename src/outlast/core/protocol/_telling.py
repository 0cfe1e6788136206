"""Telling members their next view: as a difference to who acted in the one before it, whole to everybody else (rule 4).

Who cannot apply the difference (it holds another base, or comes to another digest) asks for the whole and is answered:
a difference saves bytes, and nothing depends on it. Both ends are here, so that they can be read together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from outlast.core.protocol import _messages as m
from outlast.core.protocol._delta import ViewDelta, apply, diff
from outlast.core.protocol._types import Order, View
from outlast.errors import ProtocolViolation

if TYPE_CHECKING:
    from outlast.core.protocol._coordinator import Coordinator

__all__ = ["rebuilt", "rebuilt_order", "tell_order", "tell_view", "tell_whole"]


# --- the coordinator's end -------------------------------------------------------------------------------------------
def tell_view(c: Coordinator, base: View | None, view: View, cause: str) -> None:
    """`base`: the view that most of its members acted in last."""
    whole = view.members
    if base is not None:
        acted = frozenset(base.members)
        known = tuple(name for name in view.members if name in acted)
        whole = tuple(name for name in view.members if name not in acted)
        c.tell(known, m.Amend(epoch=c.epoch, delta=diff(base, view), cause=cause, **_contacts(c, view, acted)))
    if whole:
        c.tell(whole, c.install_message(view, cause))


def tell_order(c: Coordinator, view: View, order: Order) -> None:
    """The planned switch from `view`: everybody in it holds it, who comes in does not."""
    assert order.next is not None
    acted = frozenset(view.members)
    new = _contacts(c, order.next, acted)
    brief = msgspec.structs.replace(order, next=None)
    c.tell(view.members, m.Take(epoch=c.epoch, order=brief, delta=diff(view, order.next), **new))
    incoming = tuple(name for name in order.next.members if name not in acted)
    if incoming:
        c.tell(incoming, m.Take(epoch=c.epoch, order=order, **c.contacts(order.next)))


def _contacts(c: Coordinator, view: View, known: frozenset[str]) -> dict[str, Any]:
    """Addresses and hosts of who is not known, and whose store is used."""
    whole = c.contacts(view)
    for table in ("addresses", "hosts"):
        whole[table] = {name: value for name, value in whole[table].items() if name not in known}
    return whole


def tell_whole(c: Coordinator, now_s: float, asked: m.Whole) -> None:
    """Somebody could not apply a difference. If the view was superseded meanwhile, it hears of that one anyway."""
    view, planned = c.view, c.planned
    if view is not None and asked.view == view.id and asked.member in view.members:
        c.tell([asked.member], c.install_message(view, "asked for"))
    elif view is not None and planned is not None and asked.view == planned.id:
        order = Order(view=view.id, number=c.orders, kind="switch", next=planned)
        c.tell([asked.member], m.Take(epoch=c.epoch, order=order, **c.contacts(planned)))


# --- the member's end ------------------------------------------------------------------------------------------------
def rebuilt(base: View | None, contacts: Mapping[str, str], message: m.Amend) -> m.Install | None:
    """The Install that the difference stands for; None: ask for the whole."""
    view = _applied(base, message.delta)
    if view is None:
        return None
    addresses = {name: contacts[name] for name in view.members + view.attached if name in contacts} | message.addresses
    if any(name not in addresses for name in view.members):
        return None
    return m.Install(
        view=view, addresses=addresses, hosts=message.hosts, store=message.store, cause=message.cause,
        epoch=message.epoch,
    )  # fmt: skip


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
