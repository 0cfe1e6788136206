"""Deadlines and evictions (protocol, rules 19 and 20)."""

import math
from itertools import combinations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from outlast.core.phases import Phase
from outlast.core.policy.deadlines import Durations, deadline
from outlast.core.policy.evictions import SilenceEvidence, judge, vertex_cover

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


def test_no_deadline_before_three_samples_then_three_times_the_tail() -> None:
    belief = Durations()
    for _ in range(2):
        belief.observe(1.0)
        assert deadline(belief, 0.5) == math.inf
    belief.observe(2.0)
    assert deadline(belief, 0.5) == 6.0


def test_a_slow_first_step_is_forgotten_and_a_floor_holds() -> None:
    belief = Durations()
    belief.observe(60.0)
    for _ in range(256 * 8):
        belief.observe(0.01)
    assert deadline(belief, 0.5) == 0.5


def test_an_evidence_decides() -> None:
    seen = SilenceEvidence(
        state="S", traced=False, phase=Phase.BACKWARD, silent_s=9.0, cpu_advanced=False, allowed_s=2.0, waited_s=9.0,
        deadline_s=2.0,
    )  # fmt: skip

    def decide(**changes: object) -> str:
        return judge(msgspec.structs.replace(seen, **changes), 1800.0).decision

    assert decide() == "evict"
    assert decide(traced=True) == "wait"
    assert decide(cpu_advanced=True) == "wait"
    assert decide(phase=Phase.SCATTERED) == "probe"
    assert decide(phase=Phase.SCATTERED, deaf=True) == "evict"
    assert decide(phase=Phase.SCATTERED, deaf=True, traced=True) == "wait"
    assert decide(phase=Phase.BODY) == "wait"
    assert decide(phase=Phase.BODY, silent_s=2000.0) == "evict"
    assert decide(state="T") == "evict"
    assert decide(state="T", waited_s=1.0) == "wait"
    assert decide(state="X") == "wait"


def test_python_that_never_returns_is_slow_until_outside_s() -> None:
    def seen(phase: Phase, silent_s: float) -> SilenceEvidence:
        return SilenceEvidence(
            state="R", traced=False, phase=phase, silent_s=silent_s, cpu_advanced=True, allowed_s=0.5, waited_s=9.0,
            deadline_s=1.0,
        )  # fmt: skip

    for phase in (Phase.BODY, Phase.BACKWARD, Phase.MERGE):
        assert judge(seen(phase, 9.0), 10.0).decision == "wait"
        assert judge(seen(phase, 10.5), 10.0).decision == "evict"
    assert judge(seen(Phase.SCATTERED, 99.0), 10.0).decision == "wait", "it waits for somebody else"
