"""Processes, sockets, process groups: launcher, supervision, coordinator, agent, exchange, training session.

Must never decide membership (that is `core/protocol`). Rooms, from the floor up; each imports downward only:
`settings`, `transport`, `host` and `coordinator` (the processes beside the replicas; none of these imports torch),
`exchange`, `training`, `checks` with `joining` and `saving`, `member`, and `loop` with `faults`. Read `loop/session.py`
(the user's loop), `member/driver.py`, `training/engine.py`, `exchange/plane.py`. In a room, a module whose name begins
with an underscore is the room's own. The facade is lazy, so that launcher, agent and server never load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.runtime.loop.curve_log import Log
    from outlast.runtime.loop.session import Run, Step, Training, join, pause
    from outlast.runtime.settings.save_settings import Checkpoint

__all__ = ["Checkpoint", "Log", "Run", "Step", "Training", "join", "pause"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from outlast.runtime.settings.versions import check_versions

        check_versions()
        home = {"Checkpoint": "settings.save_settings", "Log": "loop.curve_log"}.get(name, "loop.session")
        return getattr(importlib.import_module(f"outlast.runtime.{home}"), name)
    raise AttributeError(f"module 'outlast.runtime' has no attribute {name!r}")
