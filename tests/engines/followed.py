"""A run of the scenario that an engine starts: this process follows its journal and holds the gates before steps."""

from __future__ import annotations

import contextlib
import fcntl
import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tests.runtime.conftest import PATIENCE_S, SCRIPT, undisturbed

from outlast.core import events as ev
from outlast.journal import Journal
from outlast.prove._drive import Driven
from outlast.prove._process_tree import Running, launcher_of


class _Driven(Driven):
    """Started by a command of an engine's, which lasts as long as the run."""

    def __init__(self, run_dir: Path, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.run_dir, self.events, self._seq = run_dir, [], 0
        self._journal: Journal | None = None
        self._base = log.parent
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, text=True
            )

    def alive(self) -> Iterator[Running]:
        """The run's processes on all hosts, which the engine has started: by where their output goes."""
        yield from launcher_of(self.process.pid)
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                log = (entry / "fd/1").readlink()
                if log.suffix == ".log" and self._base in log.parents:
                    yield from (msgspec.structs.replace(seen, name=log.stem) for seen in launcher_of(int(entry.name)))

    def follow(self, run_dir: Path) -> None:
        """From here on, another run of the same job."""
        if self._journal is not None:
            self._journal.close()
        self.run_dir, self.events, self._seq, self._journal = run_dir, [], 0, None


class Followed:
    """`base`: a folder that all hosts see. `logs`: what to show where something does not happen."""

    def __init__(
        self, base: Path, steps: int, gates: Sequence[int], logs: Callable[[], str], patience_s: float = PATIENCE_S
    ) -> None:
        self.base, self.steps, self.engine_logs, self.patience_s = base, steps, logs, patience_s
        self.driven: _Driven
        for name in ("out", "gates"):
            (base / name).mkdir()
        self._gates = {step: (base / "gates" / str(step)).open("w") for step in gates}
        for held in self._gates.values():
            fcntl.flock(held, fcntl.LOCK_EX)
        (base / "run.toml").write_text("[run]\nrestart_backoff_s = 0.0\nheartbeat_s = 0.2\n")
        self.script = [
            str(SCRIPT), "--steps", str(steps), "--out", str(base / "out"), "--gates", str(base / "gates"),
        ]  # fmt: skip

    def begin(self, run_dir: Path, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.driven = _Driven(run_dir, command, environ, self.base / "engine.out")

    def until(self, what: str, test: Callable[[], bool]) -> None:
        try:
            self.driven.until(what, test, self.patience_s, lambda: None)
        except Exception as error:
            raise AssertionError(f"{error}\n{self.logs()}") from error

    def gate(self, step: int, what: str, test: Callable[[], bool]) -> None:
        """Training waits before this step until `test()` holds."""
        self.until(what, test)
        self._gates.pop(step).close()

    def whole(self, *others: str) -> bool:
        """Whether the view has three members, on hosts none of which is one of `others`."""
        return len(self.driven.members) == 3 and set(others).isdisjoint(map(self.host_of, self.driven.members))

    def host_of(self, replica: str) -> str:
        agents = {e.agent: e.host for e in self.driven.events if isinstance(e, ev.AgentStarted)}
        return next(
            agents[e.agent] for e in self.driven.events if isinstance(e, ev.ReplicaStarted) and e.replica == replica
        )

    def comes_back(self, host: str, first: int) -> None:
        """A replica on this host becomes a member; gates from `first` on, ten steps apart."""
        mine = lambda kind: any(isinstance(e, kind) and self.host_of(e.replica) == host for e in self.driven.events)  # noqa: E731
        self.gate(first, "another replica was started there", lambda: mine(ev.ReplicaStarted))
        self.gate(first + 10, "it was served", lambda: mine(ev.JoinerServed))
        self.gate(first + 20, "it had caught up", lambda: mine(ev.JoinerCaughtUp))
        self.gate(first + 30, "it was a member", lambda: host in map(self.host_of, self.driven.members))

    def close(self) -> None:
        for held in self._gates.values():
            held.close()
        self.driven.process.kill()
        self.driven.process.wait()

    def assert_unchanged(self, num: int) -> None:
        """The run ended well, and so many replicas have the bits of the undisturbed one."""
        assert self.driven.finish(PATIENCE_S, lambda: None) == 0, self.logs()
        want: dict[str, Any] = undisturbed(self.steps, 8, "float32")
        found = {path.stem: json.loads(path.read_text()) for path in (self.base / "out").glob("*.json")}
        assert len(found) == num, self.logs()
        for name, had in found.items():
            for key in ("fingerprint", "model", "rates"):
                assert had[key] == want[key], f"{name}: another {key}\n{self.logs()}"
            assert {step: want["losses"][step] for step in had["losses"]} == had["losses"], name

    def logs(self) -> str:
        told = [repr(e) for e in self.driven.events if isinstance(e, ev.ViewInstalled | ev.Recovery | ev.ReplicaExited)]
        out = (self.base / "engine.out").read_text(errors="replace")[-3000:]
        return "\n".join([self.engine_logs(), out, *told])
