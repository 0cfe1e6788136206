"""Fleets in virtual time: traces, simulator, planner, reports. numpy and scipy; never torch.

For: how reliable a job will be and what to do about it, from failure records to a design. It must never decide anything
itself (the policies of `core.policy` do), nor touch a running job. Only `designs.py` writes files. Read first:
`_model.py` (the class model), then `_kernel.py`, then `_planner.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._analytic import Analytic, analyse
    from ._model import FailureClass, Hardware, Job, Tier, job_from_mapping, load_job
    from ._outcome import Outcome
    from ._planner import Plan, make_plan
    from ._simulate import simulate

_HOMES = {
    "Analytic": "_analytic", "FailureClass": "_model", "Hardware": "_model", "Job": "_model", "Outcome": "_outcome",
    "Plan": "_planner", "Tier": "_model", "analyse": "_analytic", "job_from_mapping": "_model", "load_job": "_model",
    "make_plan": "_planner", "simulate": "_simulate",
}  # fmt: skip
__all__ = [
    "Analytic", "FailureClass", "Hardware", "Job", "Outcome", "Plan", "Tier", "analyse", "job_from_mapping", "load_job",
    "make_plan", "simulate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Names load their module, and so numpy and scipy, when first used."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"outlast.plan.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'outlast.plan' has no attribute {name!r}")
