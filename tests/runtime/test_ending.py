"""The run ends while somebody cannot hear of it."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import wait as ready
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outlast.config import RunConfig, encoded
from outlast.core.protocol import messages as m
from outlast.journal import Journal, RunLock
from outlast.runtime.host._children import start
from outlast.runtime.transport.frames import Link
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.transport.regions import Region

pytestmark = pytest.mark.process


@pytest.mark.campaign
def test_a_spare_that_was_stopped_does_not_keep_the_run_from_ending(fleet: Callable[..., Any]) -> None:
    """Nobody has noticed yet that it was stopped, and it cannot read that the run is over."""
    run = fleet(replicas=1, spares=1, steps=8, max_restarts=0, gates=(2, 6))
    run.gate(2, "the spare was served", lambda: run.served("r1.1"))
    run.until("it had caught up", lambda: run.caught_up("r1.1"))
    run.strike(run.pid("r1.1"), signal.SIGSTOP)
    run.gate(6, "it was stopped", lambda: run.state("r1.1") == "T")
    run.assert_unchanged(survivors={"r0.1"})
    log = (run.driven.run_dir / "logs" / "r1.1.log").read_text()
    assert "the run is over" in log, "it was woken, and heard of it"
    assert "Traceback" not in log, "there was no error"


def test_a_coordinator_that_finds_its_run_ended_says_so_to_all_who_come_back(tmp_path: Path) -> None:
    """Its predecessor died between writing the end down and telling it. The first that comes back ends this one too:
    the second must still find somebody to say it."""
    lock = RunLock.take(tmp_path)
    journal = Journal.create(tmp_path, lock_fd=os.dup(lock.fileno()))
    ended = m.FleetRecord(
        view=None, planned=None, incarnations={}, placement={"r0.1": "a0", "r1.1": "a0"}, facts={}, formed=True,
        offences={}, outcome="finished", exit_code=0, steps=9,
    )  # fmt: skip
    assert journal.put(journal.claim("coordinator"), "protocol", msgspec.msgpack.encode(ended))
    journal.close()
    region = Region(Progress.SIZE, name="test")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        fds = {"LISTEN": listening.fileno(), "LOCK": lock.fileno(), "PROGRESS": region.fd}
        environ = {f"OUTLAST_{name}_FD": str(fd) for name, fd in fds.items()} | {
            "OUTLAST_RUN_DIR": str(tmp_path), "OUTLAST_SECRET": b"s".hex() * 32,
            "OUTLAST_CONFIG": encoded(RunConfig(replicas=2)),
        }  # fmt: skip
        child = start(
            [sys.executable, "-m", "outlast.runtime.coordinator.server"], environ=dict(os.environ) | environ,
            log=tmp_path / "log", pass_fds=list(fds.values()),
        )  # fmt: skip
        told = [_comes_back(name, listening.getsockname()) for name in ("r0.1", "r1.1")]
    child.wait()
    region.close()
    lock.release()
    assert told == ["finished", "finished"], (tmp_path / "log").read_text()


def _comes_back(member: str, address: tuple[str, int]) -> str:
    """The reason for which the coordinator closes the run for it."""
    link = Link(address, b"s" * 32, "member", member, timeout_s=30.0)
    hello = m.Hello(
        member=member, agent="a0", epoch=1, view=None, left=False, formed=False, heard=0, committed=9, state="member"
    )
    link.send(hello)
    try:
        while True:
            message = link.receive(msgspec.msgpack.Decoder(m.FromCoordinator))
            if isinstance(message, m.Close):
                return message.reason
    finally:
        link.close()


def test_who_has_ended_and_was_reaped_is_sent_nothing() -> None:
    """Its descriptor is closed, and soon another's: an agent died of it, asking a replica to stop whose lead had ended
    before its other ranks."""
    first = start([sys.executable, "-c", ""], environ={})
    assert ready([first.fd], 60.0)
    assert first.reap() is not None
    first.send(signal.SIGKILL)
    second = start([sys.executable, "-c", "import signal; signal.pause()"], environ={})
    try:
        first.fd = second.fd  # as a rule it is, unless a thread of an earlier test had the number meanwhile
        first.send(signal.SIGKILL)
        assert not ready([second.fd], 0.2)
    finally:
        second.send(signal.SIGKILL)
        second.wait()
