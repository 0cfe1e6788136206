"""Watching links: datagrams between hosts, what of them is lost or late, and which links of a known fabric explain it.

Role: `outlast health links`. Each host answers and probes; what came back is a line of a file, and whoever reads the
lines of all hosts can say which link is bad (`core.reliability.localise_links`). No torch.

A datagram carries the fabric's digest, which keeps out who is wrong here, not who has read the fabric. So each host
gives every other a token, which only who receives its datagrams knows, and each question a number that cannot be
guessed: whoever forges a source, or repeats what was said once, is not taken for it. An answer is as long as its
question, so nobody is flooded through us. Who sees the datagrams pass can forge them.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import select
import socket
import struct
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from outlast.errors import ConfigError, EnvironmentFault, nearest

__all__ = ["BadLink", "Fabric", "LinkProbe", "LinkReport", "ProbedPair", "link_report", "load_fabric", "read_probes"]

_HEAD = struct.Struct(">8sBQQQ")  # digest, kind, the token given to the other, the one received from it, number
_VERSION = b"outlast probes 2\n"
_PADDED = 512
_QUESTION, _ANSWER, _DONE = 0, 1, 2
_AGAIN_S = 0.1
_BUFFER_BYTES = 4 << 20
_AT_ONCE = 64  # datagrams, until the time is looked at
_FAREWELLS = 5  # a word that may be lost is said more than once


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts with their addresses, and the links that each ordered pair's datagrams cross. Without paths a host is known
    by its own link, the only part that can be told then."""

    hosts: dict[str, str]
    paths: dict[str, list[str]] = {}
    digest: bytes = b""

    def path(self, source: str, target: str) -> list[str]:
        """The links between two hosts, in either direction unless both are given."""
        return self.paths.get(f"{source}>{target}") or self.paths.get(f"{target}>{source}") or [source, target]

    def links(self) -> list[str]:
        """All links that are named, in order."""
        return sorted({link for path in self.paths.values() for link in path} or self.hosts)

    def address(self, host: str) -> tuple[str, int]:
        """Where a host answers."""
        if host not in self.hosts:
            raise ConfigError(f"the fabric has no host {host!r}", remedy=nearest(host, list(self.hosts)))
        name, _, port = self.hosts[host].rpartition(":")
        if not name or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"host {host} = {self.hosts[host]!r} is no address", remedy="ADDRESS:PORT")
        return name, int(port)


class ProbedPair(msgspec.Struct, frozen=True, kw_only=True):
    """One round of probes from `source` to `target`: how many were sent, lost and late, and their median round trip."""

    at_s: float
    round: int
    source: str
    target: str
    sent: int
    lost: int
    late: int = 0
    median_s: float | None = None


class BadLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link that explains what was lost or late, and those that these probes cannot tell from it. `rate`: of one
    crossing, with its 95 % interval."""

    link: str
    same_as: list[str]
    rate: float
    low: float
    high: float
    confidence: float


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """`bad`: each bad link in a sentence; `suspects`: the same as records; `unseen`, `ambiguous`: what these probes
    cannot judge, or not apart. `background`: share of bad on any other link."""

    bad: list[str]
    suspects: list[BadLink]
    background: float
    unseen: list[str]
    ambiguous: list[list[str]]
    rounds: int
    sent: int


def load_fabric(path: Path) -> Fabric:
    """From TOML: `[hosts]` name = "ADDRESS:PORT", and optionally `[paths]` "a>b" = ["link", ...]. ConfigError."""
    try:
        data = path.read_bytes()
        found = msgspec.convert(tomllib.loads(data.decode()), Fabric)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", remedy="a TOML file with [hosts]") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"{path} is no fabric: {error}", remedy='[hosts] with name = "ADDRESS:PORT", [paths] with "a>b" = ["link"]'
        ) from error
    if len(found.hosts) < 2:
        raise ConfigError(f"{path} has {len(found.hosts)} hosts", remedy="two or more: a link has two ends")
    for pair in found.paths:
        ends = pair.split(">")
        if len(ends) != 2 or not set(ends) <= found.hosts.keys():
            raise ConfigError(f"path {pair!r} is between no two hosts", remedy='"a>b", of names under [hosts]')
    for host in found.hosts:
        found.address(host)
    return msgspec.structs.replace(found, digest=hashlib.sha256(data).digest()[:8])


@dataclass(slots=True)
class _Peer:
    """Another host. `given`: the token that proves that it hears us; `learnt`: the one that it gave, 0 until it has
    proved itself; `took`: seconds until it answered, by number of the question in this round."""

    host: str
    given: int
    learnt: int = 0
    took: dict[int, float] = field(default_factory=dict)
    done: bool = False


class LinkProbe:
    """Answers the others and probes them, in one thread: `start`, rounds, `finish`, `close`. `count`: datagrams to each
    host a round, `wait_s`: for the last of them. `lose(host, number)`: tests say what does not arrive."""

    def __init__(
        self,
        fabric: Fabric,
        me: str,
        *,
        count: int = 20,
        wait_s: float = 0.5,
        late_s: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        lose: Callable[[str, int], bool] = lambda host, number: False,
    ) -> None:
        self.fabric, self.me, self._count, self._wait_s, self._late_s = fabric, me, count, wait_s, late_s
        self._clock, self._wall, self._lose = clock, wall, lose
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        # A host that is busy for a moment must not lose what waits for it: that would look like its link.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        try:
            self._socket.bind(fabric.address(me))
        except OSError as error:
            self._socket.close()
            raise EnvironmentFault(
                f"{me} cannot listen at {fabric.hosts[me]}: {error.strerror}", remedy="its own address, and a free port"
            ) from error
        others = [host for host in fabric.hosts if host != me]
        self._peers = {fabric.address(host): _Peer(host, secrets.randbits(64) | 1) for host in others}
        self._digest = hashlib.sha256(_VERSION + fabric.digest).digest()[:8]
        self._round = 0
        self._sent: dict[tuple[str, int], tuple[int, float]] = {}  # (host, number) -> which question of the round, when
        self._heard_s = clock()

    def close(self) -> None:
        self._socket.close()

    def start(self, patience_s: float) -> list[str]:
        """Wait until every host has answered once; returns those that have not, which count as lost from then on."""
        until, here = self._clock() + patience_s, {peer.host for peer in self._peers.values()}
        while here and self._clock() < until:
            self._ask(1)
            self._listen(_AGAIN_S, lambda: all(peer.took for peer in self._peers.values()))
            here -= {peer.host for peer in self._peers.values() if peer.took}
        return sorted(here)

    def round(self) -> list[ProbedPair]:
        """Ask everybody, and answer everybody, until all have answered or `wait_s` after the last question."""
        self._ask(self._count)
        self._listen(self._wait_s, lambda: all(len(peer.took) == self._count for peer in self._peers.values()))
        return self._counted()

    def finish(self, patience_s: float) -> None:
        """Answer those who still ask: until all have said that they are done, or nobody has asked for so long."""
        self._heard_s = self._clock()
        while not self._all_done() and self._clock() - self._heard_s < patience_s:
            self._tell_done()
            self._listen(_AGAIN_S, self._all_done)
        for _ in range(_FAREWELLS):
            self._tell_done()

    def _all_done(self) -> bool:
        return all(peer.done for peer in self._peers.values())

    def _tell_done(self) -> None:
        for address, peer in self._peers.items():
            self._send(_DONE, peer.learnt, 0, address)

    def _ask(self, count: int) -> None:
        self._round += 1
        self._sent = {}
        for peer in self._peers.values():
            peer.took = {}
        for which in range(count):
            for address, peer in self._peers.items():
                number = secrets.randbits(64)
                self._sent[peer.host, number] = which, self._clock()
                if not self._lose(peer.host, which):
                    self._send(_QUESTION, peer.learnt, number, address)
            self._serve(0.0)

    def _listen(self, seconds: float, enough: Callable[[], bool]) -> None:
        until = self._clock() + seconds
        while not enough() and (left := until - self._clock()) > 0:
            self._serve(left)

    def _send(self, kind: int, proof: int, number: int, address: tuple[str, int]) -> None:
        head = _HEAD.pack(self._digest, kind, self._peers[address].given, proof, number)
        try:
            self._socket.sendto(head + bytes(_PADDED - len(head)), address)
        except OSError:  # no route, or no room: it is lost, which is what is counted
            return

    def _serve(self, timeout_s: float) -> None:
        """Take what has arrived, or arrives in that time; not all of a flood, which has no end."""
        poll = select.poll()  # not select: a process may have more descriptors than that takes
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(timeout_s * 1000.0):
            return
        for _ in range(_AT_ONCE):
            try:
                data, address = self._socket.recvfrom(2048)
            except BlockingIOError:
                return
            except OSError:  # an ICMP error; it does not say which question was refused, and that one counts as lost
                continue
            if len(data) == _PADDED and address in self._peers:
                self._take(self._peers[address], address, *_HEAD.unpack_from(data))

    def _take(
        self, peer: _Peer, address: tuple[str, int], digest: bytes, kind: int, given: int, proof: int, number: int
    ) -> None:
        if digest != self._digest:
            return
        proved = proof == peer.given
        if proved:
            peer.learnt = given
        if kind == _QUESTION:
            self._send(_ANSWER, given, number, address)  # the first of each cannot prove anything yet
        if kind == _QUESTION and proved:
            self._heard_s = self._clock()
        elif kind == _DONE and proved:
            peer.done = True
        elif kind == _ANSWER and proved and (peer.host, number) in self._sent:
            which, sent_s = self._sent[peer.host, number]
            peer.took.setdefault(which, self._clock() - sent_s)

    def _counted(self) -> list[ProbedPair]:
        return [
            ProbedPair(
                at_s=self._wall(),
                round=self._round,
                source=self.me,
                target=peer.host,
                sent=self._count,
                lost=self._count - len(peer.took),
                late=sum(each > self._late_s for each in peer.took.values()),
                median_s=sorted(peer.took.values())[len(peer.took) // 2] if peer.took else None,
            )
            for peer in self._peers.values()
        ]


def read_probes(paths: Iterable[Path]) -> tuple[list[ProbedPair], int]:
    """(all rounds of all hosts, lines that were none: cut short, or of something else). ConfigError for no file."""
    found, skipped = [], 0
    for path in paths:
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}", remedy="what each host's --out wrote") from error
        for line in lines:
            try:
                row = msgspec.json.decode(line, type=ProbedPair)
            except msgspec.DecodeError:
                skipped += 1
                continue
            if row.sent > 0 and 0 <= row.lost <= row.sent and 0 <= row.late <= row.sent - row.lost:
                found.append(row)
            else:
                skipped += 1
    return found, skipped


def link_report(
    fabric: Fabric,
    probes: Sequence[ProbedPair],
    *,
    level: float = 0.01,
    round_trips: bool = True,
    since: Callable[[str], str] | None = None,
) -> LinkReport:
    """Which links explain what was lost or late. A round trip crosses its links twice; rates are of a crossing.
    `since(link)`: since when it is bad, in words; without it that is the first bad probe's time."""
    crossing = _crossing if round_trips else float
    from outlast.core.reliability import localise_links

    pairs: dict[tuple[str, str], list[float]] = {}
    for row in probes:
        if {row.source, row.target} <= fabric.hosts.keys():
            sums = pairs.setdefault((row.source, row.target), [0.0, 0.0])
            sums[0] += row.sent
            sums[1] += row.lost + row.late
    names = sorted(set(fabric.links()) | {link for pair in pairs for link in fabric.path(*pair)})
    number = {name: place for place, name in enumerate(names)}
    paths = [[number[link] for link in fabric.path(*pair)] for pair in pairs]
    found = localise_links(
        paths,
        [sent for sent, _ in pairs.values()],
        [bad for _, bad in pairs.values()],
        num_links=max(len(names), 1),
        level=level,
    )
    suspects = [
        BadLink(
            link=names[s.link],
            same_as=[names[link] for link in s.same_as],
            rate=crossing(s.rate),
            low=crossing(s.low),
            high=crossing(s.high),
            confidence=s.confidence,
        )
        for s in found.suspects
    ]
    return LinkReport(
        bad=[_sentence(probes, fabric, suspect, since) for suspect in suspects],
        suspects=suspects,
        background=crossing(found.background),
        unseen=[names[link] for link in found.unseen if link < len(names)],
        ambiguous=[[names[link] for link in group] for group in found.ambiguous],
        rounds=max((row.round for row in probes), default=0),
        sent=int(sum(sent for sent, _ in pairs.values())),
    )


def _crossing(rate: float) -> float:
    """The rate of loss in one crossing, from that of a round trip."""
    return 1.0 - math.sqrt(max(0.0, 1 - rate))


def since_words(at_s: float) -> str:
    """A time of day, as sentences about links have it."""
    return f"since {time.strftime('%H:%M:%S', time.gmtime(at_s))} UTC"


def _sentence(probes: Sequence[ProbedPair], fabric: Fabric, found: BadLink, since: Callable[[str], str] | None) -> str:
    mine = [p for p in probes if found.link in fabric.path(p.source, p.target)]
    what = "loss" if sum(p.lost for p in mine) >= sum(p.late for p in mine) else "late"
    when = since(found.link) if since else since_words(min((p.at_s for p in mine if p.lost or p.late), default=0.0))
    other = f" (or {', '.join(found.same_as)}: these probes cannot tell them apart)" if found.same_as else ""
    return (
        f"{found.link}{other}: {found.rate:.2%} {what} (95 % {found.low:.2%} to {found.high:.2%}) {when}, "
        f"confidence {found.confidence:.1%}"
    )
