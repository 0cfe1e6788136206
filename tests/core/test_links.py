"""Bad links are named from what pairs of hosts saw, good ones are not, and what cannot be told apart is said."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from outlast.core.reliability import localise_links
from outlast.errors import ConfigError

Paths = list[list[int]]


def fat_tree(leaves: int, spines: int, hosts: int) -> tuple[Paths, int]:
    """Hosts under leaves, each leaf under each spine: links host-leaf, then leaf-spine; probes from each host to two
    other leaves over every spine."""
    total = leaves * hosts
    paths = []
    for host in range(total):
        leaf = host // hosts
        for spine, step in itertools.product(range(spines), (1, leaves // 2)):
            other = (leaf + step) % leaves
            peer = other * hosts + host % hosts
            paths.append([host, total + leaf * spines + spine, total + other * spines + spine, peer])
    return paths, total + leaves * spines


def ring(hosts: int) -> tuple[Paths, int]:
    """Neighbours, and those two and three away."""
    return [[(i + j) % hosts for j in range(step)] for i in range(hosts) for step in (1, 2, 3)], hosts


def rail(hosts: int, rails: int) -> tuple[Paths, int]:
    """Each host has one link a rail; probes between hosts on each rail."""
    return [
        [a * rails + r, ((a + d) % hosts) * rails + r] for a in range(hosts) for r in range(rails) for d in (1, 3, 7)
    ], hosts * rails


FABRICS = {"fat tree": fat_tree(8, 4, 8), "rail": rail(32, 4), "ring": ring(64)}


def probed(paths: Paths, num_links: int, bad: dict[int, float], sent: int, seed: int) -> tuple[list[int], list[int]]:
    draw = np.random.default_rng(seed)
    good = np.full(num_links, 1 - 1e-6)
    for link, rate in bad.items():
        good[link] = 1 - rate
    return [sent] * len(paths), [int(draw.binomial(sent, 1 - good[path].prod())) for path in paths]


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize(("rate", "sent"), [(0.1, 200), (0.01, 2000), (0.001, 20_000)])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_bad_links_are_named_and_good_ones_are_not(fabric: str, rate: float, sent: int, count: int) -> None:
    paths, links = FABRICS[fabric]
    draw = np.random.default_rng(count)
    bad = {int(link): rate for link in draw.choice(links, count, replace=False)}
    found = localise_links(paths, *probed(paths, links, bad, sent, 1), num_links=links)
    assert {s.link for s in found.suspects} == set(bad)
    assert all(s.low <= rate * 1.5 and s.high >= rate / 1.5 for s in found.suspects)
    assert min(s.confidence for s in found.suspects) > 0.95


@pytest.mark.parametrize("fabric", FABRICS)
def test_where_nothing_is_bad_nothing_is_named(fabric: str) -> None:
    paths, links = FABRICS[fabric]
    named = sum(
        bool(localise_links(paths, *probed(paths, links, {}, 5000, seed), num_links=links).suspects)
        for seed in range(40)
    )
    assert named == 0


def test_a_background_of_losses_is_not_laid_on_a_link() -> None:
    paths, links = FABRICS["fat tree"]
    everywhere = dict.fromkeys(range(links), 0.002)
    assert localise_links(paths, *probed(paths, links, everywhere, 3000, 0), num_links=links).suspects == ()
    found = localise_links(paths, *probed(paths, links, everywhere | {70: 0.05}, 3000, 0), num_links=links)
    assert [s.link for s in found.suspects] == [70]
    assert found.background == pytest.approx(2e-3, rel=0.3)


def test_links_that_lie_on_the_same_paths_are_named_together() -> None:
    paths = [[0, 1, 4], [0, 1, 5], [2, 4], [2, 5]]
    found = localise_links(paths, [1000] * 4, [100, 90, 0, 1], num_links=7)
    assert [(s.link, s.same_as) for s in found.suspects] == [(0, (1,))]
    assert (found.ambiguous, found.unseen) == (((0, 1),), (3, 6))


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    paths, links = FABRICS["rail"]
    held = []
    for seed in range(60):
        found = localise_links(paths, *probed(paths, links, {17: 0.02}, 1000, seed), num_links=links)
        held.append(found.suspects[0].low <= 0.02 <= found.suspects[0].high)
    assert np.mean(held) >= 0.88


def test_nothing_sent_says_nothing() -> None:
    assert localise_links([[0], [1]], [0, 0], [0, 0], num_links=2).suspects == ()
    assert localise_links([], [], [], num_links=3).unseen == (0, 1, 2)


@pytest.mark.parametrize(
    ("paths", "sent", "bad"), [([[0]], [1], [2]), ([[0]], [1, 2], [0]), ([[5]], [1], [0]), ([[0]], [float("nan")], [0])]
)
def test_what_is_no_set_of_probes_is_refused(paths: Paths, sent: list[float], bad: list[float]) -> None:
    with pytest.raises((ConfigError, ValueError)):
        localise_links(paths, sent, bad, num_links=3)
