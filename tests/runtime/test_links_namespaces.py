"""Hosts in network namespaces behind leaves and a spine: a shaped link is named in eight rounds, and no other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.health import link_report, load_fabric, read_probes

pytestmark = [pytest.mark.process, pytest.mark.campaign, pytest.mark.timeout(300)]
HOSTS, ROUNDS = 6, 8
WAIT_S = 2.0  # for a round's answers: long for a host that is only slow, and what is shaped away never comes


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def leaf_of(host: int) -> str:
    return f"l{host // 2}"


def paths() -> dict[str, list[str]]:
    found = {}
    for a in range(HOSTS):
        for b in range(a + 1, HOSTS):
            between = [f"{leaf_of(a)}-s", f"{leaf_of(b)}-s"] if leaf_of(a) != leaf_of(b) else []
            found[f"h{a}>h{b}"] = [f"h{a}-{leaf_of(a)}", *between, f"h{b}-{leaf_of(b)}"]
    return found


class Namespaces:
    """Three leaves of two hosts and a spine: bridges in one namespace, each host in its own."""

    def __init__(self) -> None:
        self.switch = f"ol{os.getpid()}s"
        self.hosts = [f"ol{os.getpid()}h{number}" for number in range(HOSTS)]

    def up(self) -> None:
        for name in (self.switch, *self.hosts):
            ip("netns", "add", name)
        for bridge in ("l0", "l1", "l2", "s"):
            self._inside("link", "add", bridge, "type", "bridge")
            self._inside("link", "set", bridge, "up")
        for leaf in ("l0", "l1", "l2"):
            self._inside("link", "add", f"{leaf}up", "type", "veth", "peer", "name", f"{leaf}dn")
            for device, bridge in ((f"{leaf}up", leaf), (f"{leaf}dn", "s")):
                self._inside("link", "set", device, "master", bridge)
                self._inside("link", "set", device, "up")
        for number, host in enumerate(self.hosts):
            self._inside("link", "add", f"p{number}", "type", "veth", "peer", "name", "eth0", "netns", host)
            self._inside("link", "set", f"p{number}", "master", leaf_of(number))
            self._inside("link", "set", f"p{number}", "up")
            ip("-n", host, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "up")

    def _inside(self, *words: str) -> None:
        ip("-n", self.switch, *words)

    def shape(self, port: str, rate: str) -> None:
        """What leaves this port beyond a small burst is dropped."""
        words = ["tbf", "rate", rate, "burst", "2kb", "latency", "1ms"]
        subprocess.run(
            ["ip", "netns", "exec", self.switch, "tc", "qdisc", "add", "dev", port, "root", *words], check=True,
            capture_output=True, timeout=30,
        )  # fmt: skip

    def down(self) -> None:
        for name in (self.switch, *self.hosts):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=30)


@pytest.fixture
def namespaces() -> Iterator[Namespaces]:
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("needs root, ip and tc")
    made = Namespaces()
    try:
        try:
            made.up()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr!r}")
        yield made
    finally:
        made.down()


@pytest.mark.parametrize(("port", "link"), [("p3", "h3-l1"), ("", "")], ids=["a host's", "none"])
def test_the_shaped_link_is_named(namespaces: Namespaces, tmp_path: Path, port: str, link: str) -> None:
    lines = [f'h{number} = "10.77.0.{number + 1}:7700"' for number in range(HOSTS)]
    lines += ["[paths]", *(f"{json.dumps(pair)} = {json.dumps(links)}" for pair, links in paths().items())]
    fabric = tmp_path / "fabric.toml"
    fabric.write_text("\n".join(["[hosts]", *lines]))
    if port:
        namespaces.shape(port, "128kbit")
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, "-m", "outlast", "health", "links", str(fabric), "--me",
             f"h{number}", "--rounds", str(ROUNDS), "--count", "4", "--patience", "60", "--wait",
             str(WAIT_S if port else 20.0), "--out", str(tmp_path / f"h{number}.jsonl")],
        )
        for number, host in enumerate(namespaces.hosts)
    ]  # fmt: skip
    assert [process.wait(240) for process in running] == [0] * HOSTS
    found, skipped = read_probes(sorted(tmp_path.glob("h*.jsonl")))
    assert skipped == 0
    report = link_report(load_fabric(fabric), found)
    assert [row.link for row in report.suspects] == ([link] if link else []), report
    if link:
        until = [link_report(load_fabric(fabric), [p for p in found if p.round <= r]) for r in range(1, ROUNDS + 1)]
        first = next(n for n, each in enumerate(until, 1) if link in [row.link for row in each.suspects])
        print(f"named after {first} rounds: {report.bad}")
