"""Equal steps must mean equal bits: compared at every roll call, and the first tensor that differs is named.

Fingerprints of whole states travel in the roll; only after a mismatch do members tell each other one fingerprint a
tensor. Where most agree and the guards say so, who differs is replaced; else it ends the run on every member alike.
Both follow from the roll, which all see; it does not say which of two replicas is right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from outlast.core.phases import Phase
from outlast.core.policy import agree
from outlast.core.protocol import RollEntry, View
from outlast.errors import StateDiverged
from outlast.runtime._mesh import Mesh, Parts
from outlast.runtime._state import State

__all__ = ["compare", "first_difference"]

Rows = tuple[tuple[str, int], ...]
Expel = Callable[[int, tuple[RollEntry, ...], int, str], None]  # step, who differs, members at that step, what differs


def compare(
    mesh: Mesh, view: View, entries: Sequence[RollEntry], state: State, expel: Expel = lambda *_: None
) -> None:  # fmt: skip
    """StateDiverged on every member if two are at one step with different states. ViewAbandoned. `expel` is called
    first where most are equal, and may raise instead; not in the first view, where no state has been trained yet."""
    groups: dict[tuple[int, int], list[str]] = defaultdict(list)
    for entry in entries:
        groups[entry.committed, entry.fingerprint].append(entry.member)
    steps = [step for step, _ in groups]
    double = next((step for step in steps if steps.count(step) > 1), None)
    if double is None:
        return
    mine = Parts(-1, tuple(state.parts()))
    mesh.broadcast(mine)
    found = mesh.collect(Parts, -1, 0, Phase.ROLL_CALL)
    rows = {name: mine.rows if name == mesh.me else found[name].rows for name in view.members}
    same_step = {entry.member: rows[entry.member] for entry in entries if entry.committed == double}
    name, count = first_difference(same_step)
    there = [entry for entry in entries if entry.committed == double]
    differing, majority = agree({entry.member: entry.fingerprint for entry in there})
    if majority and not view.start:
        expel(double, tuple(e for e in there if e.member in differing), len(there), name)
    text = "; ".join(f"{', '.join(names)} at step {step}: {fp:016x}" for (step, fp), names in groups.items())
    remedy = "build the model from the same seed on every replica: torch.manual_seed(seed) before it"
    if not view.start:
        remedy = "outlast why; look for nondeterministic operations or failing memory"
    more = f" and {count - 1} more" if count > 1 else ""
    raise StateDiverged(
        f"replicas that must be equal differ in {name}{more} ({text})", where=f"view {view.id}",
        did="nothing was computed with it", remedy=remedy,
    )  # fmt: skip


def first_difference(rows: Mapping[str, Rows]) -> tuple[str, int]:
    """(the first part that is not the same on all, how many are not). Parts that only some have differ."""
    tables = [dict(table) for table in rows.values()]
    names = list(dict.fromkeys(name for table in tables for name in table))
    different = [name for name in names if len({table.get(name) for table in tables}) > 1]
    shown = different[0].removeprefix("/model/").removeprefix("/") if different else "nothing that has a name"
    return shown, len(different)
