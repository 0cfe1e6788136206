"""Processes, sockets, process groups: launcher, supervision, coordinator, agent, exchange, training session.

Must never decide membership (that is `core/protocol`). Read `_session.py`, then `_replica.py`, `_engine.py`,
`_plane.py`; the processes beside the replicas are `_launcher.py`, `_agent.py`, `_server.py`. Those never import torch,
so the facade is lazy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.runtime._session import Run, Step, Training, join, pause
    from outlast.runtime._settings import Checkpoint

__all__ = ["Checkpoint", "Run", "Step", "Training", "join", "pause"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from outlast.runtime._versions import check_versions

        check_versions()
        home = "_settings" if name == "Checkpoint" else "_session"
        return getattr(importlib.import_module(f"outlast.runtime.{home}"), name)
    raise AttributeError(f"module 'outlast.runtime' has no attribute {name!r}")
