"""What a run's exchanges say of the links between its hosts: its members' words, in the form of probes.

Two kinds of evidence, judged apart: what TCP had to send again, of all that a member sent to another; and headers that
came much later than those of others. A host whose replica computes longer than others is late by itself, so its
lateness says nothing of its link and is left out. What TCP loses comes in bursts, more than any model of single probes
allows for; so a link is named only if it would be without the pair that speaks against it most. One member's word may
be wrong, or a lie: it is named only if it would be without any one speaker, and no pair weighs more than ten times the
median one. No torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from outlast.core import events as ev
from outlast.core.step_parts import PairWait
from outlast.errors import ConfigError
from outlast.health._link_probes import BadLink, Fabric, LinkReport, ProbedPair, link_report, since_words

__all__ = ["RunLinks", "fabric_of_run", "pairs_of_run", "run_links"]

_OWN_S = 0.01  # of a step: who computes so much longer than the median member may be late for that alone
_HEAVIEST = 10.0  # times the median pair
_FEWEST_SPEAKERS = 4  # of three the two that are left may contradict each other
_MOST_SPEAKERS = 32  # that are left out in turn: those who speak of most
_LEVEL = 0.01  # of naming a time since when, where there is none


class RunLinks(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's own exchanges tell. `pairs`, `reports`: by kind of evidence, "loss" and "late"; `slow`: hosts whose
    lateness was left out, as their replicas compute longer; `apart`: pairs that are bad by themselves, a sentence each,
    which says nothing of any one link."""

    pairs: dict[str, list[ProbedPair]]
    reports: dict[str, LinkReport]
    slow: list[str]
    apart: list[str] = []

    @property
    def links(self) -> dict[str, str]:
        """Return the bad links, each with a sentence; one that loses is said once, though it delays as well."""
        rows: list[tuple[BadLink, str]] = []
        for kind in ("late", "loss"):
            rows += zip(self.reports[kind].suspects, self.reports[kind].bad, strict=True)
        return {suspect.link: text for suspect, text in rows}

    @property
    def said(self) -> list[str]:
        """Return the sentences, of those that lose before those that are only late."""
        lossy = {suspect.link for suspect in self.reports["loss"].suspects}
        return [text for _, text in sorted(self.links.items(), key=lambda item: item[0] not in lossy)]


class _Interval(NamedTuple):
    """What was sent over a pair's path, and how much of it was lost or late, between two words of one member."""

    start_s: float
    end_s: float
    sent: int
    bad: int


class _Places:
    """Where each replica of a run is: the name of its host, and the address that it gave."""

    def __init__(self, events: Iterable[ev.AnyEvent]) -> None:
        self.hosts: dict[
            str, str
        ] = {}  # agent -> host; those that the launcher started are on one, called as the first
        self.addresses: dict[str, str] = {}
        self.agents: dict[str, str] = {}
        self.words: dict[str, list[ev.StepAnatomy]] = {}  # of each replica, in order
        self.started_s: dict[str, float] = {}
        self.began_s, launched = 0.0, ""
        for event in events:
            match event:
                case ev.RunStarted():
                    self.began_s = event.at_s
                case ev.AgentStarted():
                    launched = launched or (event.agent if not event.host else "")
                    self.hosts[event.agent] = event.host or launched
                    self.addresses[self.hosts[event.agent]] = event.address
                case ev.ReplicaStarted():
                    self.agents[event.replica] = event.agent
                    self.started_s[event.replica] = event.at_s
                case ev.StepAnatomy():
                    self.words.setdefault(event.replica, []).append(event)

    def host(self, replica: str) -> str:
        return self.hosts.get(self.agents.get(replica, ""), "")

    def newest(self) -> dict[str, ev.StepAnatomy]:
        """The last word of each replica."""
        return {replica: words[-1] for replica, words in self.words.items()}

    def slow(self) -> set[str]:
        """Replicas whose own part of a step takes so much longer than the median replica's that others wait for it."""
        own_s = {name: _own_s(word) for name, word in self.newest().items() if word.steps > 0}
        usual_s = median(own_s.values()) if own_s else 0.0
        return {name for name, seconds in own_s.items() if seconds - usual_s > _OWN_S}


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
    return _pairs(_Places(events), fabric)


