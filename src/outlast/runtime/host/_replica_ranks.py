"""The processes of one replica as its agent knows them, and what their end is told as. Decides nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from outlast.core.phases import OWNED, WAITS, Phase
from outlast.core.protocol import messages as m
from outlast.errors import MembershipError
from outlast.runtime.host._children import Child, Exit
from outlast.runtime.host._host_system import HostSystem
from outlast.runtime.transport.progress_block import Progress

__all__ = [
    "Rank", "Silence", "absent", "cause_of", "detail_of", "evidence_of", "free_number", "patience_s", "suspect",
    "works",
]  # fmt: skip

_TAIL_BYTES = 3000
_SAY_WHY_S = 5.0
_DEAF = 4.0  # times the time after which a rank that waits says so
_SCRIPT = frozenset({Phase.LOAD, Phase.BODY, Phase.BACKWARD, Phase.OPTIMIZER})
"""Phases in which the script's code, FSDP's among it, may wait for the other ranks."""

Silence = Literal["", "deaf", "full"]
"""What an agent knows of a rank's silence, as `Examined` says it."""


@dataclass(slots=True)
class Rank:
    """A rank under this agent: a replica's lead, with its siblings where it has any."""

    name: str
    child: Child
    progress: Progress
    log: Path
    killed_for: str = ""
    key: str = ""  # among all ranks
    siblings: list[Rank] = field(default_factory=list)
    how: Exit | None = None  # it has ended
    seen_s: float = 0.0  # when its agent saw it last before that: it lived
    swept: bool = False  # killed as another had ended
    number: int = 0  # of the replica, among those that its agent has
    place: int = 0  # in the replica; 0 is its lead
    deserted: bool = False  # it has ended well while the others needed it
    began_s: float = 0.0  # when it was started: before `join` it gives no sign of life

    def silent_s(self, now_s: float) -> float:
        """How long it has given no sign of life."""
        return now_s - max(self.progress.read()[3], self.began_s)

    @property
    def failed(self) -> bool:
        """Whether it has ended so that its replica cannot go on: badly, or well but too early."""
        return self.how is not None and (self.how.code != 0 or self.progress.changes == 0 or self.deserted)

    @property
    def put_out(self) -> bool:
        """Whether its agent's order is why it ended; a crash of its own may have come before the order was carried
        out."""
        own = self.how is not None and self.how.signal not in (None, signal.SIGKILL, signal.SIGTERM)
        return bool(self.killed_for) and not own

    def first_to_fail(self) -> Rank:
        """The rank of an ended replica whose end was not another's doing; its lead, if all ended well. A signal from
        outside comes first: a collective of the script raises where another rank was killed."""
        failed = [r for r in (self, *self.siblings) if r.failed and (r.killed_for or not r.swept)]
        struck = [r for r in failed if r.how is not None and r.how.signal is not None]
        crashed = [r for r in struck if not r.put_out]
        own = [r for r in failed if r.how is not None and r.how.code != MembershipError.exit_code]
        return next(iter((*crashed, *struck, *own, *failed)), self)

    def see_who_deserted(self) -> None:
        """Where one of this lead's replica may have ended because the stream to another rank did: who ended well in the
        middle of its training, by `os._exit` or in a library, says nothing before."""
        ended = [rank for rank in (self, *self.siblings) if rank.how is not None]
        lost = any(rank.how == Exit(signal=None, code=MembershipError.exit_code) for rank in ended)
        for rank in ended:
            calm = rank.how == Exit(signal=None, code=0)
            rank.deserted = lost and calm and rank.progress.read()[0] not in (Phase.IDLE, Phase.DEPART)

    def all(self) -> list[Rank]:
        """Those of the replica that have not ended."""
        return [rank for rank in (self, *self.siblings) if rank.how is None]

    def sweep(self) -> None:
        """One of the replica has failed: the others end with it."""
        for other in self.all():
            other.swept = True
            other.child.send(signal.SIGKILL)


