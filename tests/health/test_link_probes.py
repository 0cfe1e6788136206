"""Probes between hosts: what is lost is counted, strangers are not, and the link that explains it is named."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outlast.cli import main
from outlast.core import events as ev
from outlast.core.step_parts import PairWait
from outlast.errors import ConfigError
from outlast.health import Fabric, LinkProbe, ProbedPair, link_report, load_fabric, read_probes
from outlast.journal import Journal


def addresses(count: int) -> dict[str, str]:
    held = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(count)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    found = {f"h{number}": f"127.0.0.1:{each.getsockname()[1]}" for number, each in enumerate(held)}
    for each in held:
        each.close()
    return found


def leaves(hosts: dict[str, str]) -> dict[str, list[str]]:
    """Two hosts a leaf, one spine."""
    paths = {}
    for a in hosts:
        for b in hosts:
            one, other = int(a[1:]) // 2, int(b[1:]) // 2
            between = [f"l{one}-s", f"l{other}-s"] if one != other else []
            if a < b:
                paths[f"{a}>{b}"] = [f"{a}-l{one}", *between, f"{b}-l{other}"]
    return paths


def probed(fabric: Fabric, rounds: int, lose: Callable[[str, str, int], bool], **more: Any) -> list[ProbedPair]:
    """All hosts in this process, a thread each; who is done answers until all are."""
    probes = {
        host: LinkProbe(fabric, host, wait_s=3.0 if more else 20.0, late_s=60.0, count=10,
                        lose=lambda target, number, host=host: lose(host, target, number))
        for host in fabric.hosts
    }  # fmt: skip
    found: list[ProbedPair] = []

    def run(probe: LinkProbe) -> None:
        assert probe.start(60.0) == []
        for _ in range(rounds):
            found.extend(probe.round())
        probe.finish(60.0)

    threads = [threading.Thread(target=run, args=(probe,)) for probe in probes.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for probe in probes.values():
        probe.close()
    return found


def test_nothing_is_lost_between_hosts_that_answer_and_strangers_are_ignored() -> None:
    hosts = addresses(3)
    fabric = Fabric(hosts=hosts, digest=b"12345678")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for address in hosts.values():
            name, _, port = address.partition(":")
            for data in (b"", b"x" * 512, b"x" * 2000):
                stranger.sendto(data, (name, int(port)))
        found = probed(fabric, 3, lambda *_: False)
    assert len(found) == 3 * 3 * 2
    assert {pair.lost for pair in found} == {0}
    report = link_report(fabric, found)
    assert report.bad == []
    assert report.sent == 180


def simulated(fabric: Fabric, bad: dict[str, float], rounds: int) -> list[ProbedPair]:
    """What would be lost on average, a round trip over each pair; no die."""
    found = []
    for a in fabric.hosts:
        for b in fabric.hosts:
            if a != b:
                good = 1.0
                for link in fabric.path(a, b):
                    good *= (1 - bad.get(link, 0.0)) ** 2
                found.append(ProbedPair(at_s=1.0, round=rounds, source=a, target=b, sent=20 * rounds,
                                        lost=round(20 * rounds * (1 - good))))  # fmt: skip
    return found


def test_the_bad_link_is_named_with_its_rate_and_what_cannot_be_told() -> None:
    hosts = {f"h{n}": f"10.0.0.{n + 1}:7000" for n in range(6)}
    fabric = Fabric(hosts=hosts, paths=leaves(hosts))
    report = link_report(fabric, simulated(fabric, {"h3-l1": 0.04, "l2-s": 0.02}, 50))
    assert {row.link for row in report.suspects} == {"h3-l1", "l2-s"}
    rates = {row.link: row.rate for row in report.suspects}
    assert rates["h3-l1"] == pytest.approx(0.04, abs=0.005)
    assert any("h3-l1: 4." in text or "h3-l1: 3.9" in text for text in report.bad), report.bad
    assert report.ambiguous == []
    two = {name: hosts[name] for name in list(hosts)[:4]}
    fabric = Fabric(hosts=two, paths=leaves(two))
    report = link_report(fabric, simulated(fabric, {"l0-s": 0.05}, 50))
    assert report.ambiguous == [["l0-s", "l1-s"]], "two leaves: their uplinks lie on the same paths"
    assert "cannot tell them apart" in report.bad[0]


def test_probes_that_are_lost_name_the_host_where_nothing_is_known_of_paths() -> None:
    fabric = Fabric(hosts=addresses(4), digest=b"12345678")
    found = probed(fabric, 2, lambda source, target, number: "h2" in (source, target) and number == 3, short=True)
    assert [row.link for row in link_report(fabric, found).suspects] == ["h2"]


def test_lines_that_are_no_probes_are_counted_and_left_out(tmp_path: Path) -> None:
    good = msgspec.json.encode(ProbedPair(at_s=1.0, round=1, source="a", target="b", sent=5, lost=1))
    worse = msgspec.json.encode(ProbedPair(at_s=1.0, round=1, source="a", target="b", sent=5, lost=9))
    (tmp_path / "a").write_bytes(good + b"\n" + worse + b"\n" + good[:20])
    found, skipped = read_probes([tmp_path / "a"])
    assert (len(found), skipped) == (1, 2)
    with pytest.raises(ConfigError, match="cannot read"):
        read_probes([tmp_path / "none"])


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("hosts = 3", "no fabric"), ('[hosts]\na = "127.0.0.1:7000"', "1 hosts"),
        ('[hosts]\na = "127.0.0.1"\nb = "127.0.0.1:2"', "no address"),
        ('[hosts]\na = "127.0.0.1:1"\nb = "127.0.0.1:2"\n[paths]\n"a>c" = ["x"]', "no two hosts"),
        ("\x00", "no fabric"),
    ],
)  # fmt: skip
def test_what_is_no_fabric_is_told(text: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fabric.toml").write_text(text)
    assert main(["health", "links", str(tmp_path / "fabric.toml")]) == 2
    assert word in capsys.readouterr().err


def test_the_command_from_probes_to_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = {f"h{n}": f"10.0.0.{n + 1}:7000" for n in range(6)}
    lines = [f'{name} = "{address}"' for name, address in hosts.items()]
    paths = [f"{json.dumps(pair)} = {json.dumps(links)}" for pair, links in leaves(hosts).items()]
    place = tmp_path / "fabric.toml"
    place.write_text("\n".join(["[hosts]", *lines, "[paths]", *paths]))
    probes = simulated(load_fabric(place), {"h3-l1": 0.04}, 50)
    (tmp_path / "all.jsonl").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in probes))
    assert main(["health", "links", str(place), "--read", str(tmp_path / "all.jsonl")]) == 0
    assert "h3-l1: " in capsys.readouterr().out
    assert main(["health", "links", str(place), "--read", str(tmp_path / "all.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["suspects"][0]["link"] == "h3-l1"
    assert main(["health", "links", str(place), "--me", "h9"]) == 2
    assert main(["health", "links", str(place), "--out", "x"]) == 2


def a_run(bad: str = "", hosts: int = 6, resent: int = 40, late: int = 0) -> list[ev.AnyEvent]:
    """A replica on each host; what crosses the link `bad` is sent again, or comes late."""
    names = [f"h{number}" for number in range(hosts)]
    paths = leaves(dict.fromkeys(names, ""))
    events: list[ev.AnyEvent] = [
        ev.RunStarted(at_s=1.0, run_id="x", command=[], num_replicas=hosts, num_spares=0, signature={}, config={})
    ]
    for number, host in enumerate(names):
        events.append(ev.AgentStarted(at_s=2.0, agent=f"{host}:aa", pid=1, host=host, address=f"10.0.0.{number}"))
        events.append(ev.ReplicaStarted(at_s=3.0, replica=f"r{number}.1", agent=f"{host}:aa", pid=1))
    for here in range(hosts):
        waits = {}
        for there in set(range(hosts)) - {here}:
            crossed = bad in paths[f"h{min(here, there)}>h{max(here, there)}"]
            waits[f"r{there}.1"] = PairWait(
                exchanges=1000, late=late * crossed, segments=1000, resent=resent * crossed + 1
            )
        events.append(ev.StepAnatomy(at_s=9.0, replica=f"r{here}.1", steps=10, seconds={}, waits=waits))
    return events


@pytest.mark.parametrize(("more", "what"), [({"resent": 40}, "loss"), ({"resent": 0, "late": 80}, "late")])
def test_a_run_s_own_exchanges_name_the_bad_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: dict[str, int], what: str
) -> None:
    hosts = {f"h{number}": f"10.0.0.{number}:7700" for number in range(6)}
    # by address where the fabric has other names
    renamed = {f"node-{number}": address for number, address in enumerate(hosts.values())}
    for names in (hosts, renamed):
        keys = dict(zip(hosts, names, strict=True))
        paths = {">".join(keys[end] for end in pair.split(">")): links for pair, links in leaves(hosts).items()}
        text = "[hosts]\n" + "".join(f'{name} = "{address}"\n' for name, address in names.items()) + "[paths]\n"
        text += "".join(f'"{pair}" = {json.dumps(links)}\n' for pair, links in paths.items())
        (tmp_path / "fabric.toml").write_text(text)
        with Journal.create(tmp_path / f"run-{next(iter(names))}") as journal:
            journal.append_many(a_run("l1-s", **more))
        assert main(["health", "links", str(tmp_path / "fabric.toml"), "--run", str(journal.run_dir)]) == 0
        told = capsys.readouterr().out.splitlines()
        assert told[0].startswith("l1-s: ")
        assert f"% {what} (95 %" in told[0]
        assert "in this run" in told[0]
        assert not any("confidence" in line for line in told[1:])


def test_a_run_without_a_fabric_is_judged_by_its_hosts_links_and_one_on_one_host_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Journal.create(tmp_path / "calm") as journal:
        journal.append_many(a_run())
    assert main(["health", "links", "--run", str(tmp_path / "calm")]) == 0
    told = capsys.readouterr().out
    assert "No link is bad: 30,000 segments and 30,000 headers between hosts." in told
    assert main(["health", "links", "--run", str(tmp_path / "calm"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["pairs"]["loss"]) == 30
    with Journal.create(tmp_path / "alone") as journal:
        journal.append_many(a_run(hosts=1))
    assert main(["health", "links", "--run", str(tmp_path / "alone")]) == 2
    assert "crossed no link" in capsys.readouterr().err
    assert main(["health", "links"]) == 2
    assert main(["health", "links", "--run", str(tmp_path / "calm"), "--me", "h0"]) == 2
