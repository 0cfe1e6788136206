"""Deadlines and evictions (protocol, rules 19 and 20)."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.core.phases import Phase
from outlast.core.policy import (
    DeadlinePolicy,
    DeadlineState,
    Durations,
    EvictionBelief,
    EvictionPolicy,
    EvictionState,
)
from outlast.core.policy.evictions import vertex_cover
from outlast.errors import ConfigError

members = st.sampled_from("abcdef")
pairs = st.sets(st.tuples(members, members).filter(lambda pair: pair[0] != pair[1]), max_size=9)


@given(pairs, st.sets(members))
def test_vertex_cover_is_a_smallest_one(edges: set[tuple[str, str]], reachable: set[str]) -> None:
    chosen = vertex_cover(edges, reachable, {name: index for index, name in enumerate("abcdef")})
    assert all(a in chosen or b in chosen for a, b in edges)
    for size in range(len(chosen)):
        assert not any(all(a in c or b in c for a, b in edges) for c in combinations("abcdef", size))


def test_ties_go_to_who_is_out_of_reach_then_to_the_newest() -> None:
    age = {"a": 0, "b": 1, "c": 2}
    assert vertex_cover([("a", "b")], {"b"}, age) == ("a",)
    assert vertex_cover([("a", "b")], {"a", "b"}, age) == ("b",)


@given(st.sets(st.tuples(st.integers(0, 25), st.integers(0, 25)).filter(lambda p: p[0] != p[1]), min_size=20))
def test_a_large_cover_still_covers(edges: set[tuple[int, int]]) -> None:
    named = {(f"m{a}", f"m{b}") for a, b in edges}
    chosen = vertex_cover(named, set(), {})
    assert all(a in chosen or b in chosen for a, b in named)


def allowed_s(belief: Durations, **state: Any) -> float:
    return DeadlinePolicy(floor_s=0.5).decide(belief, DeadlineState(**state)).allowed_s


def test_no_deadline_before_three_samples_then_three_times_the_tail() -> None:
    belief = Durations()
    for _ in range(2):
        belief.observe(1.0)
        assert allowed_s(belief) == math.inf
        assert allowed_s(belief, longest_s=9.0) == 9.0
    belief.observe(2.0)
    assert allowed_s(belief) == 6.0
    assert allowed_s(belief, longest_s=4.0) == 4.0
    assert allowed_s(belief, awaited=False, longest_s=9.0) == 9.0, "what nobody waits for has no learned one"


def test_a_slow_first_step_is_forgotten_and_a_floor_holds() -> None:
    belief = Durations()
    belief.observe(60.0)
    for _ in range(256 * 8):
        belief.observe(0.01)
    assert allowed_s(belief) == 0.5


@pytest.mark.parametrize(
    "made",
    [
        lambda: DeadlinePolicy(floor_s=-1.0),
        lambda: DeadlinePolicy(floor_s=math.nan),
        lambda: EvictionPolicy(outside_s=0.0),
    ],
)
def test_policies_of_no_sense_are_refused(made: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        made()


LEARNED = EvictionBelief(allowed_s=2.0, awaited_s=2.0)


def test_an_evidence_decides() -> None:
    seen = EvictionState(kernel="S", phase=Phase.BACKWARD, silent_s=9.0, waited_s=9.0)

    def decide(**changes: Any) -> str:
        return EvictionPolicy(outside_s=1800.0).decide(LEARNED, replace(seen, **changes)).action

    assert decide() == "evict"
    assert decide(traced=True) == "wait"
    assert decide(cpu_advanced=True) == "wait"
    assert decide(phase=Phase.SCATTERED) == "probe"
    assert decide(phase=Phase.SCATTERED, deaf=True) == "evict"
    assert decide(phase=Phase.SCATTERED, deaf=True, traced=True) == "wait"
    assert decide(phase=Phase.CONNECT) == "probe"
    assert decide(phase=Phase.CONNECT, full=True) == "evict"
    assert decide(phase=Phase.CONNECT, full=True, alone=True) == "probe", "nobody else has the state"
    assert decide(phase=Phase.BODY) == "wait"
    assert decide(phase=Phase.BODY, silent_s=2000.0) == "evict"
    assert decide(kernel="T") == "evict"
    assert decide(kernel="T", waited_s=1.0) == "wait"
    assert decide(kernel="X") == "wait"
    assert decide(kernel="T", alone=True) == "continue"
    assert decide(kernel="T", alone=True, traced=True) == "wait"
    assert decide(kernel="T", alone=True, silent_s=2000.0) == "evict"
    assert decide(kernel="T", seated=False) == "wait"
    assert decide(kernel="T", seated=False, asked=False) == "evict"


def test_python_that_never_returns_is_slow_until_outside_s() -> None:
    def decide(phase: Phase, silent_s: float) -> str:
        state = EvictionState(kernel="R", phase=phase, silent_s=silent_s, waited_s=9.0, cpu_advanced=True)
        return EvictionPolicy(outside_s=10.0).decide(EvictionBelief(allowed_s=0.5, awaited_s=1.0), state).action

    for phase in (Phase.BODY, Phase.BACKWARD, Phase.MERGE):
        assert decide(phase, 9.0) == "wait"
        assert decide(phase, 10.5) == "evict"
    assert decide(Phase.SCATTERED, 99.0) == "wait", "it waits for somebody else"
