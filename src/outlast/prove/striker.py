"""Strikes one fleet from outside, at the moments that its plan has, and keeps a record of all it did and saw.

It knows the run as a stranger does: by the kernel's list of processes, by the commit log, by what `outlast status`
prints. It decides nothing about whether that was right: `strike_findings.py` does.
"""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from outlast.core import events as ev
from outlast.prove._command_answers import decoded, printed, words
from outlast.prove._commit_log import CommitLog
from outlast.prove._drive import Driven
from outlast.prove._patience import Patience
from outlast.prove._process_tree import (
    Running,
    end_of,
    first_queued_s,
    launcher_of,
    left_behind,
    processes,
    send,
    state_of,
)
from outlast.prove._strangers import Stranger
from outlast.prove._strike_acts import Surrounding, carry_out
from outlast.prove.strike_plan import EVERY, MICROBATCHES, MOST_COORDINATORS, ROWS, STEPS, Role, Strike, StruckFleet
from outlast.prove.struck_hosts import StruckHosts

__all__ = ["HANG_S", "SLOW", "StrikeDone", "Life", "StrikeRecord", "StatusSample", "StrangerSeen", "Striker"]

HANG_S = 30.0
"""How long after the last strike a run of `prove strikes` may neither commit a step nor end."""
_LOOK_S = 0.05
SLOW = "SLOW"
"""Stopped for every other look at the run, as a processor that is too hot is slowed."""
_SAMPLE_S = 2.5
_STRANGER_S = 0.05  # between two of a stranger's visits, in the mean
_OVERDUE_S = 30.0  # what could not be undone for so long keeps nobody waiting
_KNOWN_STEPS = 10
_LEFT_S = 2.0  # for the kernel to end the children of a process that has ended


class StrikeDone(msgspec.Struct, kw_only=True):
    """A strike that was carried out. Seconds since the start."""

    at_s: float
    kind: str
    role: Role
    pid: int
    name: str
    state: str  # the kernel's, before it
    continued_s: float | None = None


class Life(msgspec.Struct, kw_only=True):
    """A process as it was seen from outside. `queued`: at each look at a replica (when, how long until then it had been
    ready to train, and had no processor)."""

    name: str
    pid: int
    first_s: float
    last_s: float
    queued: list[tuple[float, float]] = []


class StatusSample(msgspec.Struct, kw_only=True):
    """What `outlast status` printed, and between which moments it was asked and answered: with `--json`, or `text`."""

    asked_s: float
    answered_s: float
    said: dict[str, Any]
    text: str = ""


class StrangerSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What the stranger came to. `reached`: how often it was let in as far as a connection, by whose socket it was;
    `told_secret`: which kinds of sockets said the run's secret to it."""

    reached: dict[str, int] = {}
    told_secret: list[str] = []


class StrikeRecord(msgspec.Struct, kw_only=True):
    """All of one fleet. `started_s`: the clock of the commit log at 0; `unix_s`: the wall's."""

    started_s: float
    unix_s: float
    ended_s: float = 0.0
    longest_s: float = 0.0  # without a step, a strike or the end
    exit_code: int | None = None
    hung: str = ""
    output: str = ""
    done: list[StrikeDone] = []
    lives: list[Life] = []
    samples: list[StatusSample] = []
    left: list[str] = []
    stranger: StrangerSeen = StrangerSeen()
    why: dict[str, Any] = {}
    status: dict[str, Any] = {}
    printed: dict[str, str] = {}  # the same as people are told it, by command


