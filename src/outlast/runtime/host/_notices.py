"""What signals say to the launcher, from their handlers to where it acts on them.

A handler only remembers, and wakes who waits. Whether the run stops, and how, is the launcher's.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Notices", "asking_to_end"]

_NAMES: dict[int, str] = {signal.SIGINT: "interrupt", signal.SIGHUP: "hangup"}


def asking_to_end() -> list[signal.Signals]:
    """The signals that ask this process to end in order. Where a hang-up is ignored, as under nohup, it asks nothing;
    so it is where somebody else hears it."""
    hang_up = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL else []
    return [signal.SIGTERM, signal.SIGINT, *hang_up]


@dataclass(slots=True)
class Notices:
    """Why the run is to stop, if it is, and with which code; and whether a save was asked for. `deaf`: nobody's notice
    to stop means anything here."""

    deaf: bool = False
    stopping: str = ""
    code: int = 130
    _interrupts: int = 0
    _save: bool = False

    @property
    def insisted(self) -> bool:
        """Whether Ctrl-C came again."""
        return self._interrupts >= 2

    def stop(self, reason: str, code: int) -> None:
        """The run cannot go on, whoever asked or did not."""
        self.stopping, self.code = reason, code

    def hear(self, number: int, _: Any = None) -> None:
        """A signal's handler."""
        if number == signal.SIGUSR1:
            self._save = True
        elif not self.deaf:
            self._interrupts += number == signal.SIGINT or not self.stopping  # engines repeat theirs; they have SIGKILL
            self.stop(_NAMES.get(number, "terminated"), 128 + number)  # not 0: it must not be taken for done

    def wants_save(self) -> bool:
        """Whether a save was asked for since the last call."""
        wanted, self._save = self._save, False
        return wanted

    @contextlib.contextmanager
    def heard(self) -> Iterator[int]:
        """Hear this process's signals meanwhile; gives a descriptor that each of them makes readable."""
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        old_fd = signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        old = {number: signal.signal(number, self.hear) for number in [*asking_to_end(), signal.SIGUSR1]}
        try:
            yield wake_r
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(old_fd)
            os.close(wake_r)
            os.close(wake_w)
