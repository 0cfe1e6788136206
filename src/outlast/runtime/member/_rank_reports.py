"""What a replica's lead tells the coordinator of its other ranks, which speak to nobody else. Decides nothing."""

from __future__ import annotations

import time

from outlast.core.protocol import messages as m
from outlast.runtime.transport.rank_path_words import LaneAnswers, LaneStalled
from outlast.runtime.transport.rank_words import RankFailed

__all__ = ["failure_of", "path_of"]


def failure_of(member: str, committed: int, said: RankFailed) -> m.Failed:
    """The script raised on another rank of this replica."""
    return m.Failed(
        member=member,
        step=committed,
        microbatch=said.microbatch,
        error=said.error,
        alike=said.alike,
        code=said.code,
        final=said.final,
        at_s=time.monotonic(),
    )


def path_of(member: str, place: int, said: LaneStalled | LaneAnswers) -> m.Stalled | m.Rows:
    """Another rank of this replica waits in its lane for others, or says who answers there."""
    if isinstance(said, LaneAnswers):
        return m.Rows(member=member, view=said.view, reached=said.reached, place=place)
    return m.Stalled(
        member=member,
        view=said.view,
        phase=said.phase,
        missing=said.missing,
        waited_s=said.waited_s,
        deadline_s=said.deadline_s,
    )
