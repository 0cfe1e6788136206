"""Runs whose record is in an etcd on three hosts: the coordinator's host is lost for good, and another goes on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.conftest import undisturbed
from tests.runtime.test_hosts import Hosts

from outlast.core import events as ev
from outlast.journal import Journal
from outlast.prove.host_namespaces import HostNetwork, unavailable

pytestmark = [pytest.mark.process, pytest.mark.campaign]
CLIENTS, PEERS = 2379, 2380


def etcd_on(net: HostNetwork, base: Path, host: int) -> subprocess.Popen[bytes]:
    """A member on this host, of a cluster on the first three."""
    at = f"http://{net.address(host)}"
    cluster = ",".join(f"m{index}=http://{net.address(index)}:{PEERS}" for index in range(3))
    command = [
        "etcd", "--name", f"m{host}", "--data-dir", str(base / f"etcd{host}"), "--listen-client-urls",
        f"{at}:{CLIENTS}", "--advertise-client-urls", f"{at}:{CLIENTS}", "--listen-peer-urls", f"{at}:{PEERS}",
        "--initial-advertise-peer-urls", f"{at}:{PEERS}", "--initial-cluster", cluster,
        "--heartbeat-interval", "50", "--election-timeout", "400",
    ]  # fmt: skip
    with (base / f"etcd{host}.log").open("ab") as log:
        return net.start(host, command, out=log)


def told(folder: Path) -> list[ev.AnyEvent]:
    """What the journal in a host's folder says."""
    with Journal.open_reader(folder) as journal:
        return [entry.event for entry in journal.events()]


@pytest.fixture
def shared(tmp_path: Path, fleet: Callable[..., Any]) -> Iterator[Callable[..., Hosts]]:
    reason = unavailable() or ("" if shutil.which("etcd") else "no etcd here: make cluster-env")
    if reason:
        pytest.skip(reason)
    with HostNetwork(3, [tmp_path]) as net:
        for host in range(3):
            etcd_on(net, tmp_path, host)
        record = "etcd://" + ",".join(f"{net.address(host)}:{CLIENTS}" for host in range(3))
        yield lambda slots=2, **shape: Hosts(net, tmp_path, fleet, slots, record=record, **shape)


def test_the_host_of_the_coordinator_is_lost_for_good(shared: Callable[..., Hosts]) -> None:
    """Members and coordinator of a host at once, and one of etcd's members with them."""
    on = shared(replicas=4, steps=14, gates=(6,))
    run = on.run
    run.until("all wait at the gate", lambda: run.driven.step >= 5 and len(run.driven.members) == 4)
    on.net.power_off(0)
    run.open_gates()
    assert [on.ended(host) for host in (1, 2)] == [0, 0]
    want, results = undisturbed(*run.shape), run.results()
    assert results
    for found in results.values():
        assert found["fingerprint"] == want["fingerprint"]
        assert found["losses"] == want["losses"]
    for host in (1, 2):  # both keep the whole story
        story = told(on.base / f"h{host}")
        epochs = [e.epoch for e in story if isinstance(e, ev.CoordinatorStarted)]
        assert epochs == [1, 2]
        assert [e.run_id for e in story if isinstance(e, ev.RunStarted)]
        [lost] = [e for e in story if isinstance(e, ev.AgentLost)]
        assert lost.agent == "a0"
        causes = [e.cause for e in story if isinstance(e, ev.Recovery)]
        assert "coordinator" in causes
        assert [e.outcome for e in story if isinstance(e, ev.RunFinished)] == ["finished"]
