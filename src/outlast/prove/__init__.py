"""Inject every fault and show, to the bit, that nothing was lost.

Must never be needed by a run. Read `_demo.py` first, then `_trials.py` and `_campaign.py`; `adversary/` runs the
protocol alone and never loads torch.
"""

from outlast.prove._campaign import Campaign, Result
from outlast.prove._demo import Demo, DemoVerdict
from outlast.prove._drive import Driven
from outlast.prove._strike_campaign import StrikeCampaign, Struck
from outlast.prove._trials import Trial
from outlast.prove.demo_hosts import HostsDemo

__all__ = ["Campaign", "Demo", "Driven", "HostsDemo", "Result", "StrikeCampaign", "Struck", "Trial", "DemoVerdict"]
