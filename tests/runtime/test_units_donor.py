"""What is kept of what the loops made of their state, for who was fed, and for who is handed an outcome."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outlast.runtime.joining.donor import LaneDonor
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.loop_state import Lived
from outlast.runtime.training.step_checks import Meta


class Loop:
    """Notes of which steps copies are made."""

    def __init__(self) -> None:
        self.steps: list[int | None] = []
        self.kept: Any = None

    def keep(self, step: int | None) -> Any:
        self.steps.append(step)
        self.kept = None if step is None else Lived(step, b"own", torch.zeros(0, dtype=torch.uint8))
        return self.kept


def test_steps_are_kept_after_a_stream_was_found_broken_until_the_view_is_over() -> None:
    """Who lost its stream may have all steps but one, and is let in: the one in which that happened, or a later one
    where this donor's slices are empty. Before, it was handed it without what was registered."""
    loop, stream = Loop(), SimpleNamespace(broken=False, put=lambda outcome, payload: None)
    layout = SimpleNamespace(buckets=())
    made = SimpleNamespace(loop=loop, layout=layout, portion=lambda meta, slices, whole: (SimpleNamespace(), []))
    donor: Any = LaneDonor(SimpleNamespace(), made, lambda phase: None)  # type: ignore[arg-type]
    donor.streams = {"r3.1": stream}
    stream.broken = True
    for step in (7, 8, 9, 10, 11):
        order: Any = SimpleNamespace(index=0, count=2, last=step == 11)
        if step == 9:
            donor._copies.flushed()
        donor.keep(order, SimpleNamespace(step=step))
        donor.feed(order, SimpleNamespace(step=step))
    assert loop.steps == [7, 8, 9, None, 11], "9 is a view's first, and 11 its last"
    assert donor.streams == {}


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("copied", [True, False])
def test_who_was_handed_an_outcome_can_hand_it_on_with_what_the_loops_had_made(joined: bool, copied: bool) -> None:
    """The giver may die next, and another that joined be a step behind. Whose own loop has begun the step has a copy to
    make itself; who came in without one has none."""
    first, second = Loop(), Loop()
    if copied:
        first.kept = Lived(9, b"theirs", torch.ones(3, dtype=torch.uint8))
    meta = Meta(step=9, loss=0.0, norm=None, used=b"", buffers=(), output=0)
    giver: Any = SimpleNamespace(loop=first, newest=meta)
    taker: Any = SimpleNamespace(loop=second, newest=meta, hold=lambda meta, lived: None)
    told = Engine.told(giver, joined=True)
    Engine.heard(taker, told, joined=joined)
    if copied:
        assert Engine.told(taker, joined=True) == told
    else:
        assert second.steps == ([] if joined else [9])
