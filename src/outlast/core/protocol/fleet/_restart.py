"""A restarted coordinator: what its predecessor made durable, and what the living say (protocol, 3)."""

from __future__ import annotations

from typing import Any

from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet._asked import recall
from outlast.core.protocol.fleet._planned import switched
from outlast.core.protocol.fleet.change import begin
from outlast.core.protocol.fleet.state import FleetState

__all__ = ["end_again", "reconcile", "recover"]


def recover(c: FleetState, record: m.FleetRecord) -> None:
    """Take over the record. A member of the last view that has no placement was known to be gone, or condemned, when
    the record was written; everybody else has to be heard of before anything is decided."""
    if record.outcome:
        c.ended = record
        return
    c.facts = dict(record.facts)
    c.roster.incarnations = dict(record.incarnations)
    c.ever_formed, c.shortage.stopping, c.saved = record.formed, record.stopping, record.saved
    c.roster.offences, c.roster.fleeting = dict(record.offences), dict(record.fleeting)
    for name, agent in record.placement.items():
        c.roster.add(name, agent, "spawning").address = record.addresses.get(name, "")
    recall(c, record)
    c.view, c.planned = record.view, record.planned
    _recall_outgoing(c, record)
    acting = dict.fromkeys(
        (record.view.members if record.view else ()) + (record.planned.members if record.planned else ())
    )
    if record.ending is not None:
        _end_on(c, record, record.ending)
        return
    c.unheard = set(record.placement) - set(acting)
    for name in acting:
        if name in record.placement:
            c.roster.mark(name, "member")
            c.awaiting.add(name)
        else:
            c.roster.add(name, "", "gone")
            c.disturbed = f"{name} was gone when the coordinator was restarted"
    c.set_views(record.view, record.planned)


def _recall_outgoing(c: FleetState, record: m.FleetRecord) -> None:
    """Members that had left for a view that was not known to have formed: whether anybody carries the state on without
    them is not known yet."""
    c.outgoing = set(c.roster.alive(record.outgoing))
    for name in c.outgoing:
        c.roster.mark(name, "member")
        c.roster.peers[name].leaving = c.leaving = True


def _end_on(c: FleetState, record: m.FleetRecord, ending: m.Ending) -> None:
    """Training is over. Agents say again who has ended, and members that come back are told what they wait for."""
    c.ending = ending
    c.unheard = set(record.placement).difference(record.view.members if record.view is not None else ())
    for name in record.view.members if record.view is not None else ():
        if name not in record.placement:
            c.roster.add(name, "", "gone")
        else:
            c.roster.mark(name, "member")
    c.set_views(record.view, None)
    c.unformed.clear()


def reconcile(c: FleetState) -> None:
    """Everybody has reported or is gone. If all are in one formed view it goes on, else everybody leaves.

    Only the newest durable view can be adopted: an order to enter the planned one may still be under way, and what it
    does must not be a surprise.
    """
    target = c.planned or c.view
    if target is None:
        return
    for name in target.members:
        peer = c.roster.peers[name]
        if not peer.alive or peer.view != target.id or (peer.left is not None and peer.left >= target.id):
            c.disturbed = c.disturbed or "the coordinator was restarted in the middle of a change"
    if len(c.orders_heard) > 1:
        c.disturbed = c.disturbed or "the coordinator was restarted before all had heard its newest order"
    c.orders_heard.clear()
    cause, c.disturbed = c.disturbed, ""
    if cause:
        begin(c, cause)
    elif c.planned is not None:
        switched(c)


def end_again(c: FleetState, record: m.FleetRecord) -> None:
    """The predecessor had ended the run durably; its farewells may not have arrived."""
    well = record.outcome == "finished"
    c.ended, c.over, c.farewell = None, True, record.outcome if well else record.detail or record.outcome
    outcome: Any = record.outcome
    c.tell(sorted(record.placement), m.Close(epoch=c.epoch, reason=c.farewell))
    stop = m.Stop(epoch=c.epoch, reason=record.outcome, exit_code=record.exit_code)
    c.tell(sorted(set(record.placement.values())), stop)
    c.end(m.Finish(outcome=outcome, exit_code=record.exit_code, steps=record.steps, detail=record.detail))
