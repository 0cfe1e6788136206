"""Strangers at a prober's port: a flood, what was said before, and datagrams in another host's name.

The stranger has the other host's address, as who forges a source would have it, and has read the fabric.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.health.test_link_probes import addresses

from outlast.health import Fabric, LinkProbe
from outlast.health._link_probes import _ANSWER, _DONE, _HEAD, _QUESTION

Other = tuple[LinkProbe, socket.socket]


class Ticking:
    """A clock that goes on by a millisecond each time it is looked at."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-3
        return self.now_s


@pytest.fixture
def made() -> Iterator[Callable[[], Other]]:
    opened: list[Any] = []

    def make(count: int = 3) -> Other:
        fabric = Fabric(hosts=addresses(2), digest=b"12345678")
        probe = LinkProbe(fabric, "h0", count=count, wait_s=0.2, late_s=60.0, clock=Ticking())
        other = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        other.bind(fabric.address("h1"))
        other.connect(fabric.address("h0"))
        other.settimeout(10.0)
        opened.extend((probe, other))
        return probe, other

    yield make
    for each in opened:
        each.close()


def heard(other: socket.socket) -> list[tuple[bytes, int, int, int, int]]:
    """What has arrived at the other host: (digest, kind, token, proof, number)."""
    found = []
    other.setblocking(False)
    while True:
        try:
            found.append(_HEAD.unpack_from(other.recv(2048)))
        except BlockingIOError:
            return found


def say(other: socket.socket, digest: bytes, kind: int, given: int, proof: int, number: int) -> None:
    other.send(_HEAD.pack(digest, kind, given, proof, number).ljust(512, b"\0"))


def asked(probe: LinkProbe, other: socket.socket) -> list[tuple[bytes, int, int, int, int]]:
    """The questions of a round, which nobody answers."""
    probe._ask(3)
    return [row for row in heard(other) if row[1] == _QUESTION]


class Flood:
    """A socket at which there is always one more."""

    def __init__(self, own: socket.socket, data: bytes, address: tuple[str, int]) -> None:
        self._own, self._data, self._address, self.num = own, data, address, 0

    def recvfrom(self, _: int) -> tuple[bytes, tuple[str, int]]:
        self.num += 1
        if self.num > 100_000:
            raise AssertionError("nobody looks at the time")
        return self._data, self._address

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


@pytest.mark.parametrize("kind", ["junk", "questions", "done"])
def test_a_flood_without_an_end_holds_up_no_round_and_no_end(made: Callable[[], Other], kind: str) -> None:
    probe, other = made()
    [(digest, _, token, *_), *_] = asked(probe, other)
    data = b"x" * 512
    if kind != "junk":
        data = _HEAD.pack(digest, _QUESTION if kind == "questions" else _DONE, 1, token ^ 1, 7).ljust(512, b"\0")
    other.send(b"something to wake up for")
    flood: Any = Flood(probe._socket, data, other.getsockname())
    probe._socket = flood
    assert [row.lost for row in probe.round()] == [3]
    probe.finish(0.5)
    assert flood.num > 0
    assert not probe._all_done(), "whoever repeats or forges that the other is done proves nothing"


def test_junk_of_any_length_and_kind_counts_for_nothing_and_is_not_answered(made: Callable[[], Other]) -> None:
    probe, other = made()
    [(digest, _, token, _, number), *_] = asked(probe, other)
    good = _HEAD.pack(digest, _ANSWER, 1, token, number).ljust(512, b"\0")
    for data in (b"", good[:-1], good + b"\0", b"\xff" * 512, struct.pack(">8sB", digest, 200).ljust(512, b"\xff"),
                 good.replace(digest, b"12345678")):  # fmt: skip
        other.send(data)
    probe._serve(1.0)
    assert [row.lost for row in probe._counted()] == [3]
    assert heard(other) == []


def test_an_answer_in_another_host_s_name_must_repeat_the_question_and_its_token(made: Callable[[], Other]) -> None:
    probe, other = made()
    questions = asked(probe, other)
    digest, _, token, _, number = questions[0]
    for which in range(3):
        say(other, digest, _ANSWER, 1, token, which)  # numbers that could be guessed
    say(other, digest, _ANSWER, 1, 0, number)
    say(other, digest, _ANSWER, 1, token ^ 2, number)
    probe._serve(1.0)
    assert [row.lost for row in probe._counted()] == [3]
    for _, _, token, _, number in questions:
        say(other, digest, _ANSWER, 1, token, number)
        say(other, digest, _ANSWER, 1, token, number)  # twice: counted once
    probe._serve(1.0)
    assert [(row.lost, row.sent) for row in probe._counted()] == [(0, 3)]


def test_what_was_answered_before_hides_no_loss_in_a_later_round(made: Callable[[], Other]) -> None:
    probe, other = made()
    recorded = asked(probe, other)
    for digest, _, token, _, number in recorded:
        say(other, digest, _ANSWER, 1, token, number)
    probe._serve(1.0)
    assert [row.lost for row in probe._counted()] == [0]
    asked(probe, other)
    for digest, _, token, _, number in recorded:
        say(other, digest, _ANSWER, 1, token, number)
    probe._serve(1.0)
    assert [row.lost for row in probe._counted()] == [3]


def test_questions_that_prove_nothing_are_answered_and_keep_nobody_from_its_end(made: Callable[[], Other]) -> None:
    """An answer is as long as its question, and goes to a host of the fabric alone."""
    probe, other = made()
    [(digest, _, token, *_), *_] = asked(probe, other)
    before = probe._heard_s
    say(other, digest, _QUESTION, 9, 0, 77)
    probe._serve(1.0)
    assert [(kind, proof, number) for _, kind, _, proof, number in heard(other)] == [(_ANSWER, 9, 77)]
    assert probe._heard_s == before
    say(other, digest, _QUESTION, 9, token, 78)
    probe._serve(1.0)
    assert probe._heard_s > before, "who has heard us may still be asking"


def test_only_who_has_heard_us_says_that_it_is_done(made: Callable[[], Other]) -> None:
    probe, other = made()
    [(digest, _, token, *_), *_] = asked(probe, other)
    for proof in (0, token ^ 1):
        say(other, digest, _DONE, 1, proof, 0)
    probe._serve(1.0)
    assert not probe._all_done()
    say(other, digest, _DONE, 1, token, 0)
    probe._serve(1.0)
    assert probe._all_done()


def test_a_prober_of_an_earlier_form_is_no_host_that_loses_half(made: Callable[[], Other]) -> None:
    """It hears nothing at all: its datagrams have another digest."""
    probe, other = made()
    asked(probe, other)
    other.send(struct.pack(">8sBIQ", b"12345678", _QUESTION, 1, 0).ljust(512, b"\0"))
    probe._serve(1.0)
    assert heard(other) == []
