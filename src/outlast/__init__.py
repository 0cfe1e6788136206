"""outlast: PyTorch training that outlasts the machines it runs on.

Read first: docs/explanation/step.md (the path of a step, and where to change what), then `runtime/loop/session.py` (the
user's loop), `runtime/member/step.py` (a step) and `core/protocol/` (every decision). The facade imports nothing heavy:
`outlast.join` loads torch when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.core.policy import Guards
    from outlast.health import ProductChecks
    from outlast.runtime import Audit, Checkpoint, Data, Log, Rules, Run, Step, Training, join, pause

__version__ = "0.1.0"
__all__ = [
    "Audit", "Checkpoint", "Data", "Guards", "Log", "ProductChecks", "Rules", "Run", "Step", "Training", "__version__",
    "join", "pause",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "Guards":
        return importlib.import_module("outlast.core.policy").Guards
    if name == "ProductChecks":
        return importlib.import_module("outlast.health").ProductChecks
    if name in __all__:
        return getattr(importlib.import_module("outlast.runtime"), name)
    raise AttributeError(f"module 'outlast' has no attribute {name!r}")
