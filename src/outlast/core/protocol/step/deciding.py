"""From a step's last microbatch to its decision, in order, as one course; and the barrier after the last step.

    commitments   fingerprints of all that I computed, said before anybody can know which of it is audited (25)
    exchange      all-to-all, reduce my slices, all-gather
    audits        what I owe beside my share, drawn from everybody's commitments
    headers       one round
    checks        states, audits, slices, rows, and a closer look where something cannot be right (`verdict.py`)
    decision      from here on the step has one outcome here (11)

The microbatches before it and the optimizer after it wait for no other member, and are the caller's. The runtime
carries this out over sockets and tensors (`runtime/member/step.py`), the adversary in virtual time
(`prove/adversary/_exchange.py`). Numbers are those of docs/explanation/rules.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from outlast.core.policy.guard_records import Ruling
from outlast.core.protocol.disputes import Said
from outlast.core.protocol.step.effects import Act, AskAll, Course, Seat, TellFleet
from outlast.core.protocol.step.todo import Exchange
from outlast.core.protocol.step.verdict import StepEvidence, StepGuards, checked
from outlast.core.protocol.types import Header

__all__ = ["CheckCourse", "StepPort", "decide_step", "leave", "settle"]

CheckCourse = Callable[[Seat, StepGuards, Sequence[Header], StepEvidence], Course[Ruling | None]]


class StepPort(Protocol):
    """What a member says of a step whose gradient it has, and what it makes of what the others say."""

    def header(self) -> Any:
        """My header, and what goes with it."""

    def heard(self, said: Mapping[str, Any], commitments: Said | None) -> tuple[Sequence[Header], StepEvidence]:
        """Everybody's headers, in the view's order, and what I bring to their checks. `commitments`: of all, None
        without audits. Raises where the members' loops have not done the same."""


def decide_step(
    seat: Seat, guards: StepGuards, todo: Exchange, port: StepPort, checks: CheckCourse = checked
) -> Course[tuple[Sequence[Header], Ruling | None]]:
    """All my microbatches are held: exchange, check and decide the step. Returns everybody's headers and the ruling,
    the same on all members. Raises ViewAbandoned where the step must be done again, and what `checks` does."""
    audited = seat.member.audits.active
    if audited:
        with seat.lock:
            _, plan = seat.member.standing()
            mine = seat.member.audits.commitment(plan)
        yield AskAll(todo.step, {"prints": mine}, half="say")
    yield Act(what="exchange")
    said: Said | None = None
    if audited:
        said = (yield AskAll(todo.step, {"prints": mine}, half="hear"))["prints"]
        with seat.lock:
            _, plan = seat.member.standing()
        if owed := seat.member.audits.owed(plan, said):
            yield Act(what="audit", leaves=owed)
    heads = (yield AskAll(todo.step, {"header": port.header()}))["header"]
    headers, found = port.heard(heads, said)
    ruling = yield from checks(seat, guards, headers, found)
    with seat.lock:
        seat.member.decide(headers, seat.now_s())
    return headers, ruling


def settle(seat: Seat) -> Course[None]:
    """No step follows my newest one, here or for now: every member has committed it, and its save is settled."""
    step = seat.member.committed
    yield AskAll(step, {"final": step})
    yield Act(what="settle the end")


def leave(seat: Seat) -> Course[None]:
    """The closing barrier: every member has committed the last step, and what it leaves is saved."""
    yield Act(what="save the end")
    yield from settle(seat)
    with seat.lock:
        answers = seat.member.finished()
    yield Act(what="say how far")  # whoever hears that I am done knows of my last step
    yield TellFleet(tuple(answers))
