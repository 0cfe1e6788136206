"""Where a member's steps go, and whom it waits for: measured as phases pass, told now and then, written down once."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from outlast.core import events as ev
from outlast.core.phases import WAITS, Phase
from outlast.core.step_parts import PART_OF, PARTS, PairWait, StepParts
from outlast.journal import Journal
from outlast.runtime.coordinator._bookkeeping import Bookkeeping, ToldProgress
from outlast.runtime.member._parts_meter import PartsMeter
from outlast.runtime.transport.connections import Connection
from outlast.runtime.transport.frames import Heartbeat
from outlast.runtime.transport.mesh import _decoder
from outlast.runtime.transport.pair_waits import PairWaits
from outlast.runtime.transport.peer_messages import Hi


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def test_every_phase_of_a_step_has_a_part_and_waits_are_waits() -> None:
    of_a_step = {phase for phase in Phase if Phase.LOAD <= phase <= Phase.AUDIT} | {Phase.RECOMPUTE}
    assert set(PART_OF) == of_a_step
    assert {phase for phase, part in PART_OF.items() if part == "wait"} == WAITS & of_a_step
    assert set(PART_OF.values()) == set(PARTS)


def test_parts_are_those_of_whole_steps() -> None:
    meter = PartsMeter(Clock())
    for seconds in (1.0, 3.0):
        meter.passed(Phase.BACKWARD, seconds)
        meter.passed(Phase.SCATTERED, 0.5)
        meter.passed(Phase.CONNECT, 100.0)
        meter.committed(2)
    meter.passed(Phase.BACKWARD, 7.0)
    meter.tell()
    told = meter.take()
    assert told is not None
    assert (told.steps, told.seconds) == (2, {"load": 0.0, "compute": 4.0, "exchange": 0.0, "wait": 1.0})
    assert meter.take() is None, "once"
    meter.dropped()  # a joiner's replay is none of its own steps
    meter.committed(2)
    meter.tell()
    told = meter.take()
    assert told is not None
    assert told.seconds["compute"] == 4.0


@pytest.mark.parametrize(("members", "most"), [(4, 15), (1000, 11)])
def test_a_run_of_an_hour_tells_seldom_and_a_short_one_tells_too(members: int, most: int) -> None:
    clock = Clock()
    meter, told = PartsMeter(clock), []
    for _ in range(1000):
        clock.now_s += 0.1
        meter.committed(members)
        told += [word.steps for word in [meter.take()] if word is not None]
    assert told[0] == 1
    assert 5 <= len(told) <= most


def test_a_wait_for_several_is_shared_and_a_header_is_late_beside_others_only() -> None:
    waits = PairWaits()
    waits.took(["a", "b"], 2.0)
    waits.took(["b"], 1.0)
    for _ in range(3):
        waits.headed({"a": 10.0, "b": 10.01, "c": 10.5}, 10.0)
    waits.headed({"a": 12.0, "b": 12.0, "c": 12.0}, 11.0)  # all of them: then it was I who was early
    told = waits.told()
    assert {name: (w.waited_s, w.exchanges, w.late) for name, w in told.items()} == {
        "a": (1.0, 4, 0), "b": (2.0, 4, 0), "c": (0.0, 4, 3),
    }  # fmt: skip
    alone = PairWaits()
    alone.headed({"a": 99.0}, 10.0)
    assert alone.told()["a"].late == 0, "with one peer there is nothing to compare with"


def test_what_tcp_sent_outlives_its_connection_and_sockets_of_one_machine_count_nothing() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    here = socket.create_connection(listening.getsockname())
    there, _ = listening.accept()
    near, far = socket.socketpair(socket.AF_UNIX)
    waits = PairWaits()
    waits.conns = {"tcp": Connection(here, "tcp", _decoder), "unix": Connection(near, "unix", _decoder)}
    for conn in waits.conns.values():
        conn.send(Hi())
        conn.send(Hi())
    before = waits.told()
    assert before["tcp"].segments >= 1
    assert before["tcp"].resent == 0
    assert before["unix"].segments == 0
    waits.settle()
    for sock in (here, there, near, far, listening):
        sock.close()
    assert waits.told()["tcp"] == before["tcp"]
    closed = PairWaits()
    closed.conns = {"gone": Connection(socket.socket(), "gone", _decoder)}
    closed.conns["gone"].sock.close()
    assert closed.told()["gone"] == PairWait()


def test_of_many_peers_a_member_speaks_of_some() -> None:
    waits = PairWaits()
    for number in range(5000):
        waits.took([f"r{number}.1"], 0.1)
    assert len(waits.told()) == 16


def test_what_a_heartbeat_carries_is_written_down_once(tmp_path: Path) -> None:
    parts = StepParts(steps=3, seconds={"compute": 1.5}, waits={"r1.1": PairWait(waited_s=0.25, exchanges=3)})
    with Journal.create(tmp_path / "run") as journal:

        def write(kind: str, **fields: object) -> None:
            import msgspec

            journal.append(msgspec.convert({"kind": kind, "at_s": 1.0, **fields}, ev.AnyEvent))

        books = Bookkeeping(ToldProgress(), write, 1.0, 0.0)
        books.heard(Heartbeat(sender="r0.1", sent_s=0.0, parts=parts))
        books.heard(Heartbeat(sender="r0.1", sent_s=1.0))
        for seconds, waits in (
            ({"compute": float("nan")}, {}),
            ({}, {"r1.1": PairWait(waited_s=float("inf"))}),
            ({}, {f"r{number}.1": PairWait() for number in range(1000)}),
            ({"x" * 1000: 1.0}, {}),
        ):
            wrong = StepParts(steps=4, seconds=seconds, waits=waits)
            books.heard(Heartbeat(sender="r1.1", sent_s=2.0, parts=wrong))
        journal.flush(10.0)
        found = [entry.event for entry in journal.events(kinds=[ev.StepAnatomy])]
    told = ev.StepAnatomy(at_s=1.0, replica="r0.1", steps=3, seconds=parts.seconds, waits=dict(parts.waits))
    assert found == [told]
