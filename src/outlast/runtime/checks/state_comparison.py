"""Equal steps must mean equal bits: compared in every view, and the first tensor that differs is named.

Fingerprints of whole states travel in the roll of the first view, and later in the headers of a view's first step: they
are taken on a thread while that step computes, so no recovery and no join waits for them, however large the state.
Nothing is committed before they agree. Only after a mismatch do members tell each other one fingerprint a tensor. Where
most agree and the guards say so, who differs is replaced; else it ends the run on every member alike. Both follow from
what all see; it does not say which of two replicas is right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import xxhash

from outlast.core.phases import Phase
from outlast.core.policy import agree
from outlast.core.protocol import Header, RollEntry, View
from outlast.errors import LoopUnrepeatable, StateDiverged
from outlast.runtime.training.state import State
from outlast.runtime.transport.mesh import Parts
from outlast.runtime.view.port import ViewPort
from outlast.tensors import combine, fingerprint_named

__all__ = ["REPLAYED", "Comparison", "compare", "first_difference"]

REPLAYED = (
    "a replica that joins applies the optimizers' steps and does not run the loop of before: what else changes from "
    "step to step belongs into protect(..., state={...}) or the optimizer's own state (its `state` and `param_groups`, "
    "not attributes)"
)
"""What to do about a replica that is unlike the others and came in by replaying."""

_AT_ONCE_BYTES = 4 << 20  # a thread costs more than reading so little
_WHOLE = -1  # in place of a part's number: this is the fingerprint of everything
Rows = tuple[tuple[str, int], ...]
Parted = Callable[[], Sequence[tuple[str, int]]]
Expel = Callable[[int, tuple[RollEntry, ...], int, str], None]  # step, who differs, members at that step, what differs


class Comparison:
    """Of the states with which a view's members begin its first step; made when the view has formed, with the state as
    it is between two steps. `moving`: tensors that a step's computation may write, by name. Who writes the others must
    `wait` first."""

    def __init__(self, view: View, entries: Sequence[RollEntry], state: State, moving: Callable[[str], bool]) -> None:
        self._view, self._entries = view, entries
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

    def judge(self, port: ViewPort, headers: Sequence[Header], parts: Parted, expel: Expel) -> None:
        """As `compare`, of what the headers say."""
        rows = zip(self._entries, headers, strict=True)
        told = [msgspec.structs.replace(e, committed=h.step, fingerprint=h.state[1]) for e, h in rows]
        compare(port, self._view, told, parts, expel, headers[0].step)


def compare(
    port: ViewPort,
    view: View,
    entries: Sequence[RollEntry],
    parts: Parted,
    expel: Expel = lambda *_: None,
    step: int = -1,
) -> None:
    """StateDiverged on every member if two are at one step with different states. ViewAbandoned. `expel` is called
    first where most are equal, and may raise instead; not in the first view, where no state has been trained yet.
    `parts`: fingerprints of mine; `step`: the one that is to be decided, -1 in a roll call."""
    groups: dict[tuple[int, int], list[str]] = defaultdict(list)
    for entry in entries:
        if entry.fingerprint:  # 0: not told, as its member does not know that this is the end
            groups[entry.committed, entry.fingerprint].append(entry.member)
    steps = [step for step, _ in groups]
    double = next((step for step in steps if steps.count(step) > 1), None)
    if double is None:
        return
    said = port.everyone(Parts(step, tuple(parts())), Phase.ROLL_CALL if step < 0 else Phase.HEADER)
    rows = {name: told.rows for name, told in said.items()}
    there = [entry for entry in entries if entry.committed == double and entry.fingerprint]
    name, count = first_difference({entry.member: rows[entry.member] for entry in there})
    differing, majority = agree({entry.member: entry.fingerprint for entry in there})
    joined = tuple(entry.member for entry in there if entry.joined)
    if majority and not view.start and (not joined or set(differing) <= set(joined)):
        expel(double, tuple(e for e in there if e.member in differing), len(there), name)
    text = "; ".join(f"{', '.join(names)} at step {step}: {fp:016x}" for (step, fp), names in groups.items())
    remedy = "build the model from the same seed on every replica: torch.manual_seed(seed) before it"
    if not view.start:
        remedy = "outlast why; look for nondeterministic operations or failing memory"
    more = f" and {count - 1} more" if count > 1 else ""
    if joined and not view.start:
        raise LoopUnrepeatable(
            f"{name}{more} of {', '.join(joined)}, which has just joined, is not what the others have ({text})",
            where=f"view {view.id}",
            did="nothing was committed",
            remedy=REPLAYED,
        )
    raise StateDiverged(
        f"replicas that must be equal differ in {name}{more} ({text})",
        where=f"view {view.id}",
        did="nothing was committed",
        remedy=remedy,
    )


def first_difference(rows: Mapping[str, Rows]) -> tuple[str, int]:
    """(the first part that is not the same on all, how many are not). Parts that only some have differ."""
    tables = [dict(table) for table in rows.values()]
    names = list(dict.fromkeys(name for table in tables for name in table))
    different = [name for name in names if len({table.get(name) for table in tables}) > 1]
    changing = "what changed while it was compared (is state=... updated inside the inner loop?)"
    shown = different[0].removeprefix("/model/").removeprefix("/") if different else changing
    return shown, len(different)
