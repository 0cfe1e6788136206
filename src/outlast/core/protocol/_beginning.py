"""Nobody alive holds the training state: a run that keeps checkpoints begins again from them, within its budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.core.protocol._roster import slot_of

if TYPE_CHECKING:
    from outlast.core.protocol._change import Change
    from outlast.core.protocol._coordinator import Coordinator
    from outlast.core.protocol._types import View

__all__ = ["begin_again", "formation_s"]


def begin_again(c: Coordinator, change: Change) -> bool:
    """Whether it does. Every replica of the next first view reads the newest generation before it forms the view;
    should there be none yet, the run begins at step 0 once more: the same bits again, only later."""
    manned = {slot_of(name) for name in c.roster.having("spawning", "fresh", "joining", "ready")}
    missing = sum(f"r{index}" not in manned for index in range(c.settings.num_replicas))
    within = c.settings.respawn and c.roster.restarts + missing <= c.settings.max_restarts
    if not (c.facts.get("checkpoints") and within):
        return False
    step = max((c.roster.peers[name].committed for name in change.old if name in c.roster.peers), default=0)
    c.journal("fleet_lost", step=step, detail=change.cause)
    c.reports.fleet_lost(step)
    c.forget_view()
    c.timer("start", c.settings.start_s)
    return True


def formation_s(c: Coordinator, view: View) -> float:
    """How long a view may take to form: a first one loads what a checkpoint holds."""
    return c.settings.start_s if view.start and c.facts.get("checkpoints") else c.settings.formation_s
