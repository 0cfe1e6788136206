"""What one member looks for in the first steps: habits of the loop that a joiner would not have."""

from __future__ import annotations

from collections.abc import Callable

from outlast.runtime.checks.ranks_together import AllRanks
from outlast.runtime.checks.rehearsal import Rehearsal
from outlast.runtime.checks.unseen_averages import UnseenAverages
from outlast.runtime.member.driver import Replica
from outlast.runtime.training.engine import Engine

__all__ = ["look_for_habits"]


def look_for_habits(replica: Replica, engine: Engine, leads: Callable[[], bool], asked: Callable[[], int]) -> None:
    """Rehearse, and look for averages; not for those of shards, or of a stage, which are not known here by what they
    are made of. `leads`, `asked`: whether this member is the writer, and how often its script has asked that."""
    env, state, checks, last = replica.env, engine.state, engine.step_checks, replica.member.is_last
    if env.width > 1:
        checks.rehearsal = Rehearsal(state, lambda: checks.tries, env.run_dir, AllRanks(env.width))
    else:
        checks.rehearsal = Rehearsal(state, last, env.run_dir)
    if not engine.sharded and not state.stages:
        checks.averages = UnseenAverages(state, last, leads, asked)
