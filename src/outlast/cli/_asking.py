"""Asking a run to do something: to save now, or to save and stop. The run's own launcher is asked, by a signal.

Invariants: only the process that holds this run's lock is ever signalled, through a descriptor that cannot come to mean
another; what is asked ends up in the run's journal, written by the run itself. The kernel lets the run's own user ask,
and the administrator.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Literal

from outlast.errors import ConfigError, EnvironmentFault

__all__ = ["WISHES", "Wish", "ask_and_tell", "ask_run", "holder_of"]

Wish = Literal["save", "stop"]
WISHES: dict[str, str] = {
    "save": "a save was asked for: outlast status tells when it is durable, or why there is none",
    "stop": "the run was asked to stop: it saves first, where it keeps checkpoints",
}
_SIGNALS = {"save": signal.SIGUSR1, "stop": signal.SIGTERM}


def ask_and_tell(run_dir: Path, wish: Wish, as_json: bool) -> int:
    """Ask as `ask_run` does, and print what to expect: with the names that `outlast scale` has."""
    text = ask_run(run_dir, wish)
    if as_json:
        import msgspec

        print(msgspec.json.encode({"run_dir": str(run_dir.resolve()), "accepted": True, "text": text}).decode())
    else:
        print(f"outlast: {text} ({run_dir})")
    return 0


def ask_run(run_dir: Path, wish: Wish) -> str:
    """Ask the run's launcher; returns what to expect. Raises ConfigError where nobody holds the run, EnvironmentFault
    where it may not be asked or cannot hear yet."""
    pid = _pid(run_dir)
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        raise _over(run_dir) from None
    try:
        if not _holds(pid, run_dir):  # asked after the descriptor was made: it means this process for ever
            raise _over(run_dir)
        if not _hears(pid, _SIGNALS[wish]):
            raise EnvironmentFault(f"{run_dir} is only starting, or ending", remedy="ask again in a moment")
        signal.pidfd_send_signal(fd, _SIGNALS[wish])
    except PermissionError as error:
        raise EnvironmentFault(f"process {pid} is another user's", remedy="ask as the user who runs it") from error
    except ProcessLookupError:
        raise _over(run_dir) from None
    finally:
        os.close(fd)
    return WISHES[wish]


def holder_of(run_dir: Path) -> int:
    """The process that holds this run. Raises ConfigError where there is none, EnvironmentFault where it may not be
    looked at."""
    pid = _pid(run_dir)
    try:
        if not _holds(pid, run_dir):
            raise _over(run_dir)
    except PermissionError as error:
        raise EnvironmentFault(f"process {pid} is another user's", remedy="ask as the user who runs it") from error
    except FileNotFoundError:
        raise _over(run_dir) from None
    return pid


def _over(run_dir: Path) -> ConfigError:
    return ConfigError(f"no process holds {run_dir}: the run is over", remedy="outlast status shows how it ended")


def _pid(run_dir: Path) -> int:
    try:
        text = (run_dir / "run.lock").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        raise _over(run_dir) from None
    if not text.isdigit() or int(text) <= 1:
        raise _over(run_dir)
    return int(text)


def _holds(pid: int, run_dir: Path) -> bool:
    """Whether a process has this run's lock open."""
    lock = (run_dir / "run.lock").stat()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.path.samestat(entry.stat(), lock):
                return True
        except FileNotFoundError:
            continue  # a socket or a pipe, or closed meanwhile
    return False


def _hears(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal that would otherwise end it."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
