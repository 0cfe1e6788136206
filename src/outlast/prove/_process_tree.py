"""The processes of a run as the kernel shows them: nothing here asks the run itself.

A process is known by the file that its output goes to (`logs/r0.1.log`, or `logs/r0.1.rank1.log` of a replica's other
ranks), which it gets before anything else of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait as ready
from pathlib import Path

import msgspec

__all__ = [
    "Running", "end_of", "first_queued_s", "left_behind", "of_run", "output_of", "processes", "processor_s", "queued_s",
    "send", "state_of",
]  # fmt: skip

_RANK = re.compile(r"(r\d+\.\d+)(?:\.rank(\d+))?")
_PROC = Path("/proc")


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A process. `name`: `coordinator`, `a0`, `r0.1` (all ranks of that replica), `nursery of a0`. `born`: the kernel's
    ticks, as numbers recur; `place`: of a rank in its replica, 0 for the lead."""

    pid: int
    name: str
    born: str
    place: int = 0

    @property
    def is_rank(self) -> bool:
        return _RANK.fullmatch(self.name) is not None


def processes(launcher: int) -> list[Running]:
    """All that live under the launcher, itself left out."""
    found: list[Running] = []
    for pid in _children(launcher):
        name = output_of(pid).removeprefix("agent-")
        if not name:
            continue
        _add(found, pid, name)
        if name != "coordinator":
            for rank in _children(pid):
                known = _RANK.fullmatch(output_of(rank))
                _add(found, rank, known[1] if known else f"nursery of {name}", int(known[2] or 0) if known else 0)
    return found


def launcher_of(pid: int) -> list[Running]:
    """The launcher itself, while it lives."""
    found: list[Running] = []
    _add(found, pid, "launcher")
    return found


def _add(found: list[Running], pid: int, name: str, place: int = 0) -> None:
    fields = _stat(pid)
    if fields and fields[0] not in "ZX":
        found.append(Running(pid=pid, name=name, born=fields[19], place=place))


def state_of(seen: Running) -> str:
    """The kernel's letter; "" when it is gone."""
    fields = _stat(seen.pid)
    return fields[0] if fields and fields[19] == seen.born and fields[0] not in "ZX" else ""


def processor_s(seen: Running) -> float:
    """What it has used of the processor so far."""
    fields = _stat(seen.pid)
    ticks = int(fields[11]) + int(fields[12]) if fields and fields[19] == seen.born else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def queued_s(seen: Running) -> float:
    """How long its threads that live were ready to run so far, and had no processor."""
    found = 0.0
    with contextlib.suppress(OSError):
        for thread in (_PROC / str(seen.pid) / "task").iterdir():
            found += _queued_s(thread)
    return found


def first_queued_s(seen: Running) -> float:
    """The same of the thread alone that it began with: in a replica, the one that trains."""
    with contextlib.suppress(OSError):
        return _queued_s(_PROC / str(seen.pid))
    return 0.0


def _queued_s(thread: Path) -> float:
    return int((thread / "schedstat").read_text().split()[1]) / 1e9


def send(seen: Running, number: signal.Signals) -> bool:
    """A signal to exactly this process; whether it was there to get it."""
    try:
        handle = os.pidfd_open(seen.pid)
    except ProcessLookupError:
        return False
    try:
        if not state_of(seen):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def end_of(child: int) -> Callable[[], float | None]:
    """When the child ended (`time.monotonic`), to the moment, however late its end is looked at; None: not yet."""
    found: list[float] = []
    handle = os.pidfd_open(child)

    def wait() -> None:
        ready([handle])
        found.append(time.monotonic())
        os.close(handle)

    threading.Thread(target=wait, daemon=True).start()
    return lambda: found[0] if found else None


def left_behind(run_dir: Path, run_id: str) -> list[str]:
    """What is still there of a run that is over: its processes, and its sockets' names."""
    found = []
    for pid in of_run(run_dir):
        if fields := _stat(pid):
            found.append(f"process {pid} ({output_of(pid) or 'no log'}, state {fields[0]})")
    if run_id:
        sockets = (_PROC / "net" / "unix").read_text().splitlines()
        found += [line.split()[-1] for line in sockets if f"@outlast/{run_id}/" in line]
    return found


def of_run(run_dir: Path) -> list[int]:
    """Living processes that were told the run's directory or write to its logs, whatever they are now."""
    run_dir = run_dir.resolve()
    mark = f"OUTLAST_RUN_DIR={run_dir}".encode()
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        with contextlib.suppress(OSError):
            # By its log too: in the middle of an exec a process has no environment for a moment.
            its = _log_of(pid).parent == run_dir / "logs" or mark in (entry / "environ").read_bytes().split(b"\0")
            if its and (fields := _stat(pid)) and fields[0] not in "ZX":
                found.append(pid)
    return found


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in (_PROC / f"{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def output_of(pid: int) -> str:
    """The stem of the log that it writes to; "" where that is no log."""
    target = _log_of(pid)
    return target.stem if target.suffix == ".log" and target.parent.name == "logs" else ""


def _log_of(pid: int) -> Path:
    """Where its output goes; an empty path where that cannot be seen."""
    try:
        return Path(os.readlink(_PROC / f"{pid}/fd/1"))
    except OSError:
        return Path()


def _stat(pid: int) -> list[str]:
    """The fields after the name: the state is the first, the time of birth the twentieth."""
    try:
        return (_PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
