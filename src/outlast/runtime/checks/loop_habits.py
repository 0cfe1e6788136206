"""What a loop does that a replica which joins could not repeat: found from what members say, and named.

Role: the words for it. The same end on every member, and nobody's device is blamed. What is found by one replica alone
is in `training/loop_state.py` and `rehearsal.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outlast.core.phases import Phase
from outlast.core.protocol import Header
from outlast.errors import LoopUnrepeatable
from outlast.runtime.training.loop_state import LoopState
from outlast.runtime.transport.peer_messages import SettingsSeen
from outlast.runtime.view.port import ViewPort

__all__ = ["compare_settings"]


def compare_settings(port: ViewPort, headers: Sequence[Header], loop: LoopState) -> None:
    """Raises LoopUnrepeatable on every member if they are to step with different settings, or have made different
    things of what is registered, naming the first."""
    if len({header.settings for header in headers}) == 1:
        return
    step = headers[0].step
    said = port.everyone(SettingsSeen(step, loop.settings, loop.remembered), Phase.HEADER)
    if len({found.told for found in said.values()}) == 1:
        raise _remembered_differently(step, said)
    rows = {member: loop.named(found.told) for member, found in said.items()}
    names = list(dict.fromkeys(name for table in rows.values() for name in table))
    name = next(name for name in names if len({table.get(name) for table in rows.values()}) > 1)
    values = ", ".join(f"{member} {table.get(name, 'none')}" for member, table in rows.items())
    raise LoopUnrepeatable(
        f"replicas have set {name} differently in step {step}: {values}",
        did="the step was not committed",
        remedy="let it follow from the step's number or loss alone, or register what it follows from: "
        "protect(..., state={...}); a replica that joins knows nothing else",
    )


def _remembered_differently(step: int, said: Mapping[str, SettingsSeen]) -> LoopUnrepeatable:
    """Found in the first steps: until somebody joins, nothing else would show it."""
    names = list(dict.fromkeys(name for found in said.values() for name in found.registered))
    unlike = [name for name in names if len({found.registered.get(name) for found in said.values()}) > 1]
    what = " and ".join(repr(name) for name in unlike) or "something"
    first = unlike[0] if unlike else ""
    values = ", ".join(f"{member} {found.registered.get(first, 0):016x}" for member, found in said.items())
    return LoopUnrepeatable(
        f"replicas have made different things of {what}, registered by state=, before step {step}: {values}",
        did="the step was not committed",
        remedy="change it on every replica and alike, not only where run.is_writer holds: it may follow from the "
        "model, step.loss, step.metrics and training.evaluate(…), which are the same on all",
    )