def run_links(events: Iterable[ev.AnyEvent], fabric: Fabric | None = None) -> RunLinks:
    """Which links the run's own exchanges name, and since when. Without a fabric each host is known by its own link;
    ConfigError then if the run had fewer than two hosts."""
    rows = list(events)
    fabric = fabric_of_run(rows) if fabric is None else fabric
    places = _Places(rows)
    names = _named(fabric, places.addresses)
    pairs, reports, apart = _pairs(places, fabric), {}, []
    for kind, probed in pairs.items():

        def since(link: str, kind: str = kind) -> str:
            return _since(places, fabric, names, link, kind)

        speakers = [row.source if kind == "loss" else row.target for row in probed]
        reports[kind], alone = _named_without_the_worst(fabric, probed, speakers, since)
        apart += alone
    slow = {names.get(places.host(replica), places.host(replica)) for replica in places.slow()}
    return RunLinks(pairs=pairs, reports=reports, slow=sorted(slow - {""}), apart=apart)


def _named_without_the_worst(
    fabric: Fabric, probed: list[ProbedPair], speakers: Sequence[str], since: Callable[[str], str]
) -> tuple[LinkReport, list[str]]:
    """(the report of those links that are named also without their worst pairs and without any one speaker, those pairs
    that name none)."""
    whole = link_report(fabric, probed, round_trips=False, since=since)
    worst = {_worst(fabric, probed, suspect.link): suspect for suspect in whole.suspects}
    rest = [row for row in probed if (row.source, row.target) not in worst]
    again = link_report(fabric, rest, round_trips=False, since=since)
    sure = {row.link for row in again.suspects}
    for speaker in _loudest(probed, speakers) if sure and len(set(speakers)) >= _FEWEST_SPEAKERS else ():
        others = [row for row, who in zip(probed, speakers, strict=True) if who != speaker]
        sure &= {row.link for row in link_report(fabric, others, round_trips=False, since=since).suspects}
    kept, named = [], set()
    for text, suspect in [*zip(whole.bad, whole.suspects, strict=True), *zip(again.bad, again.suspects, strict=True)]:
        if suspect.link not in named and suspect.link in sure:
            named.add(suspect.link)
            kept.append((text, suspect))
    apart = []
    for source, target in worst:
        if named.isdisjoint(fabric.path(source, target)):
            [row] = [row for row in probed if (row.source, row.target) == (source, target)]
            bad = f"{(row.lost + row.late) / row.sent:.2%} {'loss' if row.lost else 'late'}"
            apart.append(f"{source} to {target}: {bad} in this run, and on no other pair: no link can be named for it")
    report = msgspec.structs.replace(
        whole, bad=[text for text, _ in kept], suspects=[suspect for _, suspect in kept], background=again.background
    )
    return report, apart


def _loudest(probed: Sequence[ProbedPair], speakers: Sequence[str]) -> list[str]:
    total: Counter[str] = Counter()
    for row, speaker in zip(probed, speakers, strict=True):
        total[speaker] += row.sent
    return [speaker for speaker, _ in total.most_common(_MOST_SPEAKERS)]


def _worst(fabric: Fabric, probed: Iterable[ProbedPair], link: str) -> tuple[str, str]:
    """The pair over this link that speaks against it most."""
    rows = [row for row in probed if link in fabric.path(row.source, row.target)]
    row = max(rows, key=lambda row: (row.lost + row.late, row.source, row.target))
    return row.source, row.target


