"""What one member looks for in the first steps: habits of the loop that a joiner would not have."""

from __future__ import annotations

from collections.abc import Callable

from outlast.runtime.checks.ranks_together import AllRanks, AloneRank
from outlast.runtime.checks.rehearsal import Rehearsal
from outlast.runtime.checks.unseen_averages import UnseenAverages
from outlast.runtime.host.environment import Environment
from outlast.runtime.training.engine import Engine

__all__ = ["look_for_habits"]


def look_for_habits(
    env: Environment,
    engine: Engine,
    last: Callable[[], bool],
    leads: Callable[[], bool] = lambda: False,
    asked: Callable[[], int] = lambda: 0,
) -> None:
    """Rehearse, and look for averages. `last`: whether this replica is that of the view; of several ranks each looks at
    what it holds, at the lead's word. `leads`, `asked`: whether this process is the writer, and how often its script
    has asked that."""
    checks = engine.step_checks
    due, ranks = (lambda: checks.tries, AllRanks(env.width)) if env.width > 1 else (last, AloneRank())
    checks.rehearsal = Rehearsal(engine.state, due, env.run_dir, ranks)
    checks.averages = UnseenAverages(engine.state, due, leads, asked)
