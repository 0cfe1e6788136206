"""The simulator's entry: replications in blocks, thousands at once.

Invariant: blocks of fixed size have seeds of their own, so a result depends on the seed and the number of replications
only. The rounds themselves are `_kernel.py`'s, and `_single.py`'s for a block of one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from outlast.core.reliability.check import count

from ._compiled import Compiled, Policies, compile_job, default_policies
from ._kernel import Kernel
from ._model import Job
from ._outcome import Outcome, merge
from ._single import Single
from ._source import LossSource, Renewals

__all__ = ["BLOCK", "simulate"]

BLOCK = 1024


def simulate(
    job: Job,
    replications: int,
    seed: int = 0,
    *,
    policies: Policies | None = None,
    source: Callable[[Compiled, int, np.random.Generator], LossSource] | None = None,
) -> Outcome:
    """Run `replications` of the job; deterministic in (job, replications, seed, policies, source).

    Memory: about 8 (27 + 2 tiers + 2 classes + 2 machines in repair) bytes a replication of one block, plus
    8 (11 + classes) bytes a replication of result.
    """
    count("replications", replications, 1)
    compiled = compile_job(job, *((policies.audit, policies.alarms) if policies else ()))
    chosen = policies or default_policies(job, compiled.loses_work, tuple(float(s) for s in compiled.silent))
    parts = []
    for block, first in enumerate(range(0, replications, BLOCK)):
        rng = np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed, spawn_key=(block,))))
        size = min(BLOCK, replications - first)
        make = source or (lambda c, n, g: Renewals(c.classes, c.mean_s, n, g))
        learns = chosen.interval.kind == "adaptive" or job.auto_spares
        engine = Kernel if size > 1 or learns else Single
        parts.append(engine(compiled, chosen, make(compiled, size, rng), rng, size).run(seed))
    return merge(parts)
