"""Runs whose hosts (network namespaces on a bridge) speak by TLS: the bits of one, and who is refused is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.certificates import NAME, Authority, nobody_tells, variables
from tests.runtime.test_hosts import Hosts

from outlast.core import events as ev
from outlast.observe import timeline
from outlast.prove.host_namespaces import HostNetwork, unavailable

pytestmark = [pytest.mark.process, pytest.mark.campaign, pytest.mark.timeout(300)]


@pytest.fixture
def secured(tmp_path: Path, fleet: Callable[..., Any]) -> Iterator[Callable[..., tuple[Hosts, Authority]]]:
    """Hosts whose certificates bear one name, and who signs them."""
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    authority = Authority(tmp_path / "certificates")
    with HostNetwork(3, [tmp_path]) as net:

        def made(**shape: Any) -> tuple[Hosts, Authority]:
            mine = authority.files("head", f"DNS:{NAME}", name=NAME)._asdict()
            settings = {f"tls_{part}": value for part, value in mine.items()}
            theirs = variables(authority.files("hosts", f"DNS:{NAME}", name=NAME))
            return Hosts(net, tmp_path, fleet, 1, told=theirs, **settings, **shape), authority

        yield made


def asked(on: Hosts, host: int, told: dict[str, str], *words: str) -> subprocess.Popen[bytes]:
    """An operator's command on this host."""
    command = [sys.executable, "-m", "outlast", *words, "--join", on.endpoint]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("OUTLAST_")}
    with (on.base / f"asked{host}.log").open("wb") as log:
        return on.net.start(host, command, clean | {"OUTLAST_SECRET": on.secret} | told, log)


def test_hosts_by_tls_lose_one_and_have_the_same_bits(secured: Callable[..., tuple[Hosts, Authority]]) -> None:
    """A host's agent is killed, and it comes back: another replica is fed by TLS. Wrong certificates are refused."""
    gates = (5, 6, 20, 30, 40, 50)
    on, authority = secured(replicas=3, steps=80, gates=gates)
    run = on.run
    run.gate(5, "all were there", lambda: len(run.driven.members) == 3)
    [gone] = on.on(2)
    right = variables(authority.files("hosts", f"DNS:{NAME}", name=NAME))
    wrong = {
        "its run has TLS, and this end has no certificates": {},
        "this host's certificate is refused there: it has expired": variables(
            authority.files("expired", f"DNS:{NAME}", days=-1, name=NAME)
        ),
        "this host's certificate is refused there: it does not bear their tls_name": variables(
            authority.files("named", "DNS:else.where", name=NAME)
        ),
        "this host's certificate is refused there: it is of another authority than tls_ca": variables(
            Authority(on.base / "others").files("theirs", f"DNS:{NAME}", name=NAME)._replace(ca=authority.files().ca)
        ),
        "TLS: its certificate is for another name or address": right | {"OUTLAST_TLS_NAME": "not.theirs"},
    }
    for says, told in wrong.items():
        (on.base / "agent2.log").write_bytes(b"")
        assert on.agent(2, only=told).wait(60) == 4
        said = (on.base / "agent2.log").read_text()
        assert said.count(says) == 1, said
        assert "remedy" in said
    assert asked(on, 1, {}, "drain", "nobody").wait(60) == 4
    assert "its run has TLS" in (on.base / "asked1.log").read_text()
    assert asked(on, 1, right, "drain", "nobody").wait(60) == 2  # heard, and there is no such host
    assert "nobody" in (on.base / "asked1.log").read_text()
    on.agents[2].send_signal(signal.SIGKILL)
    run.gate(6, "it was killed", lambda: on.agents[2].wait() == -signal.SIGKILL)
    run.until("its host was given up", lambda: gone in {name for lost in on.lost() for name in lost.replicas})
    on.agents[2] = on.agent(2)

    def new() -> list[str]:
        return [name for name in on.on(2)[-1:] if name != gone]

    run.gate(20, "another replica was started there", lambda: bool(new()))
    run.gate(30, "it was served", lambda: any(map(run.served, new())))
    run.gate(40, "it had caught up", lambda: any(map(run.caught_up, new())))
    run.gate(50, "it was a member", lambda: set(new()) <= set(run.driven.members) and len(run.driven.members) == 3)
    on.end(1, 2)
    run.assert_unchanged()
    refused = [event for event in run.driven.events if isinstance(event, ev.Refused) and not event.stranger]
    reasons = {event.reason.partition(" (")[0] for event in refused}
    assert reasons >= {
        "no TLS, which this run has, but the run's secret",
        "TLS: its certificate has expired",
        "TLS: its certificate does not bear this run's tls_name",
        "TLS: its certificate is of another authority than tls_ca",
        "TLS: this host's certificate is refused there: it is for another name or address",
    }
    told_rows = " ".join(row.what for row in timeline(run.driven.events))
    assert all(reason in told_rows for reason in reasons)
    logs = [on.base / f"agent{host}.log" for host in (1, 2)]
    nobody_tells(authority, on.secret, run.driven.run_dir, on.base / "h1", on.base / "h2", *logs)