class Striker:
    """One fleet in its own `folder`; `run` once. `around`: what can be struck of it beside its processes; `environ`:
    what who asks about it lives by, beside our own environment."""

    def __init__(
        self,
        folder: Path,
        fleet: StruckFleet,
        launch: Callable[[Path, StruckFleet], Driven] | None = None,
        hang_s: float = HANG_S,
        around: Mapping[Role, Surrounding] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._around, self._environ = around or {}, os.environ | dict(environ or {})
        self.folder, self.fleet, self._launch = folder, fleet, launch or _own_training
        self._patience = Patience(hang_s)
        for name in ("commits", "ends", "tmp"):
            (folder / name).mkdir(parents=True)
        self.log = CommitLog(folder / "commits")
        self.record = StrikeRecord(started_s=0.0, unix_s=0.0)
        self.events: list[ev.AnyEvent] = []
        self._lives: dict[tuple[int, str], Life] = {}
        self._alive: list[Running] = []
        self._to_end: list[tuple[float, Callable[[], bool], StrikeDone]] = []  # what lasts for a time
        self._slowed: list[tuple[float, Running]] = []
        self._asking: tuple[float, subprocess.Popen[str]] | None = None
        self._moved_s = 0.0

    # --- the run -------------------------------------------------------------------------------------------------
    def run(self, watch: Callable[[StrikeRecord], None]) -> StrikeRecord:
        """From the first process to the last, and what is left then."""
        record = self.record
        record.started_s, record.unix_s = time.monotonic(), time.time()
        with self._launch(self.folder, self.fleet) as driven, self._beside(driven.process.pid):
            pending = list(self.fleet.strikes)
            due_s = pending[0].wait_s if pending and not self.fleet.from_training else math.inf
            sample_s = _SAMPLE_S
            end_s = end_of(driven.process.pid)
            while not driven.wait(_LOOK_S):
                self._look(driven)
                if due_s == math.inf and pending and self._all_train(driven):
                    due_s = self._now() + pending[0].wait_s
                if pending and self._now() >= due_s and self._strike(driven, pending[0]):
                    pending.pop(0)
                    due_s = self._now() + (pending[0].wait_s if pending else 0.0)
                self._continue()
                if self._now() >= sample_s and self._ask():
                    sample_s = self._now() + _SAMPLE_S
                if self._hangs(driven):
                    break
                watch(record)
            record.ended_s = (end_s() or time.monotonic()) - record.started_s
            self._undo_all()
            hosts = self._around.get("host")
            if isinstance(hosts, StruckHosts):
                record.left = hosts.over()
            record.exit_code = driven.process.poll()
            driven.poll()
            self.events = driven.events
            if record.exit_code is not None:
                record.output = driven.process.communicate()[1][-3000:]
        self._close()
        return record

    @contextmanager
    def _beside(self, launcher: int) -> Iterator[None]:
        """With the stranger, if the fleet has one."""
        if not self.fleet.stranger:
            yield
            return
        seed = self.fleet.seed + self.fleet.number
        with Stranger(self.folder / "run", launcher, seed, pause_s=_STRANGER_S) as stranger:
            yield
        self.record.stranger = StrangerSeen(reached=dict(stranger.reached), told_secret=sorted(stranger.told_secret))

    def _now(self) -> float:
        return time.monotonic() - self.record.started_s

    # --- looking -------------------------------------------------------------------------------------------------
    def _look(self, driven: Driven) -> None:
        """Who lives, and what was committed."""
        now = self._now()
        self._alive = processes(driven.process.pid)
        hosts = self._around.get("host")
        if isinstance(hosts, StruckHosts):
            hosts.look()
            self._alive += [seen for pid in hosts.pids for seen in processes(pid)]
        for seen in self._alive:
            life = self._lives.get((seen.pid, seen.born))
            if life is None:
                life = Life(name=seen.name, pid=seen.pid, first_s=now, last_s=now)
                self._lives[seen.pid, seen.born] = life
            life.name, life.last_s = seen.name, now  # a replica is forked from a nursery, and looks like one at first
            if seen.is_rank and not seen.place:
                life.queued.append((self._now(), first_queued_s(seen)))
        self.log.read()
        driven.poll()

    def _hangs(self, driven: Driven) -> bool:
        """Whether it has neither moved nor worked for too long."""
        now, last = self._now(), self.log.newest_s
        self._patience.look(now, [*self._alive, *launcher_of(driven.process.pid)])
        moved_s = max(self._moved_s, last - self.record.started_s if last is not None else 0.0)
        self.record.longest_s = max(self.record.longest_s, now - moved_s)
        if any(end_s > now - _OVERDUE_S for end_s, _, _ in self._to_end) or now - moved_s < self._patience.seconds(now):
            return False
        self.record.hung = f"no step and no end for {now - moved_s:.1f} s; {self._patience.words(now)}"
        self.record.status = printed(["status", str(driven.run_dir)], self._environ)
        return True

    def _ask(self) -> bool:
        """`outlast status` in a process of its own, so that its answer disturbs no moment. Whether it answered
        since the last call, or was asked just now for the first time."""
        if self._asking is not None:
            asked_s, process = self._asking
            if process.poll() is None:
                return False
            self._asking = None
            out, _ = process.communicate()
            text = self._in_words() and process.returncode == 0
            said = {} if text else decoded(out) if process.returncode == 0 else {"error": out}
            sample = StatusSample(asked_s=asked_s, answered_s=self._now(), said=said, text=out if text else "")
            self.record.samples.append(sample)
            return True
        if (self.folder / "run" / "journal").exists() or any((self.folder / "run").glob("*")):
            command = [sys.executable, "-m", "outlast", "status", str(self.folder / "run")]
            command += [] if self._in_words() else ["--json"]
            process = subprocess.Popen(
                command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._asking = (self._now(), process)
        return False

    def _in_words(self) -> bool:
        """Whether this question is for the form that people read: every other one."""
        return len(self.record.samples) % 2 == 1

    def _all_train(self, driven: Driven) -> bool:
        """Whether as many replicas as were asked for are in the view, and the run knows how long its steps take."""
        return self.log.newest_step() >= _KNOWN_STEPS and len(driven.members) >= self.fleet.replicas

    # --- striking ------------------------------------------------------------------------------------------------
    def _strike(self, driven: Driven, strike: Strike) -> bool:
        """Whether there was anybody to strike."""
        for role in strike.roles:
            if role in self._around:
                if self._strike_around(self._around[role], role, strike):
                    return True
                continue
            candidates = sorted((s for s in self._alive if self._role(driven, s) == role), key=lambda seen: seen.name)
            if not candidates or (role == "coordinator" and self._spares_coordinators()):
                continue
            seen = candidates[int(strike.pick * len(candidates))]
            before = state_of(seen)
            if not before or not (strike.signal == SLOW or carry_out(seen, strike.signal)):
                continue
            self._struck(
                StrikeDone(at_s=self._now(), kind=strike.kind, role=role, pid=seen.pid, name=seen.name, state=before),
                strike.continue_s,
                functools.partial(_go_on, seen),
            )
            if strike.signal == SLOW and strike.continue_s is not None:
                self._slowed.append((self._now() + strike.continue_s, seen))
            return True
        return False

    def _spares_coordinators(self) -> bool:
        """Where a run starts slowly there is nobody else to strike, and each strike would be another coordinator's."""
        lately = self._now() - 60.0
        return (
            len({d.pid for d in self.record.done if d.role == "coordinator" and d.at_s > lately}) >= MOST_COORDINATORS
        )

    def _strike_around(self, what: Surrounding, role: Role, strike: Strike) -> bool:
        name = what.strike(strike.named, strike.pick)
        if not name:
            return False
        done = StrikeDone(at_s=self._now(), kind=strike.named, role=role, pid=0, name=name, state="")
        self._struck(done, strike.continue_s, lambda: what.mend(strike.named, name))
        return True

    def _struck(self, done: StrikeDone, for_s: float | None, undo: Callable[[], bool]) -> None:
        self.record.done.append(done)
        self._moved_s = done.at_s
        if for_s is not None:
            self._to_end.append((done.at_s + for_s, undo, done))

    def _role(self, driven: Driven, seen: Running) -> Role:
        if seen.name == "coordinator":
            return "coordinator"
        if seen.name.startswith("nursery"):
            return "nursery"
        if not seen.is_rank:
            return "agent"
        if seen.place:
            return "rank"
        members = driven.members
        inside = seen.name in members if members else int(seen.name[1:].split(".")[0]) < self.fleet.replicas
        return "replica" if inside else "spare"

    def _continue(self) -> None:
        """End what has lasted; who is slow runs in every other look alone."""
        self._slowed = [(end_s, seen) for end_s, seen in self._slowed if end_s > self._now()]
        for _, seen in self._slowed:
            send(seen, signal.SIGCONT if state_of(seen) == "T" else signal.SIGSTOP)
        for entry in [entry for entry in self._to_end if entry[0] <= self._now()]:
            if not entry[1]():
                continue
            self._to_end.remove(entry)
            entry[2].continued_s = self._moved_s = self._now()

    def _undo_all(self) -> None:
        """The run is over: what lasts is ours, and no fault of who would be left behind by it."""
        for _, undo, done in self._to_end:
            if undo():
                done.continued_s = self._now()
        self._to_end.clear()

    # --- the end -------------------------------------------------------------------------------------------------
    def _close(self) -> None:
        record, run_dir = self.record, self.folder / "run"
        if self._asking is not None:
            self._asking[1].kill()
            self._asking[1].communicate()
        self.log.read()
        record.lives = sorted(self._lives.values(), key=lambda life: life.first_s)
        run_id = next((e.run_id for e in self.events if isinstance(e, ev.RunStarted)), "")
        end_s = self._now() + _LEFT_S
        while (left := left_behind(run_dir, run_id)) and self._now() < end_s:
            os.sched_yield()
        temporary = [f"{path} in its TMPDIR" for path in (self.folder / "tmp").iterdir()]
        pids = {str(life.pid) for life in record.lives}
        shared = [f"/dev/shm/{p.name}" for p in Path("/dev/shm").iterdir() if pids & set(p.name.split("_"))]
        record.left += [*left, *temporary, *shared]
        record.why = printed(["why", str(run_dir)], self._environ)
        record.status = record.status or printed(["status", str(run_dir)], self._environ)
        record.printed = {told: words([told, str(run_dir)], self._environ) for told in ("why", "status")}


def _go_on(seen: Running) -> bool:
    send(seen, signal.SIGCONT)  # or it has ended, which is as good
    return True


def _own_training(folder: Path, fleet: StruckFleet) -> Driven:
    """The training of `prove strikes`."""
    settings: dict[str, object] = {
        "replicas": fleet.replicas, "spares": fleet.spares, "agents": fleet.agents, "exchange": fleet.exchange,
        "audit": fleet.setting.audit, "restart_backoff_s": 0.1, "heartbeat_s": 0.5, "formation_s": 10.0,
        "max_restarts": 64,
    }  # fmt: skip
    if fleet.keeps:
        settings |= {"checkpoint_dir": str(folder / "checkpoints"), "checkpoint_every": EVERY}
        settings |= {"checkpoint_keep": 2 * STEPS // EVERY}
    if fleet.setting.aggregation != "mean":
        settings |= {"aggregation": fleet.setting.aggregation, "f": 1, "rows": ROWS, "on_shortfall": "lower"}
    config = folder / "run.toml"
    config.write_text("[run]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    script = ["-m", "outlast.prove._strike_training", "--steps", str(STEPS), "--dtype", fleet.setting.dtype]
    script += ["--microbatches", str(MICROBATCHES), "--folder", str(folder)]
    environ = {"TMPDIR": str(folder / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    return Driven(folder / "run", ["--config", str(config), "--probes", "127.0.0.1:0"], script, environ=environ)
