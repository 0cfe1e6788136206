"""Whom a difference of states is laid to, when somebody has just joined: nobody of whom it is not known."""

from __future__ import annotations

import pytest

from outlast.core.policy.step_decisions import agree
from outlast.core.protocol import RollEntry, View, ViewId
from outlast.core.protocol.step.verdict import StateDifference
from outlast.errors import LoopUnrepeatable, OutlastError, StateDiverged
from outlast.runtime.checks.state_comparison import diverged


def told(**values: int) -> OutlastError:
    """What is said where members have these fingerprints; a name that begins with j has just joined."""
    differing, majority = agree(values)
    view = ViewId(1, 2)
    there = tuple(
        RollEntry(
            member=name, view=view, committed=7, held=(), keeps_output=True, fingerprint=value, outcome=1,
            joined=name[0] == "j",
        )
        for name, value in values.items()
    )  # fmt: skip
    found = StateDifference(
        step=7, part="0.weight", num_parts=1, there=there, differing=differing, majority=majority, text="…"
    )
    return diverged(View(id=view, members=tuple(values)), found)


@pytest.mark.parametrize(
    ("values", "kind", "said"),
    [
        ({"a": 1, "b": 1, "j": 2}, LoopUnrepeatable, "of j, which has just joined, is not what the others have"),
        ({"a": 1, "j": 2}, LoopUnrepeatable, "differs where j has just joined; no value has a majority"),
        ({"a": 1, "b": 2, "j": 1}, StateDiverged, "replicas that must be equal differ in 0.weight"),
        ({"a": 1, "b": 1, "j": 2, "k": 1}, LoopUnrepeatable, "of j, which"),
        ({"a": 1, "b": 1, "c": 1, "j": 1, "j2": 2}, LoopUnrepeatable, "of j2, which has just joined, is not"),
        ({"a": 1, "b": 2}, StateDiverged, "replicas that must be equal differ in 0.weight"),
    ],
    ids=["joiner of three", "two", "another of three", "of four", "one of two joiners", "nobody joined"],
)
def test_who_has_joined_is_named_only_where_it_differs(
    values: dict[str, int], kind: type[OutlastError], said: str
) -> None:
    error = told(**values)
    assert type(error) is kind
    assert said in error.message
