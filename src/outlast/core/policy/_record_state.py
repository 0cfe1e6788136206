"""All that a `RunRecord` has learnt, as values of bounded size that can be written down and read again to the last bit.

Role: a coordinator keeps it, so that the next one need not read the whole journal. The fields have the names of the
record's own attributes. Pure, and it decides nothing.
"""

from __future__ import annotations

import msgspec

from ._hazard import LossState
from .bands import Band

__all__ = ["MeanSeen", "RecordState"]


class MeanSeen(msgspec.Struct, frozen=True, kw_only=True):
    """How often something was seen, and how many seconds it took in all."""

    num: int = 0
    total_s: float = 0.0

    def and_one(self, seconds: float) -> MeanSeen:
        """Return it with one more that took `seconds`."""
        return MeanSeen(num=self.num + 1, total_s=self.total_s + seconds)

    def mean_s(self, prior_s: float) -> float:
        """Return the mean in seconds of those seen, and of one more that took `prior_s`."""
        return (prior_s + self.total_s) / (1 + self.num)


class RecordState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The attributes of a `RunRecord`; in place of its belief of replicas their `alpha` and `exposure_s`."""

    num_replicas: int
    num_deaths: int
    num_losses: int
    num_spares: int
    blocked_s: float
    durable_s: float
    step_s: float
    begun: bool
    min_s: float
    machines: int
    losses: LossState
    alpha: tuple[float, ...]
    exposure_s: float
    exposed_s: float
    last_s: float
    loss_s: float
    failed_s: float | None
    measured: bool
    num_failed: int
    ends_s: float
    band: Band
    outside: tuple[bool, ...]
    gone: dict[str, float]
    replaced: MeanSeen
    reshaped: MeanSeen
    started_s: float
    restart_s: float
    begun_s: float
    audit: str
    microbatches: int
    audited: int
    looked_at_s: float
    num_wrong: int
    wrong: tuple[tuple[int, str], ...]
