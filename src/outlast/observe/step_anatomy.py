"""A step's anatomy: where each member's time goes in a step, and who waits for whom, from what members have told.

Role: one fold for terminal, page and metrics. Pure. Invariant: figures are means over the steps that a member's process
has committed since it joined, as it measured them by its own clock; nothing is compared across clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from outlast.core import events as ev
from outlast.core.step_parts import PARTS, PairWait

__all__ = ["NUM_WORDS", "Anatomy", "AnatomyFold", "MemberParts", "PairTold", "anatomy_of"]

NUM_WORDS = 1024
"""Words of members that count. Who reads a long journal reads so many, and who has followed the run knows no more."""
_SLOW = 1.25  # times the median member's own work: others wait for it
_WORTH_S = 1e-3  # of a step; less is noise
_NUM_PAIRS = 32
_FEW = 20  # exchanges, or segments, of which a share says little
_LATE, _RESENT = 0.05, 0.01  # shares worth a sentence


class MemberParts(msgspec.Struct, frozen=True, kw_only=True):
    """One member's mean step, in seconds: fetching samples, computing, exchanging (adding, reducing, copying), and
    waiting for others. `microbatches`: how many of them it computed, its share. `waits_for`: whom it waited for
    longest."""

    replica: str
    steps: int
    microbatches: float
    load_s: float
    compute_s: float
    exchange_s: float
    wait_s: float
    waits_for: str = ""

    @property
    def own_s(self) -> float:
        """Return what others may have to wait for."""
        return self.load_s + self.compute_s


class PairTold(msgspec.Struct, frozen=True, kw_only=True):
    """What `waiter` says of `peer`: see `core.step_parts.PairWait`."""

    waiter: str
    peer: str
    waited_s: float
    exchanges: int
    late: int
    segments: int
    resent: int


class Anatomy(msgspec.Struct, frozen=True, kw_only=True):
    """`members`: by slot; `pairs`: those that waited longest; `said`: what stands out, a sentence each."""

    members: list[MemberParts] = []
    pairs: list[PairTold] = []
    said: list[str] = []


class AnatomyFold:
    """Takes the newest word of each member, of the newest `NUM_WORDS` of all: in a larger fleet those who spoke last
    stand for the others."""

    def __init__(self) -> None:
        self._newest: dict[str, ev.StepAnatomy] = {}
        self._told: deque[ev.StepAnatomy] = deque(maxlen=NUM_WORDS)
        self.version = 0

    def take(self, event: ev.AnyEvent) -> None:
        """Fold one event in; events of one member come in order. Who has died holds nobody up any more."""
        if isinstance(event, ev.StepAnatomy):
            oldest = self._told[0] if len(self._told) == NUM_WORDS else event
            if self._newest.get(oldest.replica) is oldest:
                del self._newest[oldest.replica]
            self._told.append(event)
            self._newest[event.replica] = event
            self.version += 1
        elif isinstance(event, ev.ReplicaExited) and event.cause != "finished":
            self.version += self._newest.pop(event.replica, None) is not None

    def anatomy(self) -> Anatomy:
        """The anatomy of a step, from the newest words of all members that have told anything."""
        told = [event for event in self._newest.values() if event.steps > 0]
        members = sorted((_member(event) for event in told), key=lambda m: _order(m.replica))
        pairs = [_pair(event.replica, peer, wait) for event in told for peer, wait in event.waits.items()]
        pairs.sort(key=lambda pair: -pair.waited_s)
        return Anatomy(members=members, pairs=pairs[:_NUM_PAIRS], said=[*_slow(members), *_links(pairs)])


def anatomy_of(events: Iterable[ev.AnyEvent]) -> Anatomy:
    """The same from events; those of other kinds are passed over."""
    fold = AnatomyFold()
    for event in events:
        fold.take(event)
    return fold.anatomy()


def _member(event: ev.StepAnatomy) -> MemberParts:
    mean = {part: event.seconds.get(part, 0.0) / event.steps for part in PARTS}
    most = max(event.waits.items(), key=lambda item: item[1].waited_s, default=None)
    return MemberParts(
        replica=event.replica,
        steps=event.steps,
        microbatches=round(event.batches[0] / event.steps, 2),
        load_s=mean["load"],
        compute_s=mean["compute"],
        exchange_s=mean["exchange"],
        wait_s=mean["wait"],
        waits_for=most[0] if most is not None and most[1].waited_s > 0 else "",
    )


def _pair(waiter: str, peer: str, wait: PairWait) -> PairTold:
    return PairTold(waiter=waiter, peer=peer, **msgspec.structs.asdict(wait))


def _order(replica: str) -> tuple[int, str]:
    slot = replica.partition(".")[0][1:]
    return int(slot) if slot.isdigit() else 0, replica


def _slow(members: list[MemberParts]) -> list[str]:
    """Members whose own work takes far longer than that of the others."""
    usual_s = _median([member.own_s for member in members]) if len(members) > 1 else 0.0
    return [
        f"{member.replica} takes {member.own_s / usual_s:.1f} times as long as the median member for its part of a "
        f"step; the others wait for it"
        for member in members
        if usual_s > 0 and member.own_s > _SLOW * usual_s and member.own_s - usual_s > _WORTH_S
    ]


def _median(values: list[float]) -> float:
    """As the module statistics has it, which takes as long to load as half of this room."""
    values, middle = sorted(values), len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def _links(pairs: list[PairTold]) -> list[str]:
    """Pairs between which the network loses or delays, the worst three of each kind."""
    resent = [p for p in pairs if p.segments >= _FEW and p.resent >= 3 and p.resent > _RESENT * p.segments]
    late = [p for p in pairs if p.exchanges >= _FEW and p.late >= 3 and p.late > _LATE * p.exchanges]
    resent.sort(key=lambda p: -p.resent / p.segments)
    late.sort(key=lambda p: -p.late / p.exchanges)
    said = [f"{p.resent / p.segments:.1%} of what {p.waiter} sends to {p.peer} is sent again" for p in resent[:3]]
    said += [f"headers of {p.peer} reach {p.waiter} late in {p.late / p.exchanges:.0%} of steps" for p in late[:3]]
    return said
