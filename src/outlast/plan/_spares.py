"""How many spares each of a batch of runs holds where that is left to the run (`auto_spares`), by the run's own policy.

Role: the record of each replication is told of deaths and of places that were filled again; after each event the policy
is asked as the coordinator asks it, and `Machines` carries it out. Invariant: not more spares than wanted machines, as
in a run whose hosts have not said what they have room for.
"""

from __future__ import annotations

import numpy as np

from outlast.core.policy import RunRecords, SparesPolicy

from ._compiled import Compiled
from ._machines import Machines
from ._source import Floats, Ints

__all__ = ["HeldSpares"]


class HeldSpares:
    """`held` is (replications,): the job's `spares` to begin with; `held_s` has each of them times its seconds."""

    def __init__(self, model: Compiled, policy: SparesPolicy, records: RunRecords, machines: Machines) -> None:
        self.model, self.policy, self.records, self.machines = model, policy, records, machines
        self.held = machines.spare.copy()
        self.held_s, self._rows, self._since = np.zeros(len(self.held)), np.arange(len(self.held)), np.zeros(1)

    def restarted(self, rows: Ints, kinds: Ints, num: Floats) -> None:
        """Places of these that need no other machine are filled when a recovery would be over, masked or not."""
        model = self.model
        each_s = model.detection_s[kinds] + model.recovery_s[model.severity[kinds]]
        self.records.filled(rows, num, num * each_s)

    def weigh(self, now: Floats, exposure_s: Floats) -> None:
        """Each replication is at its next event."""
        self.held_s += self.held * (now - self._since)
        self._since = now.copy()
        machines = self.machines
        self.records.num_filled += machines.num_filled
        self.records.filled_s += machines.filled_s
        machines.num_filled[:], machines.filled_s[:] = 0.0, 0.0
        found = self.records.spares(self._rows, exposure_s, machines.wanted, self.held, self.policy)
        self.held = np.minimum(found.spares, machines.wanted)
        machines.hold(self.held, now, self.model.job.tiers[0].recovery_s)