def free_number(leads: Iterable[Rank]) -> int:
    """The smallest number that no replica of this agent has: whoever follows one that died gets its device."""
    taken = {lead.number for lead in leads}
    return next(number for number in range(len(taken) + 1) if number not in taken)


def suspect(ranks: Sequence[Rank], now_s: float, outside_s: float, formation_s: float) -> tuple[Rank, bool]:
    """Which of a replica's living ranks a silence is laid to, and whether it is deaf. Ranks wait for each other: a
    replica hangs only where one of them does that waits for none of the others.

    First a rank that only waits and has long failed to say so, as those that are no lead do in each wait of theirs;
    then one that is too long in work of its own; then, of those that run the script's code, in which all wait for all,
    the one that has the most time left; then the lead.
    """
    read = [(rank, *rank.progress.read()) for rank in ranks]
    working: list[tuple[float, Rank]] = []
    own: list[tuple[float, Rank]] = []
    for rank, phase, _, _, alive_s, allowed_s in read:
        silent_s = now_s - alive_s
        limit_s = min(allowed_s, outside_s) if phase in OWNED else outside_s
        if phase in WAITS:
            if rank.key != rank.name and phase is not Phase.IDLE and silent_s > _DEAF * min(allowed_s, formation_s):
                return rank, True
        elif phase in _SCRIPT:
            working.append((limit_s - silent_s, rank))
        elif silent_s > limit_s:
            own.append((limit_s - silent_s, rank))
    if own:
        return min(own, key=lambda row: row[0])[1], False
    return (max(working, key=lambda row: row[0])[1] if working else ranks[0]), False


def works(ranks: Sequence[Rank], before_s: Mapping[int, float], least_s: float, system: HostSystem) -> bool:
    """Whether any of a replica's ranks has used so much of its processor, or would if there were one for it."""
    advanced = any(system.cpu_s(pid) - before > least_s for pid, before in before_s.items())
    return advanced or any(system.state(rank.child.pid)[0] == "R" for rank in ranks)


def evidence_of(
    rank: Rank, state: str, traced: bool, advanced: bool, why: Silence, formation_s: float, now_s: float
) -> m.Examined:
    """What is told of a suspect. Who is stopped learns no deadlines."""
    phase, _, _, _, allowed_s = rank.progress.read()
    return m.Examined(
        member=rank.name,
        state=state,
        traced=traced,
        phase=phase,
        silent_s=rank.silent_s(now_s),
        cpu_advanced=advanced,
        allowed_s=min(allowed_s, formation_s) if state == "T" else allowed_s,
        deaf=why == "deaf",
        full=why == "full",
        place=rank.place,
    )


def absent(member: str) -> m.Examined:
    """What is told of one that is not there."""
    return m.Examined(member=member, state="X", traced=False, phase=0, silent_s=0.0, cpu_advanced=False, allowed_s=0.0)


def patience_s(how: Exit) -> float:
    """How long the others may take to end by themselves: a rank whose end is another's doing may be gone before that
    one has said why."""
    return _SAY_WHY_S if how.code == MembershipError.exit_code else 0.0


def cause_of(rank: Rank, how: Exit) -> m.Cause:
    if rank.put_out:
        return "evicted"
    if how.signal is not None:
        return "signal"
    if how.code != 0:
        return "exception"
    if rank.failed:  # calm, but it has not trained, or not to the end
        return "exit"
    return "left" if rank.progress.read()[0] is Phase.DEPART else "finished"


def detail_of(rank: Rank, how: Exit) -> str:
    if rank.put_out:
        return rank.killed_for
    of_rank = f" of rank {rank.place}" if rank.place else ""
    if how.signal is not None or not rank.failed:
        return f"{how}{of_rank}"
    told = str(how) if how.code else f"{how}, and steps() of outlast.join().protect(...) was never begun"
    if rank.deserted:
        told = f"{how}{of_rank} while the others trained on"
    try:
        with rank.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return f"{told}; the end of {rank.log.name}:\n" + file.read().decode("utf-8", "replace")
    except OSError:
        return told