def _pairs(places: _Places, fabric: Fabric) -> dict[str, list[ProbedPair]]:
    names, slow = _named(fabric, places.addresses), places.slow()
    lost: dict[tuple[str, str], list[int]] = {}
    late: dict[tuple[str, str], list[int]] = {}
    for replica, word in places.newest().items():
        for peer, wait in word.waits.items():
            here, there = names.get(places.host(replica), ""), names.get(places.host(peer), "")
            if here and there and here != there:
                _add(lost, (here, there), wait.segments, wait.resent)
                if peer not in slow:
                    _add(late, (there, here), wait.exchanges, wait.late)
    return {
        "loss": [_probed(places.began_s, pair, sent, lost=bad) for pair, (sent, bad) in _bounded(lost).items() if sent],
        "late": [_probed(places.began_s, pair, sent, late=bad) for pair, (sent, bad) in _bounded(late).items() if sent],
    }


def _bounded(sums: Mapping[tuple[str, str], list[int]]) -> dict[tuple[str, str], tuple[int, int]]:
    """The same with no pair far heavier than the others, whatever its speaker says."""
    most = int(_HEAVIEST * median([sent for sent, _ in sums.values() if sent] or [0]))
    return {
        pair: (sent, bad) if sent <= most else (most, round(bad * (most / sent))) for pair, (sent, bad) in sums.items()
    }


def _own_s(word: ev.StepAnatomy) -> float:
    return (word.seconds.get("load", 0.0) + word.seconds.get("compute", 0.0)) / word.steps


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


# --- since when -------------------------------------------------------------------------------------------------------
def _since(places: _Places, fabric: Fabric, names: Mapping[str, str], link: str, kind: str) -> str:
    """Since when the link is bad, as near as the words of the members allow, and how bad it is since then."""
    rows: list[_Interval] = []
    for replica, words in places.words.items():
        before: dict[str, PairWait] = {}
        here, since_s = names.get(places.host(replica), ""), places.started_s.get(replica, places.began_s)
        for word in words:
            for peer, wait in word.waits.items():
                there = names.get(places.host(peer), "")
                if here and there and here != there and link in fabric.path(here, there):
                    sent, bad = _counted(wait, kind)
                    then = _counted(before[peer], kind) if peer in before else (0, 0)
                    rows.append(_Interval(since_s, word.at_s, max(0, sent - then[0]), max(0, bad - then[1])))
            before, since_s = word.waits, word.at_s
    at_s = _turned_bad(rows)
    if at_s is None:
        return "in this run"
    share = _rate(row for row in rows if row.start_s + row.end_s > 2 * at_s)
    return f"{since_words(at_s)}, {share:.2%} of all that crossed it from then on"


def _counted(wait: PairWait, kind: str) -> tuple[int, int]:
    return (wait.segments, wait.resent) if kind == "loss" else (wait.exchanges, wait.late)


def _turned_bad(rows: Sequence[_Interval]) -> float | None:
    """The time that parts the intervals best into two Poisson rates, the later one higher, if that is worth its price:
    the logarithm of how many times there were to choose from, over `_LEVEL`."""
    ordered = sorted(rows, key=lambda row: row.start_s + row.end_s)
    starts = sorted({row.start_s for row in rows})[1:]
    if not starts:
        return None
    whole, best = _fit(ordered), (math.log(len(starts) / _LEVEL), None)
    for at_s in starts:
        before = [row for row in ordered if row.start_s + row.end_s <= 2 * at_s]
        after = ordered[len(before) :]
        gain = _fit(before) + _fit(after) - whole
        if gain > best[0] and _rate(after) > _rate(before):
            best = gain, at_s  # type: ignore[assignment]
    return best[1]


def _rate(rows: Iterable[_Interval]) -> float:
    sent, bad = _sums(rows)
    return bad / sent if sent else 0.0


def _fit(rows: Iterable[_Interval]) -> float:
    """Log-likelihood of one Poisson rate for all of these, but for what does not depend on it."""
    sent, bad = _sums(rows)
    return bad * math.log(bad / sent) - bad if bad and sent else 0.0


def _sums(rows: Iterable[_Interval]) -> tuple[int, int]:
    sent = bad = 0
    for row in rows:
        sent, bad = sent + row.sent, bad + row.bad
    return sent, bad
