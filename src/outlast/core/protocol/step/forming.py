"""How a member comes into a view and what it does there before the first step, in order, as courses.

A course is as in `verdict.py`, with one effect more: `Act`, something that is done here and takes its time. The runtime
carries these courses out over sockets and streams (`runtime/member/_forming.py`), the adversary in virtual time
(`prove/adversary/_replica.py`). Each raises ViewAbandoned where the view ends first. Numbers in comments are those of
docs/explanation/rules.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from outlast.core.protocol.step.effects import Act, AskAll, Course, Seat, TellFleet
from outlast.core.protocol.step.todo import HandOver
from outlast.core.protocol.step.verdict import StepEvidence, StepGuards, same_states
from outlast.core.protocol.types import Order, RollEntry, View

__all__ = ["RollFacts", "form", "hand_over", "take_orders"]


@dataclass(frozen=True, kw_only=True)
class RollFacts:
    """What a member's roll entry says that the protocol does not know. `outcome`: a fingerprint of the newest one;
    `state`: computes that of the state; `late`, `joined`: as in `Member.roll`."""

    outcome: int
    state: Callable[[], int]
    late: bool
    joined: bool


def form(seat: Seat, guards: StepGuards, found: StepEvidence, facts: Callable[[], RollFacts]) -> Course[bool]:
    """From the old view to the plan of the new one; False: a member must go, which the coordinator has been told."""
    yield Act(what="part")  # the old view's connections end, and joiners hear that nothing of it follows
    yield Act(what="drain")  # what donors have sent before this view
    if seat.member.unbegun:
        yield Act(what="begin")  # with the newest checkpoint, if there is one
        seat.member.unbegun = False
    elif seat.member.committed < found.view.saved:
        yield Act(what="read newer")  # the newest checkpoint, if it can be read and is newer indeed
    yield Act(what="connect")
    entries = yield from _roll_called(seat, guards, found, facts())
    with seat.lock:
        answers = seat.member.called(entries, seat.now_s())
    yield Act(what="keep", entries=tuple(entries))  # of my sums, those that the plan counts
    if answers:
        yield TellFleet(tuple(answers))
    return not answers


def _roll_called(seat: Seat, guards: StepGuards, found: StepEvidence, facts: RollFacts) -> Course[Sequence[RollEntry]]:
    """What each member of the view holds (5). Where no step follows states are compared at once, else while it
    computes; who came in by replaying has one that no loop has gone through yet."""
    member = seat.member
    at_once = found.view.start or member.committed >= (member.until or math.inf)
    state = facts.state() if at_once and not (facts.late or facts.joined) else 0
    with seat.lock:
        mine = member.roll(state, facts.outcome, late=facts.late, joined=facts.joined)
    said = (yield AskAll(-1, {"roll": mine}, roll=True))["roll"]
    entries = [said[name] for name in found.view.members]
    yield from same_states(seat, guards, found, entries)
    return entries


def hand_over(seat: Seat, todo: HandOver) -> Course[None]:
    """The outcome of a step that is committed at some members of the view alone (12)."""
    with seat.lock:
        seat.member.standing()
    if todo.donor == seat.me:
        yield Act(what="give", handing=todo)
    elif seat.me in todo.behind:
        yield Act(what="take", handing=todo)
    with seat.lock:
        seat.member.handed_over()


def take_orders(
    seat: Seat,
    guards: StepGuards,
    found: StepEvidence,
    state: Callable[[], int],
    carry_out: Callable[[Order, View], None],
) -> Course[None]:
    """One turn in a view that is held back: rest until an order is heard, then do what all have heard (6). No step
    compares states meanwhile, so they are compared before somebody is fed, and again before it is let in: a memory that
    changed in between must be found while it is one against all who waited. `state`: computes a fingerprint of what no
    loop changes, 0 where that cannot be told. Raises ViewAbandoned, and what `same_states` does."""
    with seat.lock:
        heard, turn, step = seat.member.heard, seat.member.carried_out, seat.member.committed
    if heard == turn:
        yield Act(what="rest")
        return
    said = (yield AskAll(step, {"orders": heard}, roll=True, turn=turn))["orders"]
    agreed = min(said.values())
    with seat.lock:
        coming = any(_brings(order, found.view) for order in seat.member.due(agreed))
    if coming and len(found.view.members) > 1:
        told = (yield AskAll(step, {"states": state()}, roll=True, turn=turn))["states"]
        now = [
            msgspec.structs.replace(entry, committed=step, fingerprint=told[entry.member])
            for entry in found.entries or ()
        ]
        yield from same_states(seat, guards, found, now, step)
    with seat.lock:
        due = seat.member.carry_out(agreed)
    for order in due:
        carry_out(order, found.view)


def _brings(order: Order, view: View) -> bool:
    """Whether somebody is fed by it, or let in."""
    return order.kind == "serve" or (order.next is not None and not set(view.members).issuperset(order.next.members))
