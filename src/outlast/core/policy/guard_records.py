"""What guards are told (`Guards`), what they find, what is decided, and what they remember: records without behaviour.

All of it is plain data: it rides in headers and outcomes, is part of the training state, and stands in the journal.
How a verdict follows from it is `step_decisions.py`.
"""

from __future__ import annotations

from typing import Literal, get_args, get_type_hints

import msgspec

from outlast.core.policy.bands import Band
from outlast.errors import ConfigError, nearest

__all__ = [
    "PRESETS", "Culprit", "GuardEvidence", "GuardNote", "GuardState", "Guards", "Ruling", "Verdict", "VerdictAction",
]  # fmt: skip

VerdictAction = Literal[
    "apply", "skip_step", "skip_batch", "rewind", "lower_rate", "replace", "quarantine", "evict_host", "stop"
]
Confidence = Literal["certain", "likely", "possible"]
OnSpike = Literal["off", "skip", "rewind", "lower_rate", "stop"]


class Guards(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the guards watch and what follows. `Guards()` is the default: non-finite numbers, and equal parameters."""

    nonfinite: Literal["off", "skip", "rewind", "stop"] = "skip"
    """A loss or gradient that is not finite: skip the step (and leave named samples out for good), or more."""
    inspect: bool = True
    """After such a hit compute the microbatch once more, watched, to name module, operation and samples."""
    loss_spike: OnSpike = "off"
    """A loss above its learned band."""
    norm_spike: OnSpike = "off"
    """A gradient norm above its learned band."""
    agreement: int = 32
    """Compare a part of the state between replicas each step, all of it in so many steps; 1: all at once, 0: never."""
    divergence: Literal["replace", "rewind", "stop"] = "replace"
    """A replica that differs from the majority: its state is replaced by the others', or more."""
    collapse: Literal["off", "warn", "stop"] = "off"
    """Dead units and vanishing variance, by sampled hooks."""
    collapse_share: float = 0.005
    """The most that those hooks may cost, as a share of the step; they become rarer by themselves."""
    certify_every: int = 0
    """Keep a certified copy of the state in memory, renewed after so many steps: what `rewind` goes back to. Costs the
    state's size once more in each replica. 0: none."""
    patience: int = 5
    """So many bad steps in a row are no accident: go back if there is a certified state, else stop."""
    warmup: int = 20
    """Steps that a band only learns from."""
    width: float = 8.0
    """Mean absolute deviations above the mean that a band allows."""
    rate_factor: float = 0.5
    """What `lower_rate` multiplies the learning rates by."""
    rate_steps: int = 100
    """... and for how many steps."""
    max_rewinds: int = 3
    """After so many the run stops instead."""

    def __post_init__(self) -> None:
        """ConfigError for values that cannot be, with the valid range."""
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(
                    f"guards: {name}={value!r} is out of range", remedy=f"a value from {low:g} to {high:g}"
                )
        for name, hint in get_type_hints(type(self)).items():
            choices, value = get_args(hint), getattr(self, name)
            if choices and value not in choices:
                raise ConfigError(f"guards: no {name}={value!r}", remedy=nearest(value, choices, both=True))
        wants = [n for n in ("nonfinite", "loss_spike", "norm_spike", "divergence") if getattr(self, n) == "rewind"]
        if wants and not self.certify_every:
            raise ConfigError(
                f"guards: {wants[0]}='rewind' has no state to go back to",
                remedy="certify_every=100, or any other period",
            )

    @property
    def reads_norm(self) -> bool:
        """Whether the gradient's norm is needed though nothing is clipped."""
        return self.nonfinite != "off" or self.norm_spike != "off"

    @classmethod
    def of(cls, value: Guards | str) -> Guards | None:
        """The guards that a preset's name stands for; None for "off". ConfigError for another name."""
        if isinstance(value, Guards):
            return value
        if not isinstance(value, str):
            remedy = f"one of {', '.join(PRESETS)}, or outlast.Guards(...)"
            raise ConfigError(f"guards is a {type(value).__name__}", remedy=remedy)
        if value not in PRESETS:
            remedy = f"{nearest(value, PRESETS)}; or outlast.Guards(...)"
            raise ConfigError(f"guards={value!r} is no preset", remedy=remedy)
        return PRESETS[value]


_RANGES: dict[str, tuple[float, float]] = {
    "agreement": (0, 4096), "collapse_share": (1e-5, 0.5), "certify_every": (0, 1_000_000), "patience": (1, 10_000),
    "warmup": (2, 1_000_000), "width": (0.5, 1000), "rate_factor": (0, 1), "rate_steps": (1, 1_000_000),
    "max_rewinds": (0, 1000),
}  # fmt: skip

PRESETS: dict[str, Guards | None] = {
    "default": Guards(),
    "full": Guards(
        loss_spike="rewind", norm_spike="skip", agreement=1, collapse="warn", certify_every=100, divergence="replace"
    ),
    "off": None,
}


class Culprit(msgspec.Struct, frozen=True, kw_only=True):
    """What a finding points at, as far as it is known. `reproduced`: the same microbatch failed once more."""

    replica: str = ""
    host: str = ""
    device: str = ""
    microbatch: int = -1
    samples: tuple[int, ...] = ()  # indices into the dataset; all of the microbatch's if `sure` is False
    sure: bool = False  # the samples' own values are not finite
    module: str = ""
    parameter: str = ""
    operation: str = ""
    where: str = ""  # file:line in the user's code
    reproduced: bool = False


class GuardNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A member's part of the header for the guards. `full`: fingerprint of its whole state in a step that certifies."""

    full: int = 0
    collapsed: tuple[tuple[str, str], ...] = ()  # (module, what was seen)


class GuardEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a verdict may rest on: equal on all members, because it is read from the headers of all."""

    step: int
    num_members: int
    loss: float
    norm: float | None = None
    bad_microbatches: tuple[int, ...] = ()  # their loss is not finite
    culprits: tuple[Culprit, ...] = ()  # what the walk back found
    differing: tuple[str, ...] = ()  # members whose state is not the majority's
    majority: bool = True  # False: states differ, and none has a majority
    joined: tuple[str, ...] = ()  # members that came in by replaying, and have committed nothing yet
    part: str = ""  # what of the state differs
    collapsed: tuple[tuple[str, str], ...] = ()
    certified: int = -1  # the step of the state that can be gone back to
    undecided: str = ""  # replicas that repeat different gradients of one microbatch, and none has a majority


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is done with a step, why, who is to blame and what helps. `to`: the step of the state gone back to;
    `fleeting`: what was wrong was right when it was computed again."""

    action: VerdictAction = "apply"
    evidence: str = ""
    culprit: Culprit = Culprit()
    confidence: Confidence = "certain"
    remedy: str = ""
    to: int = -1
    fleeting: bool = False

    @property
    def applies(self) -> bool:
        """Whether the optimizer takes this step."""
        return self.action == "apply"

    @property
    def before_decision(self) -> bool:
        """Whether the step is not decided at all: somebody has to go first, or the run ends."""
        return self.action in ("replace", "quarantine", "evict_host", "stop")


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a step's outcome: the verdict and what it rests on, so that who replays it remembers the same."""

    verdict: Verdict
    evidence: GuardEvidence


class GuardState(msgspec.Struct, frozen=True, kw_only=True):
    """What the guards remember. Part of the training state: checkpointed, given to joiners, the same on all members."""

    loss: Band = Band()
    norm: Band = Band()
    num_bad: int = 0  # bad steps in a row
    num_rewinds: int = 0
    rate_until: int = 0  # learning rates are lowered before this step
    skipped: tuple[int, ...] = ()  # steps whose batch was never trained on
    passed: tuple[tuple[int, int], ...] = ()  # (from, to): steps that a rewind took back, passed for good
    left_out: tuple[int, ...] = ()  # samples that no later batch holds
