"""What a coordinator hears from its own driver where replicas are missing: how many spares are worth holding, what is
believed of replacements, that a stop needs a step."""

from __future__ import annotations

import msgspec

__all__ = ["ReplacementsBelieved", "SaveAwaited", "SparesWorth"]


class SaveAwaited(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """A stop, or the departure of all members, waits for a save, which comes with a step; or (`waits` is false) does no
    more."""

    waits: bool


class SparesWorth(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """So many spares the policy finds worth holding, by the run's record of now; of a run that is told `auto`."""

    number: int
    reason: str = ""


class ReplacementsBelieved(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """What the run's record says of now of a lost replica's replacement (`core.policy.Replacements`), in seconds."""

    expected_s: float
    reshape_s: float
    restart_s: float
