"""Runs whose record is in an etcd on three hosts: the coordinator's host is lost for good, and another goes on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.certificates import Authority, by_tls, etcd_variables, nobody_tells, variables
from tests.runtime.conftest import undisturbed
from tests.runtime.test_hosts import Hosts, _back, _comes_back

from outlast.config import TlsFiles
from outlast.core import events as ev
from outlast.journal import Journal
from outlast.prove.host_namespaces import HostNetwork, unavailable

pytestmark = [pytest.mark.process, pytest.mark.campaign, pytest.mark.timeout(300)]
CLIENTS, PEERS = 2379, 2380
_LEASE_S = 6.0  # longer than a busy machine keeps a coordinator, or etcd, from giving a sign: it is followed once


def etcd_on(
    net: HostNetwork, base: Path, host: int, first: int = 0, files: TlsFiles | None = None
) -> subprocess.Popen[bytes]:
    """A member on this host, of a cluster on three, from the `first` on. `files`: by TLS, and who asks or is a member
    has to show a certificate."""
    scheme = "https" if files else "http"
    at = f"{scheme}://{net.address(host)}"
    cluster = ",".join(f"m{index}={scheme}://{net.address(index)}:{PEERS}" for index in range(first, first + 3))
    command = [
        "etcd", "--name", f"m{host}", "--data-dir", str(base / f"etcd{host}"), "--listen-client-urls",
        f"{at}:{CLIENTS}", "--advertise-client-urls", f"{at}:{CLIENTS}", "--listen-peer-urls", f"{at}:{PEERS}",
        "--initial-advertise-peer-urls", f"{at}:{PEERS}", "--initial-cluster", cluster,
        "--heartbeat-interval", "50", "--election-timeout", "400", *(by_tls(files) if files else ()),
    ]  # fmt: skip
    with (base / f"etcd{host}.log").open("ab") as log:
        return net.start(host, command, out=log)


def own(authority: Authority, net: HostNetwork, host: int) -> TlsFiles:
    """This host's certificate, for its address alone."""
    return authority.files(f"h{host}", f"IP:{net.address(host)}")


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
        yield lambda slots=2, **shape: Hosts(
            net, tmp_path, fleet, slots, record=record, record_lease_s=_LEASE_S, **shape
        )


@pytest.fixture
def secured(tmp_path: Path, fleet: Callable[..., Any]) -> Iterator[Callable[..., tuple[Hosts, Authority]]]:
    """The run and its etcd by TLS, with certificates at both ends; each host's is for its own address alone."""
    reason = unavailable() or ("" if shutil.which("etcd") else "no etcd here: make cluster-env")
    if reason:
        pytest.skip(reason)
    authority = Authority(tmp_path / "certificates")
    with HostNetwork(3, [tmp_path]) as net:
        for host in range(3):
            etcd_on(net, tmp_path, host, files=own(authority, net, host))

        def told(host: int) -> dict[str, str]:
            mine = own(authority, net, host)
            return variables(mine) | etcd_variables(mine)

        def made(slots: int = 2, **shape: Any) -> tuple[Hosts, Authority]:
            record = "etcds://" + ",".join(f"{net.address(host)}:{CLIENTS}" for host in range(3))
            on = Hosts(net, tmp_path, fleet, slots, record=record, record_lease_s=_LEASE_S, told=told, **shape)
            return on, authority

        yield made


@pytest.mark.soak  # by TLS it is the same and more
def test_the_host_of_the_coordinator_is_lost_for_good(shared: Callable[..., Hosts]) -> None:
    """Members and coordinator of a host at once, and one of etcd's members with them."""
    _loses_the_first(shared(replicas=4, steps=14, gates=(6,)))


def test_the_host_of_the_coordinator_is_lost_and_all_goes_by_tls(
    secured: Callable[..., tuple[Hosts, Authority]],
) -> None:
    """The run and etcd both want certificates: whoever follows is called, and calls, by TLS, and nobody tells a key."""
    on, authority = secured(replicas=4, steps=14, gates=(6,))
    _loses_the_first(on)
    refused = [e for host in (1, 2) for e in told(on.base / f"h{host}") if isinstance(e, ev.Refused)]
    assert [e for e in refused if not e.stranger] == []  # who hangs up as the view changes is counted as a stranger
    nobody_tells(authority, on.secret, on.run.driven.run_dir, on.base / "h1", on.base / "h2", *on.base.glob("*.log"))


def _loses_the_first(on: Hosts) -> None:
    run = on.run
    run.until("all wait at the gate", lambda: run.driven.step >= 5 and len(run.driven.members) == 4)
    on.net.power_off(0)
    run.open_gates()
    assert [on.ended(host) for host in (1, 2)] == [0, 0]
    want, results = undisturbed(*run.shape), run.results()
    assert results
    for found in results.values():
        assert found["fingerprint"] == want["fingerprint"]
        first = min(map(int, found["losses"]))  # of a replacement, since it joined
        assert found["losses"] == {step: loss for step, loss in want["losses"].items() if int(step) >= first}
    assert any(found["losses"] == want["losses"] for found in results.values())
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


@pytest.mark.soak  # by TLS it is the same and more
def test_a_host_joins_by_the_record_once_the_coordinator_s_is_lost(shared: Callable[..., Hosts]) -> None:
    """It comes back, is told nobody's address, and finds whoever has taken over."""
    _comes_back_by_the_record(shared(slots=1, replicas=3, steps=60, gates=(5, 6, *_back(20))))


def _comes_back_by_the_record(on: Hosts) -> None:
    run = on.run
    run.gate(5, "all were there", lambda: len(run.driven.members) == 3)
    [gone] = set(run.driven.members) - {*on.on(1), *on.on(2)}
    on.net.power_off(0)
    run.driven.follow(on.base / "h1")  # what was on the first host is gone
    run.driven.process = on.agents[1]  # type: ignore[assignment]
    run.gate(6, "another host's gave it up", lambda: [lost.agent for lost in on.lost()] == ["a0"])
    on.net.mend(0)
    on.agents[0] = on.agent(0, to=on.record)
    _comes_back(on, 0, gone, 20)
    on.end(0, 2)
    run.assert_unchanged()
    assert len(run.results()) == 3


def test_a_host_joins_by_the_record_and_all_goes_by_tls(secured: Callable[..., tuple[Hosts, Authority]]) -> None:
    on, _ = secured(slots=1, replicas=3, steps=60, gates=(5, 6, *_back(20)))
    _comes_back_by_the_record(on)
