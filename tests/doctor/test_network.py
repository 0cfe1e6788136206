"""What lies between two hosts, asked of one that answers: measured, or told with its cause, and not waited for."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from outlast.cli import main
from outlast.doctor import network
from outlast.doctor.network import Answering, look_at_host
from outlast.errors import ConfigError, EnvironmentFault


@pytest.fixture
def answering() -> Iterator[Answering]:
    made = Answering("127.0.0.1:0")
    yield made
    made.close()


@contextmanager
def another_service(talk: Callable[[socket.socket], Any]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            sock, _ = server.accept()
            with sock:
                talk(sock)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(10)


def test_round_trip_clock_and_speed_are_measured(answering: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_FAR_S", float("inf"))  # of this machine just now nothing is asked
    monkeypatch.setattr(network, "_SLOW_BYTES_S", 0.0)
    monkeypatch.setattr(network, "_UNEVEN", float("inf"))
    trip, clock, speed = look_at_host(answering.address, 4 << 20)
    assert {trip.level, clock.level, speed.level} == {"ok"}
    assert 0 < trip.figures["round_trip_s"] <= trip.figures["worst_s"]
    assert abs(clock.figures["offset_s"]) <= clock.figures["error_s"] + 0.05
    assert speed.figures["bytes_s_to"] > 0
    assert "Gbit/s from it" in speed.what
    assert answering.num_callers == 1


@pytest.mark.parametrize("no_thread", ["refuse", "stillborn"])
def test_a_caller_for_whom_there_is_no_thread_is_let_go_and_the_next_is_answered(
    no_thread: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_MOST_CALLERS", 1)
    names: set[str] = request.getfixturevalue(no_thread)
    answering = Answering("127.0.0.1:0")
    names.add("outlast-answer")
    assert look_at_host(answering.address, 1)[0].level == "error"
    names.clear()
    assert look_at_host(answering.address, 1)[0].level != "error"
    answering.close()


def test_clocks_that_are_apart_are_told_by_how_much(answering: Answering) -> None:
    clock = look_at_host(answering.address, 1, clock=lambda: time.time() - 90.0)[1]
    assert clock.level == "warning"
    assert clock.figures["offset_s"] == pytest.approx(90.0, abs=1.0)
    assert "chrony" in clock.remedy


def test_a_slow_or_uneven_link_is_a_warning(answering: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_SLOW_BYTES_S", float("inf"))
    assert look_at_host(answering.address, 1 << 16)[2].level == "warning"


def test_nobody_there_and_somebody_else_there_are_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        free = f"127.0.0.1:{held.getsockname()[1]}"
    (found,) = look_at_host(free)
    assert (found.level, "nobody listens there" in found.what) == ("error", True)
    with another_service(lambda sock: (sock.recv(64), sock.sendall(b"HTTP/1.1 400 Bad Request"))) as address:
        (found,) = look_at_host(address)
    assert "another service answers there" in found.what
    with another_service(lambda sock: sock.recv(8)) as address:
        (found,) = look_at_host(address)
    assert found.level == "error"


def test_an_address_that_swallows_large_messages_is_named_for_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_BULK_S", 0.2)

    def small_only(sock: socket.socket) -> None:
        hello = sock.recv(16, socket.MSG_WAITALL)
        sock.sendall(hello)
        while len(asked := sock.recv(9, socket.MSG_WAITALL)) == 9 and asked[:1] == b"T":
            sock.sendall(struct.pack(">d", time.time()))
        while sock.recv(1 << 16):  # what follows arrives, and no answer does
            pass

    with another_service(small_only) as address:
        found = look_at_host(address, 4 << 20)
    assert [f.level for f in found][-1] == "error"
    assert "small messages come through, 1,048,576 bytes to it do not" in found[-1].what
    assert "MTU" in found[-1].remedy


def test_who_answers_is_not_held_by_strangers_and_gives_no_more_than_its_limit(answering: Answering) -> None:
    host, _, port = answering.address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(3)]
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n")
        assert stranger.recv(64) == b""
    with socket.create_connection((host, int(port))) as greedy:
        greedy.sendall(network._HELLO + struct.pack(">cQ", b"D", 1 << 40))
        assert greedy.recv(64, socket.MSG_WAITALL) == network._HELLO
    assert look_at_host(answering.address, 1)[0].level in ("ok", "warning")
    for sock in silent:
        sock.close()


def test_wrong_arguments_and_the_command_itself(answering: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    for address in ("nowhere", "127.0.0.1", "127.0.0.1:x"):
        with pytest.raises(ConfigError):
            look_at_host(address)
    with pytest.raises(EnvironmentFault, match="nobody can listen"):
        Answering("192.0.2.1:7799")
    main(["doctor", "--quick", "--reach", answering.address, "--json"])
    checks = [finding["check"] for finding in json.loads(capsys.readouterr().out)["findings"]]
    assert checks.count(f"network to {answering.address}") == 2
    assert main(["doctor", "--answer", "127.0.0.1:0", "--for", "0"]) == 2
    assert main(["doctor", "--answer", "127.0.0.1:0", "--for", "0.01"]) == 0
    assert "0 calls were answered" in capsys.readouterr().err
