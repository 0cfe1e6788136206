"""The guard of states in the simulated world: fingerprints in headers, the policy's own decisions, nothing else.

Numbers that are not finite and spikes have no counterpart among expressions; what a difference of states comes to is
`core/policy`'s, as it is in the runtime (`runtime/checks/guards.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from outlast.core.policy import Culprit, GuardEvidence, Guards, GuardState, Ruling, agree, decide, fresh_state
from outlast.core.protocol import Header
from outlast.core.protocol.step.verdict import PartRows

__all__ = ["MASK", "SimulatedGuards"]

MASK = (1 << 64) - 1
_WATCHED = Guards(nonfinite="off", agreement=1)
_FRESH = fresh_state(_WATCHED)


class SimulatedGuards:
    """One replica's. `watching`: states are compared in every step; else in a view's first step alone."""

    can_rewind = False

    def __init__(self, watching: bool) -> None:
        self.policy: Guards | None = _WATCHED if watching else None
        self.state: GuardState = _FRESH
        self.undecided = ""
        self.told = 0  # the fingerprint in my newest header

    def suspects(self, headers: Sequence[Header]) -> bool:
        return self.policy is not None and len({header.state for header in headers}) > 1

    def evidence(self, headers: Sequence[Header], culprits: Sequence[Culprit], part: str) -> GuardEvidence:
        differing, majority = agree({header.member: header.state for header in headers})
        return GuardEvidence(
            step=headers[0].step,
            num_members=len(headers),
            loss=0.0,
            culprits=tuple(culprits),
            differing=differing,
            majority=majority,
            part=part,
        )

    def rule(self, headers: Sequence[Header], culprits: Sequence[Culprit], part: str) -> Ruling | None:
        if self.policy is None or not self.suspects(headers):
            return None
        evidence = self.evidence(headers, culprits, part)
        return Ruling(verdict=decide(self.policy, self.state, evidence), evidence=evidence)

    def rows(self, step: int) -> PartRows:
        return (("state", self.told),)
