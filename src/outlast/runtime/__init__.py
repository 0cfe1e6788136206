"""Processes, sockets, process groups: launcher, supervision, coordinator, agent, exchange, training session.

Must never decide membership (that is `core/protocol`). Rooms, from the floor up; each imports downward only:
`settings`, `transport`, `host` and `coordinator` (the processes beside the replicas; none of these imports torch),
`view` (what a step may know of its member), `exchange`, `training`, `checks` with `joining` and `saving`, `member`, and
`loop` with `faults`. Read `loop/run.py` and `loop/session.py` (the user's loop), `member/step.py`,
`training/engine.py`, `exchange/plane.py`. In a room, a module whose name begins with an underscore is the room's own.
The facade is lazy, so that launcher, agent and server never load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.runtime.loop.curve_log import Log
    from outlast.runtime.loop.run import Run, join, pause
    from outlast.runtime.loop.session import Step, Training
    from outlast.runtime.settings.protect_records import Audit, Data, Rules
    from outlast.runtime.settings.save_settings import Checkpoint

__all__ = ["Audit", "Checkpoint", "Data", "Log", "Rules", "Run", "Step", "Training", "join", "pause"]
_HOMES = {
    "Audit": "settings.protect_records", "Checkpoint": "settings.save_settings", "Data": "settings.protect_records",
    "Log": "loop.curve_log", "Rules": "settings.protect_records", "Step": "loop.session", "Training": "loop.session",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        from outlast.runtime.settings.versions import check_versions

        check_versions()
        return getattr(importlib.import_module(f"outlast.runtime.{_HOMES.get(name, 'loop.run')}"), name)
    raise AttributeError(f"module 'outlast.runtime' has no attribute {name!r}")
