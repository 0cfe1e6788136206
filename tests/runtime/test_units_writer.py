"""What a script left out because it was told that it does not write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from outlast.runtime.loop._writer_turn import Turn


def of(writer: str) -> tuple[Turn, Any]:
    member = SimpleNamespace(ended=None, me="r1.1", view=SimpleNamespace(members=[writer]))
    return Turn(cast(Any, SimpleNamespace(member=member))), member


def test_a_line_that_asks_in_every_step_has_left_nothing_out_once_it_writes() -> None:
    """Logging by whoever writes, through the writer's death: a run that ended well was said to be lost."""
    turn, member = of("r0.1")
    told = []
    for step in range(4):
        if step == 2:
            member.view = SimpleNamespace(members=["r1.1"])
        told.append(turn.mine())
        assert turn.skipped is (step < 2)
    assert told == [False, False, True, True]


def test_what_was_asked_once_stays_as_it_was_told() -> None:
    turn, member = of("r0.1")
    writes = turn.mine()
    member.view = SimpleNamespace(members=["r1.1"])
    assert turn.mine() is True
    assert turn.skipped is not writes
