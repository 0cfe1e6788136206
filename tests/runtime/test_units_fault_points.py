"""Where faults strike: a pass counts for every fault of its phase, though one of them hangs."""

from __future__ import annotations

import json
import threading

import pytest

from outlast.core.phases import Phase
from outlast.runtime.settings.fault_points import InjectedFault, Probe


def test_each_of_the_first_passes_hangs_and_no_later_one() -> None:
    faults = [{"replica": "r0", "phase": "SAVE_WRITTEN", "count": n, "action": "hang"} for n in (1, 2)]
    probe, through = Probe("r0.1", json.dumps(faults)), threading.Event()
    for _ in (1, 2):
        threading.Thread(target=lambda: (probe(Phase.SAVE_WRITTEN), through.set()), daemon=True).start()
    while sum(probe._passes.values()) < 4:  # two faults count two passes each, though both threads hang
        assert not through.wait(0.001)
    probe(Phase.SAVE_WRITTEN)
    assert not through.is_set()


def test_a_fault_strikes_at_its_pass_alone_and_where_it_is_ordered() -> None:
    fault = {"replica": "r0.1", "phase": "reduce", "count": 2, "action": "raise", "step": 3, "bucket": 1}
    probe = Probe("r0.1", json.dumps([fault, fault | {"replica": "r1"}]))
    for where in ({"step": 2, "bucket": 1}, {"step": 3, "bucket": 0}, {"step": 3, "bucket": 1}):
        probe(Phase.REDUCE, **where)
    probe(Phase.GATHER, step=3, bucket=1)
    with pytest.raises(InjectedFault):
        probe(Phase.REDUCE, step=3, bucket=1)
    probe(Phase.REDUCE, step=3, bucket=1)
