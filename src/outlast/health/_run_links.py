"""What a run's exchanges say of the links between its hosts: its members' words, in the form of probes.

Two kinds of evidence, judged apart: what TCP had to send again, of all that a member sent to another; and headers that
came much later than those of others. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from outlast.core import events as ev
from outlast.errors import ConfigError
from outlast.health._link_probes import Fabric, ProbedPair

__all__ = ["fabric_of_run", "pairs_of_run"]


class _Places:
    """Where each replica of a run is: the name of its host, and the address that it gave."""

    def __init__(self, events: Iterable[ev.AnyEvent]) -> None:
        self.hosts: dict[str, str] = {}  # agent -> host, or the agent where no host was named
        self.addresses: dict[str, str] = {}
        self.agents: dict[str, str] = {}
        self.words: dict[str, ev.StepAnatomy] = {}  # the newest of each replica
        self.began_s = 0.0
        for event in events:
            match event:
                case ev.RunStarted():
                    self.began_s = event.at_s
                case ev.AgentStarted():
                    self.hosts[event.agent] = event.host or event.agent
                    self.addresses[self.hosts[event.agent]] = event.address
                case ev.ReplicaStarted():
                    self.agents[event.replica] = event.agent
                case ev.StepAnatomy():
                    self.words[event.replica] = event

    def host(self, replica: str) -> str:
        return self.hosts.get(self.agents.get(replica, ""), "")


def fabric_of_run(events: Iterable[ev.AnyEvent]) -> Fabric:
    """A fabric in which each host of the run is known by its own link. ConfigError if the run had fewer than two."""
    places = _Places(events)
    hosts = {places.host(replica) for replica in places.words} - {""}
    if len(hosts) < 2:
        raise ConfigError(
            "the exchanges of this run crossed no link: its replicas were on one host",
            remedy="a run on several hosts (outlast run --endpoint), or probes: outlast health links FABRIC --me HOST",
        )
    return Fabric(hosts={host: places.addresses.get(host, "") for host in sorted(hosts)})


def pairs_of_run(events: Iterable[ev.AnyEvent], fabric: Fabric) -> dict[str, list[ProbedPair]]:
    """Evidence by kind, "loss" and "late", of each ordered pair of the fabric's hosts that the run's members speak of.
    A host of the run is the one of the fabric with its name, else with its address."""
    places = _Places(events)
    names = _named(fabric, places.addresses)
    lost: dict[tuple[str, str], list[int]] = {}
    late: dict[tuple[str, str], list[int]] = {}
    for replica, word in places.words.items():
        for peer, wait in word.waits.items():
            here, there = names.get(places.host(replica), ""), names.get(places.host(peer), "")
            if here and there and here != there:
                _add(lost, (here, there), wait.segments, wait.resent)
                _add(late, (there, here), wait.exchanges, wait.late)
    return {
        "loss": [_probed(places.began_s, pair, sent, lost=bad) for pair, (sent, bad) in lost.items() if sent],
        "late": [_probed(places.began_s, pair, sent, late=bad) for pair, (sent, bad) in late.items() if sent],
    }


def _named(fabric: Fabric, addresses: Mapping[str, str]) -> dict[str, str]:
    """Host of the run -> host of the fabric."""
    by_address = {address.rpartition(":")[0]: host for host, address in fabric.hosts.items() if address}
    found = {host: host if host in fabric.hosts else by_address.get(address, "") for host, address in addresses.items()}
    return {host: name for host, name in found.items() if name}


def _add(sums: dict[tuple[str, str], list[int]], pair: tuple[str, str], sent: int, bad: int) -> None:
    row = sums.setdefault(pair, [0, 0])
    row[0] += max(0, sent)
    row[1] += min(max(0, bad), max(0, sent))


def _probed(at_s: float, pair: tuple[str, str], sent: int, *, lost: int = 0, late: int = 0) -> ProbedPair:
    return ProbedPair(at_s=at_s, round=1, source=pair[0], target=pair[1], sent=sent, lost=lost, late=late)
