"""core/protocol alone under a seeded adversarial network in virtual time: find the schedule that breaks it.

Must never import torch, look at a clock or draw from any randomness but the schedule's. Read `_world.py` first, then
`_replica.py` (what a member does), `_surroundings.py` (what it is given), `_oracle.py` (the invariants) and
`_broken.py` (mistakes that must be caught).
"""

from outlast.prove.adversary._broken import BROKEN
from outlast.prove.adversary._host_rows import host_rows_of
from outlast.prove.adversary._oracle import Violation
from outlast.prove.adversary._scenario import Scenario, scenario_of
from outlast.prove.adversary._schedule_faults import ScheduleFault
from outlast.prove.adversary._search import Domain, ScheduleFinding, Tally, play, replayed, search, shrink

__all__ = [
    "BROKEN", "Domain", "ScheduleFault", "ScheduleFinding", "Scenario", "Tally", "Violation", "host_rows_of", "play",
    "replayed", "scenario_of", "search", "shrink",
]  # fmt: skip
