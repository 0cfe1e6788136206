"""What a launcher knows of the ranks of an agent that has died."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.runtime.conftest import copies

from outlast.core.phases import Phase
from outlast.core.protocol import StepTime
from outlast.runtime.host._rank_blocks import BlocksShown, RankBlocks
from outlast.runtime.transport import regions
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.transport.regions import Region

WHY = "its agent a0 died: SIGKILL"


@pytest.fixture
def ends() -> tuple[RankBlocks, BlocksShown]:
    blocks = RankBlocks()
    shown = BlocksShown({"OUTLAST_RANKS_FD": str(os.dup(blocks.passed.fileno()))})
    blocks.passed.close()
    return blocks, shown


@pytest.fixture
def pid_fd() -> Iterator[int]:
    """Of a process that has ended."""
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    fd = os.pidfd_open(pid)
    yield fd
    os.close(fd)
    os.waitpid(pid, 0)


def trained(steps: int) -> Progress:
    block = Progress(Region(Progress.SIZE))
    if steps:
        block.enter(Phase.COMMIT, step=steps - 1)
    for step in range(steps):
        block.commit(StepTime(step=step, end_s=100.0 + step, took_s=1.0))
    return block


def test_what_its_ranks_had_committed_is_known(ends: tuple[RankBlocks, BlocksShown], pid_fd: int) -> None:
    blocks, shown = ends
    for member, steps in (("r0.1", 7), ("r1.1", 0), ("r2.1", 5)):
        block = trained(steps)  # its descriptor is closed with it
        shown.began(member, block.region.fd, pid_fd)
    assert blocks.take_in()
    shown.ended("r2.1")
    shown.told()
    shown.ended("r0.1")  # the agent found nobody to tell it to before it ended as well
    told = {exited.member: exited for exited in blocks.close(50.0, WHY)}
    assert {member: (e.committed, e.joined, len(e.steps)) for member, e in told.items()} == {
        "r0.1": (7, True, 7), "r1.1": (0, False, 0),
    }  # fmt: skip
    assert {(e.cause, e.detail, e.noticed_at_s) for e in told.values()} == {("agent_lost", WHY, 50.0)}


def test_a_rank_that_the_kernel_has_not_ended_yet_is_waited_for_and_no_longer(
    ends: tuple[RankBlocks, BlocksShown],
) -> None:
    blocks, shown = ends
    mine = os.pidfd_open(os.getpid())
    block = trained(3)
    shown.began("r0.1", block.region.fd, mine)
    os.close(mine)
    assert [exited.committed for exited in blocks.close(time.monotonic(), WHY)] == [3]


def test_neither_waits_for_the_other(ends: tuple[RankBlocks, BlocksShown], pid_fd: int) -> None:
    blocks, shown = ends
    block = trained(1)
    before = copies(block.region.fd, pid_fd)
    for number in range(5000):  # more than the socket holds: nobody reads
        shown.began(f"r0.{number}", block.region.fd, pid_fd)
    assert blocks.take_in()
    shown.began("r1.1", block.region.fd, pid_fd)
    assert "r1.1" in {exited.member for exited in blocks.close(time.monotonic(), WHY)}
    assert copies(block.region.fd, pid_fd) == before  # all that was handed over is closed, and the socket
    assert blocks.fd == -1


def test_a_block_for_which_the_launcher_has_no_memory_is_left_out(
    ends: tuple[RankBlocks, BlocksShown], pid_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher must not end for it, and the whole run with it."""
    blocks, shown = ends
    block = trained(4)
    before = copies(block.region.fd, pid_fd)

    def short(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    shown.began("r0.1", block.region.fd, pid_fd)
    with monkeypatch.context() as patched:
        patched.setattr(regions.mmap, "mmap", short)
        assert blocks.take_in()
    assert copies(block.region.fd, pid_fd) == before
    shown.began("r1.1", block.region.fd, pid_fd)
    assert [(exited.member, exited.committed) for exited in blocks.close(time.monotonic(), WHY)] == [("r1.1", 4)]


def test_an_agent_that_nobody_listens_to_goes_on(ends: tuple[RankBlocks, BlocksShown], pid_fd: int) -> None:
    blocks, shown = ends
    blocks.close(time.monotonic(), WHY)
    shown.began("r0.1", trained(1).region.fd, pid_fd)
    shown.ended("r0.1")
    shown.told()
    BlocksShown({}).began("r0.1", trained(1).region.fd, pid_fd)


def test_the_end_of_an_agent_is_seen(ends: tuple[RankBlocks, BlocksShown]) -> None:
    blocks, shown = ends
    assert blocks.take_in()
    assert shown._sock is not None
    shown._sock.close()
    assert not blocks.take_in()
    assert blocks.close(time.monotonic(), WHY) == ()
