"""One fleet under a fault every few seconds, for hours: what its processes hold, what its files take, and the bits.

Every fault comes from outside, at a replica, a spare, an agent, the coordinator or the process that replicas are forked
from. Memory and descriptors are the kernel's counts, summed by role and compared between the first and the last tenth
of the time. At the end commands that read the journal are timed, and every loss that anybody committed is compared with
an undisturbed run of the same steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._common import Bounds, Table, environment, options, publish
from outlast.core import events as ev
from outlast.journal import Journal
from outlast.prove._commit_log import CommitLog
from outlast.prove._drive import Driven
from outlast.prove._process_tree import Running, left_behind, processes, send

__all__ = ["main"]

_TRAINING = ["-m", "outlast.prove._strike_training", "--dtype", "float32", "--microbatches", "8"]
_SIGNALS = {"SIGKILL": 7, "SIGSEGV": 4, "SIGTERM": 3, "SIGSTOP": 2, "SIGSTOP, SIGCONT": 4}
_ROLES = {"replica": 12, "agent": 2, "coordinator": 3, "nursery": 2}
_STEPS = 10_000_000  # nobody comes so far: the run is stopped
_STOPPED_S = 0.5
_START_S = 60.0
_COMMANDS = ("status", "why")
_TIMES, _NEWEST = 5, 1000


class Held(NamedTuple):
    """What processes hold: MiB of their own, MiB that they share, open descriptors."""

    own: float
    shared: float
    descriptors: int


def main(argv: list[str]) -> int:
    parser = options(__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds from one fault to the next")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds after each step")
    parser.add_argument("--keep", type=Path, help="where the run stays; else it is removed")
    args = parser.parse_args(argv)
    machine = environment(args)
    with contextlib.ExitStack() as stack:
        base = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        base.mkdir(parents=True, exist_ok=True)
        soak = Soak(base, args)
        soak.run()
        return publish("soak", args, machine, soak.tables(), soak.bounds(), soak.data)


class Soak:
    """One fleet of three and a spare, on two agents, that saves every 500 steps."""

    def __init__(self, base: Path, args: argparse.Namespace) -> None:
        self.base, self.args, self.rng = base, args, random.Random(args.seed)
        self.struck: Counter[str] = Counter()
        self.held: list[tuple[float, dict[str, Held]]] = []
        self.disk: list[tuple[float, dict[str, float]]] = []
        self.data: dict[str, Any] = {}
        self._stopped: list[tuple[float, Running]] = []

    # --- the run -------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """From the first process to the last, and then the same steps undisturbed."""
        folder = self.base / "struck"
        began_s = time.monotonic()
        with _started(folder, self.args.pause) as driven:
            driven.until("it trained", lambda: driven.step > 0, 120.0, lambda: None)
            due_s = time.monotonic() + _START_S
            end_s = due_s + 60.0 * self.args.minutes
            with contextlib.suppress(KeyboardInterrupt):  # what was seen until then is told
                while time.monotonic() < end_s and not driven.wait(0.05):
                    self._go_on()
                    if time.monotonic() >= due_s:
                        due_s += self.args.every
                        self._look(driven, folder, time.monotonic() - began_s)
                        self._strike(driven)
                        driven.poll()
                        self._say(driven, end_s - time.monotonic())
            self._go_on(last=True)
            self._end(driven, folder, time.monotonic() - began_s)
        self._compare(folder)

    def _strike(self, driven: Driven) -> None:
        alive = processes(driven.process.pid)
        role = self.rng.choices(list(_ROLES), list(_ROLES.values()))[0]
        kind = self.rng.choices(list(_SIGNALS), list(_SIGNALS.values()))[0]
        if role == "agent" and kind == "SIGTERM":  # its host is asked to go, and with it all who happen to be there
            kind = "SIGKILL"
        there = [seen for seen in alive if _role(seen) == role] or [seen for seen in alive if seen.is_rank]
        if there and send(seen := self.rng.choice(there), signal.Signals[kind.partition(",")[0]]):
            self.struck[f"{_role(seen)} {kind}"] += 1
            if kind.endswith("SIGCONT"):
                self._stopped.append((time.monotonic() + self.rng.uniform(0.0, 2.0 * _STOPPED_S), seen))

    def _say(self, driven: Driven, left_s: float) -> None:
        faults = sum(self.struck.values())
        if faults % 12 == 0:
            print(f"{faults} faults, step {driven.step}, {left_s / 60:.0f} min left", file=sys.stderr, flush=True)

    def _go_on(self, last: bool = False) -> None:
        for entry in [entry for entry in self._stopped if last or entry[0] <= time.monotonic()]:
            self._stopped.remove(entry)
            send(entry[1], signal.SIGCONT)

    def _look(self, driven: Driven, folder: Path, at_s: float) -> None:
        by_role: dict[str, list[Held]] = defaultdict(list)
        rows = [("launcher", driven.process.pid), *((_role(s), s.pid) for s in processes(driven.process.pid))]
        for role, pid in rows:
            with contextlib.suppress(OSError, ValueError):  # it has ended
                by_role[role].append(_held(pid))
        self.held.append((at_s, {role: Held(*map(sum, zip(*held, strict=True))) for role, held in by_role.items()}))
        sizes = {name: _size(folder / name) for name in ("run", "checkpoints", "tmp")}
        self.disk.append((at_s, sizes))

    def _end(self, driven: Driven, folder: Path, seconds: float) -> None:
        """What reads the journal is timed while the run still goes on, and then it is stopped."""
        times = {command: [_timed([command, str(folder / "run"), "--json"]) for _ in range(_TIMES)]
                 for command in _COMMANDS}  # fmt: skip
        times["journal"] = [_queried(folder / "run") for _ in range(_TIMES)]
        alive = driven.process.poll() is None
        if alive:
            subprocess.run([*_OUTLAST, "stop", str(folder / "run")], check=False, capture_output=True)
        code = driven.finish(300.0, lambda: None)
        run_id = next(e.run_id for e in driven.events if isinstance(e, ev.RunStarted))
        said = _json(["why", str(folder / "run"), "--json"])
        self.data = {
            "seconds": seconds, "struck": dict(self.struck), "exit_code": code, "to_the_end": alive, "why": said,
            "held": [(at, {role: held._asdict() for role, held in by.items()}) for at, by in self.held],
            "disk": self.disk, "seconds_of": times, "left": left_behind(folder / "run", run_id),
            "events": len(driven.events), "recoveries": len(driven.recoveries()),
        }  # fmt: skip

    # --- the bits ------------------------------------------------------------------------------------------------
    def _compare(self, folder: Path) -> None:
        log = CommitLog(folder / "commits")
        log.read()
        steps = 1 + log.newest_step()
        calm = self.base / "calm"
        for name in ("commits", "ends"):
            (calm / name).mkdir(parents=True)
        words = [*_TRAINING, "--folder", str(calm), "--steps", str(_STEPS), "--until", str(steps)]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("OUTLAST_")}
        subprocess.run([sys.executable, *words], check=True, env=environ, stdout=subprocess.DEVNULL)
        wanted = CommitLog(calm / "commits")
        wanted.read()
        losses = {commit.step: commit.loss for commit in wanted.commits}
        odd = [commit for commit in log.commits if losses.get(commit.step) != commit.loss]
        self.data |= {"steps": steps, "commits": len(log.commits), "odd": [commit._asdict() for commit in odd[:20]]}
        self.data |= {"missing": len(set(range(steps)) - {commit.step for commit in log.commits}), "num_odd": len(odd)}

    # --- what is told --------------------------------------------------------------------------------------------
    def tables(self) -> list[Table]:
        tenth = max(1, len(self.held) // 10)
        first, last = self.held[:tenth], self.held[-tenth:]
        rows = []
        for role in ("launcher", "coordinator", "agent", "nursery", "replica"):
            a, b = _medians(first, role), _medians(last, role)
            rows.append([role, *(f"{x:.0f} → {y:.0f}" for x, y in zip(a, b, strict=True))])
        d = self.data
        notes = [
            f"{d['seconds'] / 60:.0f} minutes, {sum(self.struck.values())} faults ("
            + ", ".join(f"{count} {name}" for name, count in sorted(self.struck.items())) + ")",
            f"{d['recoveries']} recoveries, {d['steps']:,} steps, {d['commits']:,} commits, {d['num_odd']} of them "
            f"with another loss than the undisturbed run's, {d['missing']} steps missing; exit code {d['exit_code']}",
            *(f"{name}: {at:.1f} MiB at first, {end:.1f} at the end" for name, at, end in self._sizes()),
            *(f"`outlast {name} --json`: {statistics.median(d['seconds_of'][name]):.2f} s" for name in _COMMANDS),
            f"left behind: {', '.join(map(str, d['left'])) or 'nothing'}",
        ]  # fmt: skip
        columns = ["role", "memory of its own, MiB", "shared memory, MiB", "descriptors"]
        title = "First tenth → last tenth, medians, all processes of a role"
        return [Table(title=title, columns=columns, rows=rows, notes=notes)]

    def _sizes(self) -> Iterator[tuple[str, float, float]]:
        for name in ("run", "checkpoints", "tmp"):
            yield name, self.disk[0][1][name], self.disk[-1][1][name]

    def bounds(self) -> Bounds:
        found, tenth = Bounds(), max(1, len(self.held) // 10)
        for role in ("launcher", "coordinator", "agent", "nursery", "replica"):
            before, after = _medians(self.held[:tenth], role), _medians(self.held[-tenth:], role)
            found.check(f"{role}: growth of its own memory", after[0] - before[0], 0.1 * before[0] + 16, "MiB")
            found.check(f"{role}: growth of shared memory", after[1] - before[1], 0.1 * before[1] + 16, "MiB")
            found.check(f"{role}: growth of descriptors", after[2] - before[2], 0.1 * before[2] + 8, "")
        found.check(
            "the journal's newest events, opened and read", statistics.median(self.data["seconds_of"]["journal"]), 0.2
        )
        found.check("commits with another loss", self.data["num_odd"], 0, "")
        found.check("steps missing", self.data["missing"], 0, "")
        found.check("processes and sockets left behind", len(self.data["left"]), 0, "")
        found.check("ended before it was stopped", not self.data["to_the_end"], 0, "")
        return found


_OUTLAST = (sys.executable, "-m", "outlast")


def _started(folder: Path, pause_s: float) -> Driven:
    for name in ("commits", "ends", "tmp"):
        (folder / name).mkdir(parents=True)
    settings: dict[str, Any] = {
        "replicas": 3, "spares": 1, "agents": 2, "restart_backoff_s": 0.1, "heartbeat_s": 0.5,
        "max_restarts": 1_000_000, "checkpoint_dir": str(folder / "checkpoints"), "checkpoint_every": 500,
        "checkpoint_keep": 3,
    }  # fmt: skip
    config = folder / "run.toml"
    config.write_text("[run]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    script = [*_TRAINING, "--folder", str(folder), "--steps", str(_STEPS), "--pause-s", str(pause_s)]
    return Driven(folder / "run", ["--config", str(config)], script, environ={"TMPDIR": str(folder / "tmp")})


def _role(seen: Running) -> str:
    if seen.is_rank:
        return "replica"
    return seen.name if seen.name == "coordinator" else "nursery" if seen.name.startswith("nursery") else "agent"


def _held(pid: int) -> Held:
    status = Path(f"/proc/{pid}/status").read_text()
    sizes = {line.partition(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("Rss")}
    own, shared = (int(sizes.get(name, 0)) / 1024 for name in ("RssAnon", "RssShmem"))
    return Held(own, shared, len(os.listdir(f"/proc/{pid}/fd")))


def _size(folder: Path) -> float:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it was removed just now
            total += path.stat().st_blocks * 512 if path.is_file() else 0
    return total / 2**20


def _medians(looks: list[tuple[float, dict[str, Held]]], role: str) -> tuple[float, float, float]:
    seen = [by_role[role] for _, by_role in looks if role in by_role] or [Held(0.0, 0.0, 0)]
    own, shared, descriptors = (statistics.median(values) for values in zip(*seen, strict=True))
    return own, shared, descriptors


def _timed(command: list[str]) -> float:
    began_s = time.monotonic()
    subprocess.run([*_OUTLAST, *command], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - began_s


def _queried(run_dir: Path) -> float:
    began_s = time.monotonic()
    with Journal.open_reader(run_dir) as journal:
        assert journal.events(since_seq=max(0, journal.last_seq - _NEWEST))
    return time.monotonic() - began_s


def _json(command: list[str]) -> Any:
    return json.loads(subprocess.run([*_OUTLAST, *command], check=True, capture_output=True, text=True).stdout)
