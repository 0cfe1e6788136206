"""Structures, spares, topologies, placements, replication: exact results against enumeration."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.core import reliability as rel
from outlast.core.reliability._placement import brute_force
from outlast.errors import ConfigError

chance = st.floats(min_value=0.0, max_value=1.0)


def test_the_facts_fleet_arithmetic() -> None:
    assert rel.series_power(0.999, 1000) == pytest.approx(0.368, abs=5e-4)
    assert rel.any_of(0.01, [10, 100, 1000, 5000]) == pytest.approx([0.095618, 0.633968, 0.999957, 1.0], abs=5e-7)
    assert rel.FirstOf(unit=rel.Exponential(rate=1 / 50_000), num=1000).mean() * 60 == pytest.approx(3000)
    assert rel.FirstOf(unit=rel.Exponential(rate=1 / 50_000), num=10_000).mean() * 60 == pytest.approx(300)
    one = rel.availability(50_000, 2)
    assert one == pytest.approx(0.999960, abs=5e-7)
    assert rel.series_power(one, [1000, 10_000]) == pytest.approx([0.960790, 0.670325], abs=5e-7)
    assert rel.series_power([0.999, 0.9999], 10_000) == pytest.approx([4.5e-5, 0.368], rel=6e-3)


def _enumerate(k: int, p: list[float]) -> float:
    total = 0.0
    for state in product((0, 1), repeat=len(p)):
        if sum(state) >= k:
            total += float(np.prod([q if up else 1 - q for up, q in zip(state, p, strict=True)]))
    return total


@given(st.lists(chance, min_size=1, max_size=7), st.integers(0, 7))
@settings(max_examples=60)
def test_k_of_n_by_enumeration(p: list[float], k: int) -> None:
    k = min(k, len(p))
    assert rel.k_of_n(k, p) == pytest.approx(_enumerate(k, p), abs=1e-12)
    assert rel.series(p) == pytest.approx(_enumerate(len(p), p), abs=1e-12)
    assert rel.parallel(p) == pytest.approx(_enumerate(1, p), abs=1e-12)
    assert rel.k_of_n_equal(k, len(p), p[0]) == pytest.approx(_enumerate(k, [p[0]] * len(p)), abs=1e-10)


def test_shared_shocks_by_enumeration() -> None:
    exact = np.zeros(5)
    p_node, p_rack, p_all = 0.1, 0.2, 0.05
    for rack_a, rack_b, every in product((0, 1), repeat=3):
        weight = np.prod([p_rack if s else 1 - p_rack for s in (rack_a, rack_b)]) * (p_all if every else 1 - p_all)
        for nodes in product((0, 1), repeat=4):
            weight_n = np.prod([1 - p_node if up else p_node for up in nodes])
            alive = 0 if every else sum(nodes[:2]) * (1 - rack_a) + sum(nodes[2:]) * (1 - rack_b)
            exact[alive] += weight * weight_n
    assert rel.shock_survivors([2, 2], p_node, p_rack, p_all) == pytest.approx(exact, abs=1e-14)
    assert rel.beta_factor(2, 3, 0.1, 0.0) == pytest.approx(float(rel.k_of_n_equal(2, 3, 0.9)))
    assert rel.beta_factor(2, 3, 0.1, 1.0) == pytest.approx(0.9)


def test_standby_against_the_generator_matrix() -> None:
    plan = rel.Standby(num_active=3, num_spares=2, rate=0.1, repair_h=4.0, spare_rate=0.02, crews=2)
    birth = [3 * 0.1 + 2 * 0.02, 3 * 0.1 + 0.02, 0.3, 0.2, 0.1]
    death = [0.25, 0.5, 0.5, 0.5, 0.5]
    q = np.diag(birth, 1) + np.diag(death, -1)
    q -= np.diag(q.sum(axis=1))
    pi = np.linalg.lstsq(np.vstack([q.T, np.ones(6)]), np.append(np.zeros(6), 1.0), rcond=None)[0]
    assert plan.stationary() == pytest.approx(pi, abs=1e-12)
    absorbing = q[:3, :3]
    assert plan.mean_time_to_exhaustion_h() == pytest.approx(-np.linalg.solve(absorbing, np.ones(3))[0])
    assert plan.survival(0.0) == pytest.approx(1.0)
    assert plan.survival(5.0) > plan.survival(20.0) > 0


def test_more_spares_crews_and_colder_spares_are_better() -> None:
    base = {"num_active": 100, "rate": 1 / 500, "repair_h": 48.0}
    more = [rel.Standby(num_spares=s, **base).availability() for s in range(0, 25, 4)]
    assert more == sorted(more)
    hot = rel.Standby(num_spares=8, spare_rate=1 / 500, **base).availability()
    assert hot < rel.Standby(num_spares=8, **base).availability()
    assert rel.Standby(num_spares=8, crews=5, **base).availability() < rel.Standby(num_spares=8, **base).availability()
    needed = rel.spares_needed(100, 1 / 500, 48.0, 0.99)
    assert rel.Standby(num_spares=needed, **base).availability() >= 0.99
    assert rel.Standby(num_spares=needed - 1, **base).availability() < 0.99
    assert rel.spares_poisson(100, needed, 1 / 500, 48.0) == pytest.approx(
        rel.Standby(num_spares=needed, **base).availability(), abs=0.01
    )


def _connected(links: np.ndarray) -> bool:
    leaves = len(links)
    seen, stack = {0}, [0]
    while stack:
        leaf = stack.pop()
        for hub in np.flatnonzero(links[leaf]):
            for other in np.flatnonzero(links[:, hub]):
                if int(other) not in seen:
                    seen.add(int(other))
                    stack.append(int(other))
    return len(seen) == leaves and bool(links.any(axis=1).all())


@pytest.mark.parametrize(("leaves", "hubs"), [(2, 2), (3, 2), (2, 3), (1, 3), (4, 2)])
def test_bipartite_connectivity_by_enumeration(leaves: int, hubs: int) -> None:
    p, s, total = 0.7, 0.8, 0.0
    for up in product((0, 1), repeat=hubs):
        for flat in product((0, 1), repeat=leaves * hubs):
            links = np.array(flat).reshape(leaves, hubs)
            weight = np.prod([s if u else 1 - s for u in up]) * np.prod([p if x else 1 - p for x in flat])
            total += weight * _connected(links * np.array(up))
    assert rel.connected_exact(leaves, hubs, p, s) == pytest.approx(total, abs=1e-12)


@given(st.integers(2, 12), st.integers(1, 10), chance, chance)
@settings(max_examples=60)
def test_connectivity_lies_between_its_bounds(leaves: int, hubs: int, p: float, s: float) -> None:
    low, high = rel.connected_bounds(leaves, hubs, p, s)
    assert low - 1e-9 <= rel.connected_exact(leaves, hubs, p, s) <= high + 1e-9


def test_sampled_connectivity_agrees_with_the_exact_one() -> None:
    share, error = rel.connected_sampled(20, 4, 0.8, 0.95, np.random.default_rng(3), samples=20_000)
    assert abs(share - rel.connected_exact(20, 4, 0.8, 0.95)) < 4 * error
    wide = rel.fat_tree(2048, 0.9999999, 0.99999, num_spines=32)
    assert not wide.exact
    assert wide.low <= wide.value <= wide.high
    assert rel.ring(10, 0.9, two_way=True) > rel.tree(10, 0.9) > rel.ring(10, 0.9)


def test_the_facts_gemini() -> None:
    mixed, ring = rel.copies_mixed(16, 2), rel.copies_ring(16, 2)
    assert [rel.survival(mixed, k) for k in (2, 3)] == pytest.approx([0.9333, 0.8], abs=5e-5)
    assert [rel.survival(ring, k) for k in (2, 3)] == pytest.approx([0.8667, 0.6286], abs=5e-5)


@given(st.integers(4, 9), st.integers(2, 3), st.integers(0, 5), st.sampled_from(["mixed", "ring", "rotated"]))
@settings(max_examples=60)
def test_placement_counts_by_enumeration(n: int, width: int, losses: int, kind: str) -> None:
    placement = {
        "mixed": lambda: rel.copies_mixed(n, width),
        "ring": lambda: rel.copies_ring(n, width),
        "rotated": lambda: rel.parity_rotated(n, width, 1),
    }[kind]()
    losses = min(losses, n)
    assert rel.survival(placement, losses) == pytest.approx(brute_force(placement, losses), abs=1e-12)


@given(st.integers(6, 14), st.integers(2, 3), st.integers(0, 6))
@settings(max_examples=60)
def test_placements_on_any_number_of_machines_are_counted_as_by_enumeration(n: int, copies: int, losses: int) -> None:
    for ring, placement in ((False, rel.copies_mixed(n, copies)), (True, rel.copies_ring(n, copies))):
        counted = rel.copies_survival(n, copies, losses, ring=ring)
        assert counted == pytest.approx(brute_force(placement, losses), abs=1e-12)
    groups = [list(range(6))] * (n // 6 - (n % 6 > 0))
    rest = n - 6 * len(groups)
    last = rel.parity_rotated(rest, 4, 2) if rest else None
    stripes = [tuple(range(6 * g, 6 * g + 6)) for g in range(len(groups))]
    stripes += [tuple(i + 6 * len(groups) for i in stripe) for stripe in last.stripes] if last else []
    whole = rel.Placement(name="", num_machines=n, stripes=tuple(stripes), tolerates=2, bytes_ratio=1.5)
    assert rel.parity_survival(n, 4, 2, losses) == pytest.approx(brute_force(whole, losses), abs=1e-12)


def test_placements_of_a_large_fleet_are_exact_too() -> None:
    assert rel.copies_survival(50, 3, 3) == pytest.approx(1 - 20 / 19600)  # fifteen groups of three, and a ring of five
    n = 100_003  # a ring loses a pair in n of its n (n - 1) / 2
    assert 1 - rel.copies_survival(n, 2, 2, ring=True) == pytest.approx(2 / (n - 1), rel=1e-9)
    assert rel.copies_survival(9, 2, 9, ring=True) == rel.parity_survival(12, 4, 2, 12) == 0.0


def test_failure_domains_and_parity() -> None:
    rs = rel.reed_solomon(12, 4, 2)
    assert rel.survival(rs, 2) == 1.0
    assert rel.survival(rs, 3) == pytest.approx(brute_force(rs, 3))
    # two machines a domain: groups of six hold three whole domains (one loss is survived), or six halves (two are)
    together, apart = [i // 2 for i in range(12)], [i % 6 for i in range(12)]
    assert rel.survival(rs, 1, together) == 1.0
    assert rel.survival(rs, 2, together) < rel.survival(rs, 2, apart) == 1.0
    share, low, high = rel.survival_sampled(rs, 3, np.random.default_rng(0))
    assert low < rel.survival(rs, 3) < high
    assert low <= share <= high
    with pytest.raises(ConfigError, match="not groups"):
        rel.reed_solomon(10, 4, 2)


@pytest.mark.parametrize(("groups", "degree"), [(1, 2), (3, 2), (2, 3), (4, 1), (20, 2)])
def test_mnfti_by_simulation(groups: int, degree: int) -> None:
    rng, lost = np.random.default_rng(4), []
    for _ in range(4000):
        order = rng.permutation(groups * degree) // degree
        left = np.full(groups, degree)
        for m, group in enumerate(order, 1):
            left[group] -= 1
            if not left[group]:
                lost.append(m)
                break
    assert rel.mnfti(groups, degree) == pytest.approx(np.mean(lost), rel=0.05)


def test_replication_closed_forms() -> None:
    from math import comb

    assert rel.mnfti_hitting_dead(10) == pytest.approx(1 + 4**10 / comb(20, 10))  # Casanova et al., theorem 1
    assert rel.mtti(1, 2, 1.0) == pytest.approx(1.5)
    assert rel.mnfti(5000, 2) == pytest.approx(np.sqrt(np.pi * 5000), rel=0.05)
    assert rel.survive_losses(100_000, 2, 1) == pytest.approx(1.0)
    assert rel.survive_losses(8, 2, 3) == pytest.approx(0.8)  # GEMINI's mixed placement is pairs
    for groups, degree in ((3, 2), (2, 3), (6, 2), (5, 4)):
        chances = [rel.survive_losses(groups, degree, m) for m in range(groups * degree + 1)]
        assert rel.mnfti(groups, degree) == pytest.approx(sum(chances))
        alive = groups * degree - np.arange(groups * degree)
        assert rel.mtti(groups, degree, 1.0) == pytest.approx(sum(chances[:-1] / alive))


def test_the_facts_nines() -> None:
    assert rel.downtime_h([0.999, 0.9999, 0.99999]) * 60 == pytest.approx([525.6, 52.56, 5.256])
    assert rel.error_budget_min(0.999) == pytest.approx(43.2)
    assert rel.error_budget_min(0.9999) == pytest.approx(4.32)
    assert rel.budget_left_min(0.999, 3, 12) == pytest.approx(43.2 - 36)
    assert rel.detection_bound_s(5.0, 3) == 15.0
    assert rel.availability(50, 0.1) > rel.availability(100, 1.0)
    alerts = rel.burn_alerts()
    assert [round(a.factor, 6) for a in alerts] == [14.4, 6.0, 1.0]
    assert alerts[0].fires(0.02, 0.02, 0.999)
    assert not alerts[0].fires(0.02, 0.001, 0.999)
    assert alerts[0].detection_h(1.0, 0.999) == pytest.approx(0.0144)
    cheapest = rel.price_the_nine(1000, 10, 0.999, cost_per_halving_incidents=5.0, cost_per_halving_repair=2.0)
    assert cheapest[0].name == "faster repair"
    assert all(rel.availability(lever.mtbf_h, lever.mttr_h) == pytest.approx(0.999) for lever in cheapest)
    goals = (
        rel.Objective(name="latency", threshold=1.0, target=0.9),
        rel.Objective(name="quality", threshold=0.5, target=0.5, at_most=False),
    )
    met = rel.bundle_met(goals, {"latency": [0.5, 0.9, 1.5, 0.1], "quality": [0.9, 0.1, 0.9, 0.9]})
    assert met == {"latency": (0.75, False), "quality": (0.75, True), "all": (0.5, False)}
