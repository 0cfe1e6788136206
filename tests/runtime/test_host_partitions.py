"""Five hosts fall into two sides: the one that its coordinator reaches goes on, the other is ended and joins again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.test_hosts import Hosts

from outlast.prove.host_namespaces import HostNetwork, unavailable

pytestmark = [pytest.mark.process, pytest.mark.campaign, pytest.mark.timeout(300)]
_LEASE_S = 8.0


@pytest.fixture
def five(tmp_path: Path, fleet: Callable[..., Any]) -> Iterator[Hosts]:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with HostNetwork(5, [tmp_path]) as net:
        yield Hosts(net, tmp_path, fleet, 1, replicas=5, steps=60, gates=(5, 10, 20, 30, 40, 50), lease_s=_LEASE_S)


# Of three and two both halves are proved by the others: four that have each other end, and four go on.
THREE_AND_TWO = pytest.param((3, 4), id="three and two", marks=pytest.mark.soak)
ONE_AND_FOUR, ONE_WAY = pytest.param((1, 2, 3, 4), id="one and four"), pytest.param((4,), id="one way")


@pytest.mark.parametrize("lost", [THREE_AND_TWO, ONE_AND_FOUR, ONE_WAY])
def test_one_side_goes_on_and_the_other_ends_within_its_lease(five: Hosts, lost: tuple[int, ...]) -> None:
    """Its agents end its replicas; when the paths are back they offer their slots, and the run is whole again."""
    on, run = five, five.run
    run.gate(5, "all were there", lambda: len(run.driven.members) == 5)
    before = {host: on.on(host)[0] for host in range(1, 5)}
    gone, rest = {before[host] for host in lost}, set(range(5)) - set(lost)
    if len(lost) == 1:
        on.net.mute(*lost)
    for here, there in product(lost, rest) if len(lost) > 1 else ():
        on.net.part(here, there)
    run.gate(10, "the others went on without them", lambda: set(run.driven.members).isdisjoint(gone))
    run.until("their agents ended them", lambda: all(run.state(name) == "X" for name in gone))
    if len(lost) == 1:
        on.net.unmute(*lost)
    for here, there in product(lost, rest) if len(lost) > 1 else ():
        on.net.join(here, there)

    def new() -> list[str]:
        return [on.on(host)[-1] for host in lost if on.on(host)[-1] not in gone]

    run.gate(20, "others were started there", lambda: len(new()) == len(lost))
    run.gate(30, "they were served", lambda: all(map(run.served, new())))
    run.gate(40, "they had caught up", lambda: all(map(run.caught_up, new())))
    run.gate(50, "the run was whole", lambda: len(run.driven.members) == 5 and set(new()) <= set(run.driven.members))
    assert {e.replica for e in run.exits()} >= gone
    on.end(1, 2, 3, 4)
    run.assert_unchanged()
    assert len(run.results()) == 5
