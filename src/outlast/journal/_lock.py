"""The lock of a run directory: one run at a time.

Role: an exclusive `flock` on `run.lock`. It belongs to the open file description, so a launcher that takes it and
hands the descriptor to each coordinator it starts keeps the directory for the whole run, across coordinators; the
kernel drops it when the last of them is gone. Invariant: it tells *runs* apart. Two coordinators of one run are told
apart by their epochs, never by this lock. The file stays when the run ends: removing a lock file is a race.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from outlast.errors import EnvironmentFault
from outlast.journal._faults import os_fault
from outlast.journal._filesystem import check_local

__all__ = ["LOCK_NAME", "RunLock", "is_held", "started_at_s"]

LOCK_NAME = "run.lock"


class RunLock:
    """A held lock. Release it by `release()`; a process that dies releases it by dying."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd, self.path = fd, path

    @classmethod
    def take(cls, run_dir: Path) -> RunLock:
        """Lock `run_dir`, which must exist, on a local disk. Raises EnvironmentFault; also if another run holds it."""
        check_local(run_dir)
        path = run_dir / LOCK_NAME
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise os_fault(error, path) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 64, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise _in_use(run_dir, holder) from None
        except OSError as error:
            os.close(fd)
            raise os_fault(error, path) from error
        _sign(fd)
        return cls(fd, path)

    @classmethod
    def adopt(cls, run_dir: Path, fd: int) -> RunLock:
        """Use a descriptor of this run's lock that was inherited from the process that took it.

        Raises EnvironmentFault if it is of another directory's lock, or of no lock.
        """
        path = run_dir / LOCK_NAME
        try:
            if not os.path.samestat(os.fstat(fd), path.stat()):
                raise EnvironmentFault(f"descriptor {fd} is not the lock {path}", remedy="pass RunLock.fileno()")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the same open file description: held already
        except BlockingIOError:
            raise _in_use(run_dir, "unknown") from None
        except OSError as error:
            raise os_fault(error, path) from error
        return cls(fd, path)

    def fileno(self) -> int:
        """The descriptor, to be inherited by a coordinator (`pass_fds`)."""
        return self._fd

    def release(self) -> None:
        """Close this process's descriptor; the lock is free when no other process holds a copy."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_held(run_dir: Path, table: Path = Path("/proc/locks")) -> bool | None:
    """Whether a process holds the run's lock; None where the kernel does not say.

    Asked of the kernel's table, not by trying the lock: a trial that succeeds would refuse a run starting just then.
    """
    try:
        inode = (run_dir / LOCK_NAME).stat().st_ino
        lines = table.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    locks = (line.split() for line in lines)
    return any(len(f) > 5 and f[1] == "FLOCK" and f[5].rpartition(":")[2] == str(inode) for f in locks)


def started_at_s(run_dir: Path) -> float:
    """Unix time at which the run's lock was last taken: when it was started; 0 if it never was."""
    try:
        return (run_dir / LOCK_NAME).stat().st_mtime
    except OSError:
        return 0.0


def _sign(fd: int) -> None:
    """Name the holder for whoever is refused. A full disk must not fail a lock that is held already."""
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        return


def _in_use(run_dir: Path, holder: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"two runs in one directory: {run_dir} is in use by process {holder}",
        did="refused; the other run was not touched",
        remedy="give another --run-dir, or end the other run first (outlast status shows it)",
    )
