"""What a donor keeps of what the loops made of their state, for who was fed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outlast.runtime.joining.donor import LaneDonor


class Loop:
    """Notes of which steps copies are made."""

    def __init__(self) -> None:
        self.steps: list[int | None] = []

    def keep(self, step: int | None) -> Any:
        self.steps.append(step)
        return None


def test_the_step_in_which_a_stream_is_found_broken_is_kept_and_none_after_it() -> None:
    """Who lost its stream has all steps but that one, and is let in. Before, it was handed it without what was
    registered; two steps behind it would be stale."""
    loop, stream = Loop(), SimpleNamespace(broken=False, put=lambda outcome, payload: None)
    layout = SimpleNamespace(buckets=())
    made = SimpleNamespace(loop=loop, layout=layout, portion=lambda meta, slices, whole: (SimpleNamespace(), []))
    donor: Any = LaneDonor(SimpleNamespace(), made, lambda phase: None)  # type: ignore[arg-type]
    donor.streams = {"r3.1": stream}
    order: Any = SimpleNamespace(index=0, count=2, last=False)
    stream.broken = True
    for step in (7, 8):
        donor.feed(order, SimpleNamespace(step=step))
    assert loop.steps == [7, None]
    assert donor.streams == {}
