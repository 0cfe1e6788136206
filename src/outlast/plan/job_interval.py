"""Small questions of a whole job: the same job, and so the same clocks, as every other plan command."""

from __future__ import annotations

from ._planner import design_of
from .answers import Answer, Table
from .designs import job_from_options
from .number_words import duration, share
from .small_answers import interval_answer

__all__ = ["job_interval_answer"]


def job_interval_answer(
    recovery_s: float | None, *, file: str, profile: str, params: float | None, accelerators: int | None, topology: str
) -> Answer:
    """Young, Daly and exact for a job's own clock and nearest tier, beside the ladder that is best for it."""
    job, sources = job_from_options(
        file or None, profile=profile, params=params, accelerators=accelerators, topology=topology
    )
    best = design_of(job)
    near, clock = best.job.tiers[0], best.analytic
    recovery = near.recovery_s if recovery_s is None else recovery_s
    single = interval_answer(clock.mtbr_h, max(near.write_s, 1e-3), recovery)
    ladder = tuple(
        (tier.name, duration(best.job.interval_s * tier.every), duration(tier.write_s)) for tier in best.job.tiers
    )
    table = Table(
        title="The job's ladder, all tiers together", columns=("tier", "interval", "a write blocks"), rows=ladder
    )
    title = f"{job.name}: MTBF {duration(clock.mtbf_h * 3600)}, ETTR {share(clock.chain)}"
    notes = (
        "The first table has one tier and all losses on it; MTBF and ETTR above are the whole job's.",
        *single.notes,
    )
    data = {
        **single.data, "mtbr_h": clock.mtbr_h, "mtbf_h": clock.mtbf_h, "ettr": clock.chain,
        "ladder": [{"tier": t.name, "interval_s": best.job.interval_s * t.every, "write_s": t.write_s}
                   for t in best.job.tiers],
    }  # fmt: skip
    return Answer(
        title=title, tables=(*single.tables, table), data=data, notes=(*notes, *sources), figures=single.figures
    )
