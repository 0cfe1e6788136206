"""Memory shared between processes: its descriptor is closed once, by hand or with the last who refers to it."""

from __future__ import annotations

import gc
import os

from outlast.runtime.transport.regions import Region


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_region_that_nobody_refers_to_holds_no_descriptor() -> None:
    region = Region(100)
    mapped, fd = region.map, region.fd
    assert is_open(fd)
    del region
    gc.collect()
    assert not is_open(fd)
    mapped[:5] = b"still"


def test_a_descriptor_is_closed_once_though_its_number_is_somebody_elses_by_then() -> None:
    region = Region(100)
    region.close()
    other = os.dup2(os.open(os.devnull, os.O_RDONLY), region.fd)
    region.close()
    del region
    gc.collect()
    assert is_open(other)
    os.close(other)


def test_a_fork_leaves_its_parents_numbers_alone() -> None:
    region = Region(100)
    fd, pid = region.fd, os.fork()
    if not pid:
        del region
        gc.collect()
        os._exit(0 if is_open(fd) else 1)
    assert os.waitpid(pid, 0)[1] == 0
