"""Views as differences (protocol, rule 4)."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.core.protocol import View, ViewId
from outlast.core.protocol._delta import apply, diff
from outlast.errors import ProtocolViolation

names = st.lists(st.sampled_from([f"r{i}.{k}" for i in range(8) for k in (1, 2)]), unique=True)


def view(n: int, members: list[str], attached: tuple[str, ...] = ()) -> View:
    return View(id=ViewId(1, n), members=tuple(members), attached=attached)


@given(names, names)
def test_applying_a_difference_gives_the_view(before: list[str], after: list[str]) -> None:
    base, new = view(1, before), view(2, after, ("r9.1",))
    assert apply(base, diff(base, new)) == new


def test_a_death_in_a_large_view_costs_a_few_bytes() -> None:
    members = [f"r{i}.1" for i in range(10_000)]
    base = view(1, members)
    new = view(2, [*members[:5_000], "r5000.2", *members[5_001:]])
    delta = diff(base, new)
    assert len(msgspec.msgpack.encode(delta)) < 200
    assert apply(base, delta) == new


def test_another_base_is_refused() -> None:
    base, new = view(1, ["a", "b"]), view(3, ["b", "c"])
    with pytest.raises(ProtocolViolation, match="cannot be applied"):
        apply(view(2, ["a", "b"]), diff(base, new))


def test_a_base_that_differs_under_the_same_number_is_noticed() -> None:
    base, new = view(1, ["a", "b"]), view(2, ["a", "b", "c"])
    with pytest.raises(ProtocolViolation, match="another digest"):
        apply(view(1, ["a", "x"]), diff(base, new))
