"""Words between the ranks of one replica about its lanes' connections: who is missed there, and who answers.

Records, and nothing else, as of `rank_words.py`. They keep no order with other words: the threads that read them act.
"""

from __future__ import annotations

import msgspec

from outlast.core.protocol import ViewId

__all__ = ["LaneAnswers", "LaneStalled", "ProbeLane"]


class LaneStalled(msgspec.Struct, frozen=True, tag=True):
    """I wait in my lane for these replicas, for longer than it usually takes."""

    view: ViewId
    phase: int
    missing: tuple[str, ...]
    waited_s: float
    deadline_s: float


class ProbeLane(msgspec.Struct, frozen=True, tag=True):
    """Lead: once you wait for somebody in this view's lane, ping all in it."""

    view: ViewId


class LaneAnswers(msgspec.Struct, frozen=True, tag=True):
    """The replicas that answered my pings in this view's lane."""

    view: ViewId
    reached: tuple[str, ...]
