"""decide(belief, state) -> Decision. The same objects decide at plan time and at run time; scalars or arrays.

For: every choice that failures force. It must never read a clock, draw a number or import torch; with floats it does
not import numpy either. Read first: `_belief.py`, then `_interval.py`.
"""

from ._audit import AuditDecision, AuditPolicy, AuditState
from ._belief import Belief, ClassPrior
from ._interval import IntervalDecision, IntervalPolicy, IntervalState
from ._spares import SparesDecision, SparesPolicy, SparesState

__all__ = [
    "AuditDecision", "AuditPolicy", "AuditState", "Belief", "ClassPrior", "IntervalDecision", "IntervalPolicy",
    "IntervalState", "SparesDecision", "SparesPolicy", "SparesState",
]  # fmt: skip
