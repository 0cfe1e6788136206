"""On a host that has joined a run whose record is shared: what would coordinate it if the host that does is lost.

`Heir` is `outlast run` without the start of a run: it keeps a coordinator's process, which waits for its turn and keeps
the run's story in this host's folder meanwhile. `HeirWatch` is the agent's hold on it: the heir ends with its agent.
Nobody else's signals mean anything to it: the run is not its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from outlast.config import Resolved, RunConfig, decoded
from outlast.core import events
from outlast.errors import EnvironmentFault
from outlast.journal import Journal, RunLock, holds_run, keep_clock
from outlast.runtime.host._children import Child
from outlast.runtime.host._host_system import HERE, HostSystem
from outlast.runtime.host._notices import Notices
from outlast.runtime.host.launcher import Launcher
from outlast.runtime.transport.endpoints import listen_on

__all__ = ["HeirWatch", "main"]

_AGAIN_S = 2.0  # between two starts of one that ends
_LAST_S = 10.0  # for it to take in how the run has ended


class _Heir(Launcher):
    """Keeps a coordinator's process that waits for its turn, on a host that did not start the run."""

    @property
    def _here(self) -> int:
        return 0

    def _listen(self) -> socket.socket:
        address = os.environ["OUTLAST_ADDRESS"]
        try:
            return listen_on(address)
        except OSError as error:
            raise EnvironmentFault(
                f"no port at {address} for a coordinator: {error.strerror}", remedy="see `ip address` on this host"
            ) from error

    def _prepare(self) -> RunLock:
        (self.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        lock = RunLock.take(self.run_dir)
        kept = os.dup(lock.fileno())
        known = holds_run(self.run_dir) and not self._set_aside()
        (Journal.open_writer if known else Journal.create)(self.run_dir, lock_fd=kept).close()
        keep_clock(self.run_dir, self._apart_s)
        values = msgspec.structs.asdict(self.resolved.config)
        shown = {key: {"value": value, "origin": "the run"} for key, value in values.items()}
        (self.run_dir / "config.json").write_text(json.dumps(shown, indent=1, default=str) + "\n", encoding="utf-8")
        return lock

    def _set_aside(self) -> bool:
        """What an agent of an earlier run has left in this folder, if it is of another run than this."""
        with Journal.open_reader(self.run_dir) as journal:
            begun = [entry.event for entry in journal.newest(events.RunStarted)]
        earlier = begun[0].run_id if begun and isinstance(begun[0], events.RunStarted) else "unknown"
        if earlier == self.run_id:
            return False
        aside = self.run_dir / f"of-{earlier}"
        aside.mkdir(exist_ok=True)
        for found in [*self.run_dir.glob("journal.db*"), *self.run_dir.glob("record.db*")]:
            found.replace(aside / found.name)
        return True

    def _environ(self, listening: socket.socket) -> dict[str, str]:
        told = {key: os.environ[key] for key in ("OUTLAST_COMMAND", "OUTLAST_FOLDER", "OUTLAST_HOST")}
        made = super()._environ(listening) | told | {"OUTLAST_HEIR": "true"}
        made.pop("OUTLAST_OWN_HOSTS", None)
        return made

    def _ask_agents_to_stop(self, finished: bool = False, until_s: float = 0.0) -> None:
        return


class HeirWatch:
    """Keeps an heir, from the agent's main thread. `environ`: what the replicas here inherit."""

    def __init__(self, environ: Mapping[str, str], system: HostSystem = HERE) -> None:
        self._system = system
        config: RunConfig = decoded(environ["OUTLAST_CONFIG"])
        self._wanted = config.record != "sqlite" and "OUTLAST_AGENT_OF" not in environ  # the launcher's have it
        self._environ, self._folder = dict(environ), Path(environ["OUTLAST_RUN_DIR"])
        self._child: Child | None = None
        self._next_s = 0.0

    @property
    def pid(self) -> int:
        """0 for none."""
        return self._child.pid if self._child is not None else 0

    def turn(self) -> None:
        """Start it, and again if it has ended. Call it now and then."""
        if self._child is not None and self._child.reap() is not None:
            self._child = None
        if self._wanted and self._child is None and self._system.now_s() >= self._next_s:
            self._next_s = self._system.now_s() + _AGAIN_S
            command = [sys.executable, "-m", "outlast.runtime.host._heir"]
            with contextlib.suppress(OSError):  # no process is to be had: the replicas here need none, and it is later
                self._child = self._system.start(command, environ=self._environ, log=self._folder / "logs" / "heir.log")

    def close(self, over: bool) -> None:
        """The agent ends. `over`: so does the run, and the heir by itself once it has taken that in."""
        self._wanted, child = False, self._child
        if child is None or child.reap() is not None:
            return
        if not (over and self._system.ready([child.fd], _LAST_S)):
            child.send(signal.SIGKILL)
        child.wait()


def main() -> int:
    """Entry of the heir's process; its exit code is the run's."""
    config = decoded(os.environ["OUTLAST_CONFIG"])
    heir = _Heir(
        resolved=Resolved(config=config, origins=dict.fromkeys(RunConfig.__struct_fields__, "default")),
        command=json.loads(os.environ["OUTLAST_COMMAND"]),
        run_dir=Path(os.environ["OUTLAST_RUN_DIR"]),
        notices=Notices(deaf=True),
    )
    heir.run_id, heir.secret = os.environ["OUTLAST_RUN"], bytes.fromhex(os.environ["OUTLAST_SECRET"])
    return heir.run()


if __name__ == "__main__":
    sys.exit(main())
