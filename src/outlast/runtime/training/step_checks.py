"""What may look into a step while it is made, as the tensors' side of a replica knows it: one record of null objects.

Who watches, guards, draws audits or spoils bits on order lies in rooms above. They are put into `StepChecks` where a
replica is assembled; where a feature is off its null object stands here, so no caller asks whether it is on. The order
in which they are asked is the caller's: there is no registry.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from torch import Tensor

from outlast.core.policy import Ruling
from outlast.core.protocol import Header
from outlast.core.protocol.disputes import Incident

__all__ = ["Meta", "NoFlips", "AuditsObserved", "StepChecks", "Unguarded", "Vigilant"]


class AuditsObserved(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a step's outcome. `step_s`: median over the members; `incidents`: that were not in the state yet."""

    machines: int
    step_s: float
    incidents: tuple[Incident, ...] = ()


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """A step's outcome beside the gradient. `used`: bitmap of parameters; `buffers`: after microbatch 0."""

    step: int
    loss: float
    norm: float | None
    used: bytes
    buffers: tuple[bytes, ...]
    output: int
    ruling: Ruling | None = None
    observed: AuditsObserved | None = None
    settings: bytes = b""  # as the optimizers saw them (`loop_state.py`)
    probes: tuple[tuple[int, float], ...] = ()  # losses of two microbatches, for who joins (`entrance.py`)
    metrics: tuple[tuple[str, float], ...] = ()  # over the whole batch (`metrics.py`)
    stop: str = ""  # why this step is the last
    overflow: bool = False  # under the loss scale (`_scaling.py`): nothing is applied
    stream: tuple[int, ...] = ()  # where its data is, if its number does not say it (`streams.py`)
    evaluated: tuple[tuple[tuple[str, float], ...], ...] = ()  # before its inner loop, in order
    bad: tuple[tuple[int, str], ...] = ()  # samples that could not be read, and why (`_bad_samples.py`)


class Unguarded:
    """Nothing is guarded: each step is applied as it came out."""

    reads_norm: bool = False

    def microbatch_begins(self) -> None:
        """Before a microbatch's forward pass."""

    def microbatch_ends(self) -> None:
        """After its backward pass."""

    def before(self, meta: Meta) -> bool:
        """Whether the optimizer takes this step; what is done instead is done here."""
        return True

    def after(self, meta: Meta) -> None:
        """The step was applied, or what stands in its place."""

    def rates(self, step: int) -> AbstractContextManager[None]:
        """Learning rates as a verdict lowered them, around the optimizers' step."""
        return contextlib.nullcontext()


class NoFlips:
    """No bit is spoilt on order."""

    active = False

    def begin(self, step: int, leaf: int) -> None:
        """A microbatch is about to be computed."""

    def after_backward(self, index: int, grad: Tensor) -> None:
        """What lies here of a sharded parameter's gradient is about to be folded: such have no hooks of torch's."""

    def after_sum(self, bucket: int, flat: Tensor) -> None:
        """A bucket of a partial sum was fingerprinted."""

    def after_reduction(self, bucket: int, flat: Tensor) -> None:
        """A slice of a bucket was reduced."""


class Vigilant(Protocol):
    """Where the share of audits follows from what they find."""

    def observed(self, headers: Sequence[Header]) -> AuditsObserved: ...
    def apply(self, seen: AuditsObserved) -> None: ...


class Rehearses(Protocol):
    """In the first steps: would a replica that joins end with the same bits?"""

    def applied(self) -> bool: ...
    def begun(self, step: int, written: dict[str, Tensor]) -> None: ...
    def replay(self) -> None: ...
    def compare(self, step: int) -> None: ...


class LooksForAverages(Protocol):
    """Does the loop keep an average of the weights that nobody was told of?"""

    def joined(self) -> None: ...
    def applied(self) -> None: ...
    def over(self) -> None: ...


@dataclass(slots=True)
class StepChecks:
    """What looks into the steps of one replica."""

    guards: Unguarded = field(default_factory=Unguarded)
    flips: NoFlips = field(default_factory=NoFlips)
    vigilance: Vigilant | None = None
    rehearsal: Rehearses | None = None
    tries: bool = False  # of several ranks: this replica is the one that rehearses the step which is applied now
    averages: LooksForAverages | None = None
