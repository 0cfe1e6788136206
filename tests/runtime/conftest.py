"""A fleet under faults, and the fleet of one that it must equal bit for bit."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib.util
import json
import os
import select
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from outlast.core import events as ev
from outlast.prove._drive import Driven
from outlast.prove._process_tree import of_run, processes
from outlast.runtime.faults.flips import Flip
from outlast.runtime.faults.liars import Lie
from outlast.runtime.settings.fault_points import Fault

SCRIPT = Path(__file__).with_name("scenario.py")
PATIENCE_S = 85.0
_STILL = 8  # polls in which nothing has come of a step
_VAIN = 300  # polls after which an order that waits for a step has missed those before the gate


@functools.cache
def undisturbed(steps: int, microbatches: int, dtype: str, rule: str = "{}") -> dict[str, Any]:
    """What the training gives when nothing happens: by a fleet of one, in this process."""
    import torch

    load_once()
    spec = importlib.util.spec_from_file_location("outlast_scenario", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    found: dict[str, Any] = module.train(steps, microbatches, getattr(torch, dtype), rule=json.loads(rule))[1]
    torch.set_num_threads(threads)
    return found


@functools.cache
def load_once() -> None:
    """What torch loads for a first optimizer is among what lives as a loop's first steps look through it, in whichever
    test was the first to make one, and in all after it of its module. Loaded here, none of them finds it there."""
    import torch

    torch.optim.SGD([torch.zeros(())], lr=0.1)
    gc.collect()
    gc.freeze()


@pytest.fixture
def training_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A loop in this very process: what it sets for all of it is put back."""
    import torch

    load_once()
    threads, hook = torch.get_num_threads(), sys.excepthook
    monkeypatch.delenv("OUTLAST", raising=False)
    yield
    torch.set_num_threads(threads)
    sys.excepthook = hook


