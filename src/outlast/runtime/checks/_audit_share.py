"""How much to audit, when that is left to outlast: what all members believe of silent corruption, and the share.

What audits and guards found travels in headers until it is part of a step's outcome, with how long the step took and
how many members it had; so the belief is part of the training state: the same on all, handed to joiners, checkpointed.
The share of a step follows from the state before it. With a fixed share nothing here exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outlast.core.policy import audit_share
from outlast.core.policy.audits import silent_belief
from outlast.core.protocol import Header
from outlast.core.protocol.disputes import Incident
from outlast.runtime.training.step_checks import AuditsObserved

__all__ = ["KEY", "Vigilance"]

KEY = "outlast.vigilance"
_REMEMBERED = 256  # incidents, to count each once


class Vigilance:
    """Chooses how many microbatches are computed twice. `audit`: "auto", or with a budget; `machines`: members that the
    run begins with."""

    def __init__(self, audit: str, machines: int) -> None:
        self.audit = audit
        self._machines, self._step_s = machines, 1.0
        self._found, self._looked_at_s = 0, 0.0
        self._known: list[Incident] = []

    @property
    def share(self) -> float:
        """The share of the next step's microbatches that are computed twice, 0.0 to 1.0."""
        belief = silent_belief(self._found, self._looked_at_s)
        return audit_share(self.audit, self._machines, self._step_s, belief)

    def news(self, incidents: Iterable[Incident]) -> tuple[Incident, ...]:
        """Those that the state does not know yet: my part of the header."""
        return tuple(incident for incident in dict.fromkeys(incidents) if incident not in self._known)

    def observed(self, headers: Sequence[Header]) -> AuditsObserved:
        """What a step's headers say: part of its outcome."""
        times = sorted(header.audit.step_s for header in headers)
        new = sorted({incident for header in headers for incident in header.audit.incidents})
        return AuditsObserved(machines=len(headers), step_s=times[len(times) // 2], incidents=self.news(new))

    def apply(self, seen: AuditsObserved) -> None:
        """The step is committed, here or by whoever replays it."""
        self._looked_at_s += seen.machines * seen.step_s * self.share  # by the share that this step had
        self._found += len(seen.incidents)
        self._known = [*self._known, *seen.incidents][-_REMEMBERED:]
        self._machines, self._step_s = seen.machines, seen.step_s or self._step_s

    # --- part of the training state ------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        return {
            "machines": self._machines,
            "step_s": self._step_s,
            "found": self._found,
            "looked_at_s": self._looked_at_s,
            "known": [list(incident) for incident in self._known],
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        self._machines, self._step_s = values["machines"], values["step_s"]
        self._found, self._looked_at_s = values["found"], values["looked_at_s"]
        self._known = [(int(step), str(who)) for step, who in values["known"]]
