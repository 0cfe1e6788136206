"""Paths to the record break, or those of the coordinator's host to all others: at most one side goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.test_hosts import Hosts, _back, _comes_back
from tests.runtime.test_hosts_record import _LEASE_S, CLIENTS, etcd_on

from outlast.core import events as ev
from outlast.prove.host_namespaces import HostNetwork, unavailable

pytestmark = [
    pytest.mark.process,
    pytest.mark.campaign,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd here: make cluster-env"),
]


class Recorded(Hosts):
    """Three hosts that train; etcd is on the same ones, or `apart` on three others."""

    def __init__(self, net: HostNetwork, base: Path, fleet: Callable[..., Any], *, apart: bool, **shape: Any) -> None:
        self.keepers = range(3, 6) if apart else range(3)
        for host in self.keepers:
            etcd_on(net, base, host, self.keepers[0])
        self.endpoints = ",".join(f"{net.address(host)}:{CLIENTS}" for host in self.keepers)
        super().__init__(
            net, base, fleet, 1, num=3, replicas=3, record=f"etcd://{self.endpoints}", record_lease_s=_LEASE_S,
            words=("--host", "h0"), **shape,
        )  # fmt: skip

    def leader(self) -> int:
        """The host of etcd's, as those of etcd know that host 0 reaches; -1 for none."""
        words = ["etcdctl", "--endpoints", self.endpoints, "--dial-timeout", "500ms", "--command-timeout", "1s"]
        asked = [*self.net.entering(0), *words, "endpoint", "status", "-w", "json"]
        told = subprocess.run(asked, env=os.environ | {"ETCDCTL_API": "3"}, capture_output=True, timeout=30).stdout
        for each in json.loads(told or "[]"):
            if each["Status"]["header"]["member_id"] == each["Status"].get("leader"):
                return next(host for host in self.keepers if f"/{self.net.address(host)}:" in f"/{each['Endpoint']}")
        return -1

    def coordinates(self) -> int:
        """The host whose coordinator has the newest claim, as host 1 knows."""
        at = (self.base / "h1" / "coordinator").read_text()
        return next(host for host in range(3) if at.startswith(self.net.address(host) + ":"))

    def coordinators(self) -> list[ev.CoordinatorStarted]:
        return [e for e in self.run.driven.events if isinstance(e, ev.CoordinatorStarted)]


@pytest.fixture
def recorded(tmp_path: Path, fleet: Callable[..., Any]) -> Iterator[Callable[..., Recorded]]:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with HostNetwork(6, [tmp_path]) as net:
        yield lambda **shape: Recorded(net, tmp_path, fleet, **shape)


def test_etcds_leader_is_cut_off_and_then_the_coordinator_from_etcd(recorded: Callable[..., Recorded]) -> None:
    """Another of etcd's leads, and no replica is lost. Then the coordinator reaches its members, and not its record:
    another host's follows it, and a death that comes meanwhile is the new one's to deal with."""
    on = recorded(apart=True, steps=80, gates=(5, 6, 20, 21, *_back(40), 75))
    run = on.run
    run.gate(5, "all were there", lambda: len(run.driven.members) == 3)
    members, leader = run.driven.members, on.leader()
    on.net.cut(leader)
    run.gate(6, "etcd's leader was cut off", lambda: on.leader() not in (leader, -1))
    run.until("the others train", lambda: run.driven.step >= 19)
    on.net.mend(leader)
    assert run.driven.members == members
    assert run.exits() == []
    before, cut = on.coordinators()[-1], on.coordinates()
    for keeper in on.keepers:
        on.net.part(cut, keeper)
    other = next(host for host in (1, 2) if host != cut)
    run.driven.follow(on.base / f"h{other}")
    run.gate(20, "the coordinator was cut off", lambda: True)
    run.until("another has followed it", lambda: any(e.epoch > before.epoch for e in on.coordinators()))
    dead = on.on(other)[0]
    run.strike(run.pid(dead))
    run.gate(21, "one had died", lambda: run.exited(dead))
    for keeper in on.keepers:
        on.net.join(cut, keeper)
    _comes_back(on, other, dead, 40)
    run.gate(75, "who coordinated had read in etcd that another does", lambda: not Path(f"/proc/{before.pid}").exists())
    assert {e.replica for e in run.exits()} == {dead}
    on.end(1, 2)
    run.assert_unchanged()
    assert len(run.results()) == 3


def test_the_coordinators_host_never_reaches_the_record_again(recorded: Callable[..., Recorded]) -> None:
    """It is reached by the other hosts, and stays: another host's coordinator follows and calls it. A death on the
    third host is the new one's to deal with, and where the run was started it is heard that it has ended well."""
    on = recorded(apart=True, steps=80, gates=(5, 20, *_back(40)))
    run = on.run
    run.gate(5, "all were there", lambda: len(run.driven.members) == 3)
    [before], members = on.coordinators(), set(run.driven.members)
    for keeper in on.keepers:
        on.net.part(0, keeper)
    run.driven.follow(on.base / "h1")
    run.until("another has followed it", lambda: any(e.epoch > before.epoch for e in on.coordinators()))
    third = 3 - on.coordinates()
    dead = on.on(third)[0]
    run.strike(run.pid(dead))
    run.gate(20, "one had died", lambda: run.exited(dead))
    _comes_back(on, third, dead, 40)
    assert {e.replica for e in run.exits()} == {dead}
    assert members - {dead} < set(run.driven.members)
    assert on.lost() == []
    on.end(1, 2)
    run.assert_unchanged()
    assert len(run.results()) == 3


def test_the_coordinators_host_is_cut_off_from_all_others(recorded: Callable[..., Recorded]) -> None:
    """Two hosts of three have the record, and go on; the third, with the coordinator that was, stops, and joins again
    by itself when the path is back."""
    on = recorded(apart=False, steps=60, gates=(5, 6, *_back(20), 55))
    run = on.run
    run.gate(5, "all were there", lambda: len(run.driven.members) == 3)
    [gone], [before] = on.on(0), on.coordinators()
    on.net.cut(0)
    run.driven.follow(on.base / "h1")
    run.gate(6, "the others went on", lambda: gone not in run.driven.members and len(run.driven.members) == 2)
    assert [lost.agent for lost in on.lost()] == ["a0"]
    on.net.mend(0)
    _comes_back(on, 0, gone, 20)
    run.gate(55, "who coordinated had read in etcd that another does", lambda: not Path(f"/proc/{before.pid}").exists())
    on.end(1, 2)
    run.assert_unchanged()
    assert len(run.results()) == 3
