"""Inject every fault and show, to the bit, that nothing was lost.

Must never be needed by a run. Read `_demo.py` first; `adversary/` runs the protocol alone and never loads torch.
"""

from outlast.prove._demo import Demo, Verdict
from outlast.prove._drive import Driven

__all__ = ["Demo", "Driven", "Verdict"]
