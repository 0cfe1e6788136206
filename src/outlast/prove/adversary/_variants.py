"""The protocol as it is, as seen by the simulated world. `_broken.py` has the ways in which it can be wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, TypeVar

from outlast.core.policy import Ruling
from outlast.core.protocol import Coordinator, Exchange, HandOver, Header, Member, Order, Settings, View, ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.record_lease import AnswersDue, Storing, TurnWatch, storing
from outlast.core.protocol.saves.agreement import SavePromise, SaveVotes
from outlast.core.protocol.saves.commit import CommitAction, CommitEvent, CommitState, commit_step
from outlast.core.protocol.step.catching_up import CatchingUp, JoinerPort
from outlast.core.protocol.step.deciding import StepPort, decide_step, leave, settle
from outlast.core.protocol.step.effects import Course, Seat
from outlast.core.protocol.step.exchange_order import ExchangeOrder, ExchangeStages
from outlast.core.protocol.step.forming import RollFacts, form, hand_over, take_orders
from outlast.core.protocol.step.host_order import HostOrder, HostStages
from outlast.core.protocol.step.loop_copies import LoopCopies
from outlast.core.protocol.step.verdict import StepEvidence, StepGuards, checked
from outlast.prove.adversary import _algebra as algebra
from outlast.prove.adversary._guards import SimulatedGuards

__all__ = ["Buffers", "Variant", "WithCoordinator", "WithMember"]


G = TypeVar("G")
Buffers = dict[Any, dict[str, Any]]  # key -> sender -> what it sent


class Variant:
    """The protocol as it is."""

    says_goodbye = True
    fenced = True
    recalls_hosts = True  # as a coordinator takes over
    compares_revisions = True  # as a record is stored where several hosts keep it
    goes_on_followed = False  # a coordinator, once it knows
    guards = SimulatedGuards
    answers = AnswersDue
    watch = TurnWatch

    def member(self, name: str, num_microbatches: int, **given: Any) -> Member:
        return Member(name, num_microbatches, **given)

    def coordinator(self, settings: Settings, epoch: int, record: m.FleetRecord | None) -> Coordinator:
        return Coordinator(settings, epoch, record)

    def copies(self) -> LoopCopies:
        return LoopCopies()

    def storing(self, key: str, value: Any, claim_key: str, claim: Any) -> Storing:
        """How a record comes into a store that several hosts share."""
        return storing(key, value, claim_key, claim)

    def actions(self, actions: list[m.Action]) -> list[m.Action]:
        """In the order in which they are carried out."""
        return actions

    def late_write(self, old: Buffers, new: Buffers | None, key: Any, source: str, payload: Any) -> None:
        """Something arrives for a view that was abandoned here: it is written where that view received."""
        old.setdefault(key, {})[source] = payload

    def before_exchange(self, out: list[int]) -> None:
        """An exchange begins, and the last output lies in `out`."""

    def handed(self, out: list[int], norm: int) -> algebra.Outcome:
        """What a donor hands to who is behind."""
        return tuple(out), norm

    def form(
        self, seat: Seat, guards: SimulatedGuards, found: StepEvidence, facts: Callable[[], RollFacts]
    ) -> Course[bool]:
        """How a member comes into a view."""
        return form(seat, guards, found, facts)

    def take_orders(
        self,
        seat: Seat,
        guards: SimulatedGuards,
        found: StepEvidence,
        state: Callable[[], int],
        carry_out: Callable[[Order, View], None],
    ) -> Course[None]:
        """A turn of a member that waits in a view that is held back."""
        return take_orders(seat, guards, found, state, carry_out)

    def hand_over(self, seat: Seat, todo: HandOver) -> Course[None]:
        """What a member does where some are a step behind."""
        return hand_over(seat, todo)

    def step(
        self, seat: Seat, guards: SimulatedGuards, todo: Exchange, port: StepPort
    ) -> Course[tuple[Sequence[Header], Ruling | None]]:
        """From all microbatches held to the decision."""
        return decide_step(seat, guards, todo, port, self.course)

    def course(
        self, seat: Seat, guards: StepGuards, headers: Sequence[Header], found: StepEvidence
    ) -> Course[Ruling | None]:
        """From complete headers to the verdict."""
        return checked(seat, guards, headers, found)

    def order(self, num_buckets: int, stages: ExchangeStages) -> ExchangeOrder:
        """What of an exchange follows from what."""
        return ExchangeOrder(num_buckets, stages)

    def host_order(self, num_buckets: int, stages: HostStages) -> HostOrder:
        """The same of an exchange in two levels."""
        return HostOrder(num_buckets, stages)

    def leave(self, seat: Seat) -> Course[None]:
        """The barrier after the last step."""
        return leave(seat)

    def settle(self, seat: Seat) -> Course[None]:
        """The barrier after the step that a run stops with."""
        return settle(seat)

    def stops(self, votes: SaveVotes, view: ViewId, step: int, under_way: bool) -> bool:
        """Whether the run stops with the save just tried. `under_way`: this member has begun one that is not over."""
        return votes.stops(view, step)

    def awaits_stop(self, votes: SaveVotes, view: ViewId, step: int) -> bool:
        """Whether it may still do so."""
        return votes.awaits_stop(view, step)

    def meets(self, votes: SaveVotes, view: ViewId, step: int) -> int:
        """The newest request that a save just taken answers."""
        return votes.answers(view, step)

    def joiner(self, member: Member, lock: AbstractContextManager[Any], port: JoinerPort, grace_s: float) -> CatchingUp:
        """What a joiner makes of what has arrived."""
        return CatchingUp(member, lock, port, grace_s)

    def votes(self) -> SaveVotes:
        """What a member makes of the votes on saves."""
        return SaveVotes()

    def promises(self, promise: SavePromise) -> bool:
        """Whether a part may be promised now."""
        return promise.is_due

    def share(self, place: int, view: View, before: tuple[int, int]) -> tuple[int, int]:
        """A member's share of what is written, in a view that it enters."""
        return place, len(view.members)

    def commit(self, state: CommitState, event: CommitEvent) -> tuple[CommitState, tuple[CommitAction, ...]]:
        """What the coordinator makes of the news of a save."""
        return commit_step(state, event)

    def newest(self, generations: Sequence[G]) -> G | None:
        """What a replica of a first view begins with."""
        return generations[-1] if generations else None

    def norm(self, parts: Sequence[Sequence[tuple[int, int]]]) -> int:
        """The norm, from every member's blocks."""
        blocks = sorted(chain.from_iterable(parts))
        return algebra.norm_of(tuple(value for _, value in blocks))


class WithMember(Variant):
    """Base of those in which only the member is wrong."""

    wrong: type[Member] = Member

    def member(self, name: str, num_microbatches: int, **given: Any) -> Member:
        return self.wrong(name, num_microbatches, **given)


class WithCoordinator(Variant):
    """Base of those in which only the coordinator is wrong."""

    wrong: type[Coordinator] = Coordinator

    def coordinator(self, settings: Settings, epoch: int, record: m.FleetRecord | None) -> Coordinator:
        return self.wrong(settings, epoch, record)
