"""The test of a host that an alarm has emptied: is it broken, or was the alarm false? No torch here.

Once an alarm of the host was told and its replicas have gone elsewhere, its device is asked what the answers are known
to, in a process of its own, and the coordinator hears the result. After a cloud's notice nothing is asked: that host
will go.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from outlast.core.protocol import messages as m
from outlast.runtime.host._children import Child, Exit
from outlast.runtime.host._host_system import HERE, HostSystem

__all__ = ["HostDoubt"]

_COMMAND = (sys.executable, "-m", "outlast", "health", "test", "--json", "--no-record", "--size", "64")
_WRONG = 4  # exit code of a test that found wrong answers
_PASSED = "none needed: it may be used again"
_FAILED = "take the device out of service; outlast health test asks it for longer"


class HostDoubt:
    """Has a host's device asked where its readings give reason to. `turn` is called at each heartbeat; `command`: what
    asks the device, and answers in JSON."""

    def __init__(
        self, agent: str, run_dir: Path, command: tuple[str, ...] = _COMMAND, system: HostSystem = HERE
    ) -> None:
        self.agent, self._command, self._system = agent, command, system
        self._log = run_dir / "logs" / f"{agent}.test.log"
        self._evidence = ""
        self._child: Child | None = None

    @property
    def pid(self) -> int:
        """The process of the test that runs, or 0."""
        return self._child.pid if self._child is not None else 0

    def alarmed(self, alarm: m.DeviceNoted) -> None:
        """Remember what the host is doubted for; notices of a cloud are about no device."""
        if alarm.action in ("warning", "fatal"):
            self._evidence = self._evidence or alarm.evidence

    def turn(self, *, idle: bool) -> list[m.DeviceNoted]:
        """Begin a test where the host is doubted and has no replica left; the result of one that has ended."""
        if self._child is not None:
            how = self._child.reap(sweep=True)
            return [self._result(how)] if how is not None else []
        if idle and self._evidence:
            self._begin()
        return []

    def _begin(self) -> None:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("OUTLAST")}
        try:
            self._log.parent.mkdir(exist_ok=True)
            self._log.unlink(missing_ok=True)
            self._child = self._system.start(self._command, environ=environ, log=self._log)
        except OSError as error:
            self._evidence = ""
            print(f"outlast: the doubted host cannot be tested: {error}", file=sys.stderr, flush=True)

    def _result(self, how: Exit) -> m.DeviceNoted:
        why, self._evidence, self._child = self._evidence, "", None
        device, said = _read(self._log)
        passed = how.code == 0
        action = "passed" if passed else "failed" if how.code == _WRONG else "untested"
        if action == "untested":
            said = f"the test itself ended with {how}; see {self._log.name}"
        return m.DeviceNoted(
            member=self.agent,
            device=device,
            source="test",
            evidence=f"tested after {why}: {said}",
            action=action,
            remedy=_PASSED if passed else _FAILED,
        )

    def close(self) -> None:
        """The run is over: nobody waits for the answer."""
        if self._child is not None:
            self._child.send(signal.SIGKILL)
            self._child.wait()
            self._child = None


def _read(log: Path) -> tuple[str, str]:
    """(device, what was found) from what the test printed; it may have died in the middle of a word."""
    try:
        text = log.read_text(errors="replace")
        found = json.loads(text[text.index("{") :])
        return str(found["device"]), f"{found['num_wrong']} of {found['num_asked']} answers wrong"
    except (OSError, ValueError, KeyError, TypeError):
        return "", "no answer"