def readable(fd: int, seconds: float) -> bool:
    """Whether it becomes so in time. By poll: this process may have more descriptors than select takes."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000.0))


def copies(*of: int) -> int:
    """Descriptors of this process that are of the same files: what threads of earlier tests open does not count."""

    def file(fd: int) -> tuple[tuple[int, ...], list[str]]:
        told = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
        return os.fstat(fd)[1:3], [line for line in told if line.startswith("Pid:")]  # they have one inode before 6.9

    wanted, found = [file(fd) for fd in of], 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += file(int(number)) in wanted
    return found


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def await_ends(handles: Iterable[int]) -> None:
    """Of processes by their descriptors, which are closed."""
    for handle in handles:
        assert readable(handle, PATIENCE_S)
        os.close(handle)


class Fleet:
    """One run of the scenario, or of another `script` with its first arguments. `words`: options of `outlast run`;
    `settings`: the run's configuration file."""

    def __init__(
        self, base: Path, faults: Sequence[Fault] = (), *, replicas: int, steps: int, spares: int = 0,
        microbatches: int = 8, dtype: str = "float32", workers: int = 0,
        gates: Sequence[int] = (), program: Sequence[str] = ("-m", "outlast"), rule: dict[str, Any] | None = None,
        lies: Sequence[Lie] = (), flips: Sequence[Flip] = (), checkpoint: dict[str, Any] | None = None,
        script: Sequence[Any] = (), prefix: Sequence[str] = (), environ: dict[str, str] | None = None,
        words: Sequence[str] = (), **settings: Any,
    ) -> None:  # fmt: skip
        self.base, self.faults = base, list(faults)
        self.shape = (steps, microbatches, dtype, json.dumps(rule or {}))
        self.out = base / "out"
        self.out.mkdir()
        settings = {"restart_backoff_s": 0.0, "heartbeat_s": 0.2} | settings
        config = base / "run.toml"
        config.write_text("[run]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
        options = ["--config", str(config), "--replicas", str(replicas), "--spares", str(spares), *words]
        other = [str(part) for part in script]
        script = [str(SCRIPT), "--steps", str(steps), "--microbatches", str(microbatches), "--dtype", dtype]
        script += ["--workers", str(workers), "--out", str(self.out), "--rule", self.shape[3]]
        script = [*other, "--steps", str(steps), "--out", str(self.out)] if other else script
        script += ["--checkpoint", json.dumps(checkpoint)] if checkpoint is not None else []
        self._gates: dict[int, IO[str]] = {}
        for step in gates:
            self._close_gate(step)
        script += ["--gates", str(base / "gates")] if gates else []
        self.driven = Driven(
            base / "run", options, script, self.faults, program, lies=lies, flips=flips, environ=environ, prefix=prefix
        )

    def _close_gate(self, step: int) -> None:
        path = self.base / "gates" / str(step)
        path.parent.mkdir(exist_ok=True)
        self._gates[step] = path.open("w")
        fcntl.flock(self._gates[step], fcntl.LOCK_EX)

    def gate(self, step: int, what: str, test: Callable[[], bool]) -> None:
        """Training waits before this step until `test()` holds. Members that hear of an order only as they wait carry
        it out after one step more: where nothing else can come, they wait before the next one instead."""
        while step + 1 < self.shape[0] and step + 1 not in self._gates and not self._unless_in_vain(what, test, _VAIN):
            self._close_gate(step + 1)
            self._gates.pop(step).close()
            step += 1
        self.until(what, test)
        self._gates.pop(step).close()

    def step_on(self, what: str, test: Callable[[], bool]) -> None:
        """Training goes through a gate each time it waits there with an order that takes a step, until `test()` holds:
        so steps last, however slow whoever joins or leaves is."""
        while self._gates and not self._unless_in_vain(what, test, _STILL):
            self.open_gate()
        self.until(what, test)

    def _unless_in_vain(self, what: str, test: Callable[[], bool], polls: int) -> bool:
        """Whether `test()` holds; not if for so many polls on end that waits for a step, and the step for the test."""
        calls = 0

        def in_vain() -> bool:
            nonlocal calls
            calls = calls + 1 if self.in_need() else 0
            return calls > 2 * polls  # it is asked twice in each

        self.until(what, lambda: test() or in_vain())
        return test()

    def in_need(self) -> bool:
        """Whether what the coordinator has ordered takes a step, before which all who train wait: a joiner's snapshot,
        another view, a save that was asked for."""
        coming, ordered, formed, unsaved = set[str](), (0, 0), (0, 0), False
        for event in self.driven.events:
            if isinstance(event, ev.JoinerServed):
                coming.add(event.replica)
            elif isinstance(event, ev.JoinerCaughtUp | ev.ReplicaExited):
                coming.discard(event.replica)
            elif isinstance(event, ev.ViewInstalled):
                ordered = (event.epoch, event.n)
            elif isinstance(event, ev.ViewFormed):
                formed = (event.epoch, event.n)
            elif isinstance(event, ev.CheckpointInterval | ev.CheckpointBegan):
                unsaved = isinstance(event, ev.CheckpointInterval) and event.reason.startswith("now: ")
        return (bool(coming) or ordered != formed or unsaved) and self.all_wait()

    def living(self) -> set[str]:
        """Replicas that were started and have not exited."""
        started = {e.replica for e in self.driven.events if isinstance(e, ev.ReplicaStarted)}
        return started - {e.replica for e in self.exits()}

    def all_wait(self) -> bool:
        """Whether all who train wait at a gate: those who live of the newest view that has formed, as one that is
        planned begins with the next step."""
        formed = {(e.epoch, e.n) for e in self.driven.events if isinstance(e, ev.ViewFormed)}
        views = [e for e in self.driven.events if isinstance(e, ev.ViewInstalled) and (e.epoch, e.n) in formed]
        training = self.living().intersection(views[-1].members if views else ())
        return bool(training) and self.at_gates({self.pid(name) for name in training})

    def pace(self, what: str, test: Callable[[], bool]) -> None:
        """Training takes another step each time nothing has come of the last one for a while, until `test()` holds:
        for what a step begins once a disk has done with an earlier one."""
        while not test():
            self.until("all wait before a step", lambda: test() or self.members_wait())
            for _ in range(_STILL):
                self.driven.wait(0.05)
                self.driven.poll()
            if not test():
                self.open_gate()

    @property
    def gates(self) -> list[int]:
        """Steps before which training waits."""
        return sorted(self._gates)

    def open_gate(self) -> None:
        """The next of them."""
        self._gates.pop(min(self._gates)).close()

    def open_gates(self) -> None:
        """Nothing is waited for any more."""
        while self._gates:
            self.open_gate()

    def replace(self, struck: str, served: int, caught_up: int, *, replicas: int = 2) -> str:
        """Of so many replicas one is killed before step 4, and its successor, which is returned, joins before the gates
        given. Before the second of them it is certain to take its place: a spare has no result."""
        self.until("all train", lambda: len(self.driven.members) == replicas)
        self.until("all wait", lambda: self.at_gates({self.pid(f"r{slot}.1") for slot in range(replicas)}))
        self.strike(self.pid(struck))
        self.gate(4, "it was gone", lambda: self.exited(struck))  # the next steps are those of a view without it
        successor = struck.replace(".1", ".2")
        self.gate(served, "its successor was served", lambda: self.served(successor))
        self.gate(caught_up, "it had caught up, and members are told", lambda: self.placed(successor))
        return successor

    def served(self, replica: str) -> bool:
        """Whether the order to serve it was given."""
        return any(isinstance(e, ev.JoinerServed) and e.replica == replica for e in self.driven.events)

    def caught_up(self, replica: str) -> bool:
        return any(isinstance(e, ev.JoinerCaughtUp) and e.replica == replica for e in self.driven.events)

    def placed(self, replica: str) -> bool:
        """Whether it is of the newest view: which members enter after the next step, where it is a planned one."""
        return replica in self.driven.members

    def exited(self, replica: str) -> bool:
        return any(e.replica == replica for e in self.exits())

    def until(self, what: str, test: Callable[[], bool]) -> None:
        self.driven.until(what, test, PATIENCE_S, lambda: None)

    def finish(self) -> int:
        return self.driven.finish(PATIENCE_S, lambda: None)

    def pid(self, name: str) -> int:
        """Of a replica, or of an agent."""
        for event in self.driven.events:
            if isinstance(event, ev.ReplicaStarted) and event.replica == name:
                return event.pid
            if isinstance(event, ev.AgentStarted) and event.agent == name:
                return event.pid
        raise AssertionError(f"nothing named {name} was started")

    def state(self, replica: str) -> str:
        """The kernel's letter for it; X if it is gone."""
        return _state(self.pid(replica))

    def coordinator_state(self) -> str:
        started = [e for e in self.driven.events if isinstance(e, ev.CoordinatorStarted)]
        return _state(started[-1].pid) if started else "?"

    def at_gates(self, pids: set[int]) -> bool:
        """Whether all of these processes wait at a gate, as the kernel sees it."""
        waiting = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" in line]
        return pids <= {int(words[5]) for words in waiting}

    def members_wait(self) -> bool:
        """Whether all members of the newest view that live, and there are some, wait at a gate."""
        living = [name for name in self.driven.members if not self.exited(name)]
        return bool(living) and self.at_gates({self.pid(name) for name in living})

    def parent(self, pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    def started(self, replica: str) -> bool:
        return any(isinstance(e, ev.ReplicaStarted) and e.replica == replica for e in self.driven.events)

    def exits(self) -> list[ev.ReplicaExited]:
        return [e for e in self.driven.events if isinstance(e, ev.ReplicaExited)]

    def strike(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(pid, number)

    def kill_whole(self) -> None:
        """The launcher first; the others die with it, and until the last of them has, a save may still be published."""
        launcher = self.driven.process.pid
        others = [os.pidfd_open(each.pid) for each in processes(launcher)]
        self.strike(launcher)
        self.driven.process.wait(PATIENCE_S)
        await_ends(others)

    def logs(self) -> str:
        """For a failure's report."""
        parts = []
        for path in sorted((self.driven.run_dir / "logs").glob("*.log")):
            text = path.read_text(errors="replace").strip()
            if text:
                parts.append(f"--- {path.name}\n{text[-2500:]}")
        wanted = (ev.ViewInstalled, ev.Recovery, ev.Suspected, ev.Notice, ev.ReplicaExited, ev.RunFinished)
        parts += [repr(e) for e in self.driven.events if isinstance(e, wanted)]
        return "\n".join(parts)

    def results(self) -> dict[str, dict[str, Any]]:
        return {path.stem: json.loads(path.read_text()) for path in self.out.glob("*.json")}

    def saved(self) -> list[ev.CheckpointSaved]:
        return [e for e in self.driven.events if isinstance(e, ev.CheckpointSaved)]

    def assert_unchanged(
        self, *, survivors: set[str] | None = None, recoveries: int | None = None, may_lose: bool = False, code: int = 0
    ) -> None:
        """The run ended well, nothing is left of it, and every survivor has the bits of the undisturbed run."""
        assert self.finish() == code, self.logs()
        assert of_run(self.driven.run_dir) == []
        want, results = undisturbed(*self.shape), self.results()
        assert results, self.logs()
        if survivors is not None:
            assert set(results) == survivors, self.logs()
        for name, found in results.items():
            lost = {k: v for k, v in found["losses"].items() if want["losses"][k] != v}
            assert lost == {}, f"{name}: the losses of steps {sorted(lost, key=int)[:5]} differ\n{self.logs()}"
            assert {k: want["norms"][k] for k in found["norms"]} == found["norms"], f"{name}\n{self.logs()}"
            for key in ("fingerprint", "model", "rates"):
                assert found[key] == want[key], f"{name}: another {key}\n{self.logs()}"
        told = self.driven.recoveries()
        assert may_lose or all(r.lost_steps == 0 for r in told)
        if recoveries is not None:
            assert len(told) == recoveries, self.logs()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What hosts were struck by, and how long nobody committed a step."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    rows: dict[str, list[tuple[int, float]]] = {}
    for name, value in [each for report in reports for each in report.user_properties]:
        if name == "host fault":
            kind, lost, still_s = value
            rows.setdefault(kind, []).append((lost, still_s))
    if rows:
        terminalreporter.section(f"{sum(map(len, rows.values()))} faults of hosts")
        terminalreporter.line(
            f"{'fault':30}{'struck':>8}{'replicas lost':>16}{'standstill (s): median':>26}{'worst':>8}"
        )
    for kind, found in sorted(rows.items()):
        still = [still_s for _, still_s in found]
        told = f"{statistics.median(still):26.2f}{max(still):8.2f}" if any(still) else f"{'none':>26}{'none':>8}"
        terminalreporter.line(f"{kind:30}{len(found):8}{sum(lost for lost, _ in found):16}{told}")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Start fleets that end with the test. Nothing of them may be left."""
    started: list[Fleet] = []

    def start(*faults: Fault, **shape: Any) -> Fleet:
        base = tmp_path / str(len(started))
        base.mkdir()
        started.append(Fleet(base, faults, **shape))
        return started[-1]

    yield start
    for each in started:
        running = each.driven.process.poll() is None
        each.driven.__exit__()
        if running and each.driven.process.returncode == -signal.SIGKILL:  # it was too slow; the others die with it
            for pid in of_run(each.driven.run_dir):
                with contextlib.suppress(ProcessLookupError):
                    await_ends([os.pidfd_open(pid)])
        assert of_run(each.driven.run_dir) == []
