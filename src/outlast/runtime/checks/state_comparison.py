"""Equal steps must mean equal bits: compared in every view, and the first tensor that differs is named.

Fingerprints of whole states travel in the roll of the first view, and later in the headers of a view's first step: they
are taken on a thread while that step computes, so no recovery and no join waits for them, however large the state.
Nothing is committed before they agree. Who waits in a view that is held back compares what no loop changes, before
somebody is fed there and before it is let in. Only after a mismatch do members tell each other one fingerprint a
tensor. Where most agree and the guards say so, who differs is replaced; else it ends the run on every member alike.
Both follow from what all see; it does not say which of two replicas is right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import xxhash

from outlast.core.protocol import RollEntry, View
from outlast.core.protocol.step.verdict import PartRows, StateDifference
from outlast.errors import LoopUnrepeatable, OutlastError, StateDiverged
from outlast.runtime.exchange.robust_rows import MEMORY
from outlast.runtime.training.state import State
from outlast.tensors import combine, fingerprint_named

__all__ = ["REPLAYED", "Comparison", "diverged", "fingerprint_of", "settled"]

REPLAYED = (
    "a replica that joins applies the optimizers' steps and does not run the loop of before: what else changes from "
    "step to step belongs into protect(..., state={...}) or the optimizer's own state (its `state` and `param_groups`, "
    "not attributes). What is registered has to change on every replica, and not only where run.is_writer holds"
)
"""What to do about a replica that is unlike the others and came in by replaying."""

_AT_ONCE_BYTES = 4 << 20  # a thread costs more than reading so little
_MODEL = "/model/"
_SETTLED = (_MODEL, f"/extra/{MEMORY}/")
_KEPT = ["optimizers", "state"]  # of each optimizer, beside the groups' settings
_WHOLE = -1  # in place of a part's number: this is the fingerprint of everything


class Comparison:
    """Compares the states with which a view's members begin its first step; made when the view has formed, with the
    state as it is between two steps. `moving`: tensors that a step's computation may write, by name. Who writes the
    others must `wait` first."""

    def __init__(self, entries: Sequence[RollEntry], state: State, moving: Callable[[str], bool]) -> None:
        self.entries = entries  # of the view's roll
        plain, tensors = state.encoded()
        rest = {name: t for name, t in tensors.items() if t.is_cpu and not moving(name)}
        if sum(t.numel() * t.element_size() for t in rest.values()) < _AT_ONCE_BYTES:
            rest = {}
        now = {name: t for name, t in tensors.items() if name not in rest}
        self._values = [xxhash.xxh3_64_intdigest(plain), fingerprint_named(now.items())]
        self._rest: Future[int] | None = None
        if rest:
            thread = ThreadPoolExecutor(1, "outlast-compare")
            self._rest = thread.submit(fingerprint_named, rest.items())
            thread.shutdown(wait=False)

    def wait(self) -> None:
        if self._rest is not None:
            futures.wait([self._rest])

    def told(self) -> tuple[int, int]:
        """What my header says. Raises what reading the state raised: a replica must not accuse itself instead."""
        rest = [self._rest.result()] if self._rest is not None else []
        return _WHOLE, combine([*self._values, *rest])


def settled(rows: PartRows, trained: Collection[str]) -> PartRows:
    """Those of fingerprints by tensor that are of what only outcomes change: parameters that are `trained`, by name,
    what optimizers keep and what a robust rule remembers; and module buffers. While members wait, the loop of one may
    have gone further than another's, between two steps; what loops change then, frozen copies too, is not alike."""
    kept = [row for row in rows if row[0].startswith(_SETTLED) or row[0].split("/")[1:4:2] == _KEPT]
    return tuple(row for row in kept if not row[0].startswith(_MODEL) or row[0].removeprefix(_MODEL) in trained)


def fingerprint_of(rows: PartRows) -> int:
    """One of them all, names included; 0 of none."""
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(rows)) if rows else 0


def diverged(view: View, found: StateDifference) -> OutlastError:
    """The error that states which differ end in, where nobody is replaced for it."""
    more = f" and {found.num_parts - 1} more" if found.num_parts > 1 else ""
    unlike = [name for name in found.joined if name in found.differing]
    if unlike and not found.untrained and (not found.majority or set(found.differing) <= set(found.joined)):
        said = f"{found.part}{more} of {', '.join(unlike)}, which has just joined, is not what the others have"
        remedy = REPLAYED
        if not found.majority:  # that of a member may have changed since it was copied
            said = (
                f"{found.part}{more} differs where {', '.join(found.joined)} has just joined; no value has a majority"
            )
            remedy += ". If nothing else changes, test the memory of both: two cannot tell which is wrong"
        return LoopUnrepeatable(
            f"{said} ({found.text})", where=f"view {view.id}", did="nothing was committed", remedy=remedy
        )
    remedy = "build the model from the same seed on every replica: torch.manual_seed(seed) before it"
    if not found.untrained:
        remedy = "outlast why; look for nondeterministic operations or failing memory"
    return StateDiverged(
        f"replicas that must be equal differ in {found.part}{more} ({found.text})",
        where=f"view {view.id}",
        did="nothing was committed",
        remedy=remedy,
    )
