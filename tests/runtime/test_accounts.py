"""Every second that `why` tells of, beside a stopwatch that stands outside: what the loop wrote down at each commit.

The stopwatch knows nothing of views, heartbeats or the journal: it has the times of commits, who made them, when the
run's first process began and its last one ended. What is told may differ from that by 50 ms or 2 %.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from outlast.core import events as ev
from outlast.prove._drive import Driven

# A stopwatch beside them is only as good as the machine is quiet: not among what CI runs.
pytestmark = [pytest.mark.process, pytest.mark.campaign, pytest.mark.soak, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).with_name("stopwatch.py")
PATIENCE_S = 200.0  # much of a run is the start of its processes, on a machine that others use too
_LEAST_S, _SHARE = 0.05, 0.02  # of each class of seconds, for itself
_TOLD_OF_S = 0.0005


class Commit(NamedTuple):
    at_s: float
    step: int
    who: frozenset[str]


def _makers(commit: Commit, first: dict[str, int]) -> frozenset[str]:
    """A joiner's loop begins with the step before its own: others have made that one."""
    return frozenset(who for who in commit.who if first[who] < commit.step) or commit.who


class Watched:
    """A run, and the stopwatch beside it."""

    def __init__(self, base: Path, steps: int, *options: str, settings: str = "", script: tuple[str, ...] = ()) -> None:
        self.out, self.steps, self.name = base / "out", steps, base.name
        self.out.mkdir()
        config = base / "run.toml"
        config.write_text(f"[run]\nrestart_backoff_s = 0.0\n{settings}")
        words = [str(SCRIPT), "--steps", str(steps), "--out", str(self.out), *script]
        self.began_s = time.monotonic()
        self.driven = Driven(base / "run", ["--config", str(config), *options], words)
        self.ended_s = self.began_s

    # --- striking ------------------------------------------------------------------------------------------------
    def until(self, what: str, test: Callable[[], bool]) -> None:
        self.driven.until(what, test, PATIENCE_S, lambda: None)

    def until_step(self, step: int) -> None:
        self.until(f"step {step}", lambda: any(c.step >= step for c in self.commits()))

    def pid(self, name: str) -> int:
        for event in reversed(self.driven.events):
            if isinstance(event, ev.ReplicaStarted) and event.replica == name:
                return event.pid
            if isinstance(event, ev.AgentStarted) and event.agent == name:
                return event.pid
        raise AssertionError(f"nothing named {name} was started")

    def strike(self, *names: str, number: signal.Signals = signal.SIGKILL) -> None:
        for name in names:
            pid = self.driven.coordinator_pid if name == "coordinator" else self.pid(name)
            subprocess.run(["kill", f"-{number.name.removeprefix('SIG')}", str(pid)], check=True)

    def stop_for(self, seconds: float, *names: str) -> None:
        self.strike(*names, number=signal.SIGSTOP)
        until_s = time.monotonic() + seconds
        self.until("they had been stopped for long enough", lambda: time.monotonic() >= until_s)
        for pid in [self.pid(name) for name in names]:
            with contextlib.suppress(ProcessLookupError):  # it may have been given up
                os.kill(pid, signal.SIGCONT)

    def finish(self) -> int:
        code = self.driven.finish(PATIENCE_S, lambda: None)
        self.ended_s = time.monotonic()
        return code

    # --- the stopwatch -------------------------------------------------------------------------------------------
    def lines(self, kind: str) -> list[tuple[float, int, str]]:
        """(when, step, who), by time."""
        path = self.out / "clock"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return sorted((float(at), int(step), who) for step, at, who, what in rows if what == kind)

    def commits(self) -> list[Commit]:
        """Each step once for each time that it was made: when the first replica had it, and who had it soon."""
        found: list[Commit] = []
        for at_s, step, who in self.lines("commit"):
            known = next((n for n in range(len(found) - 1, -1, -1) if found[n].step == step), None)
            slots = {name.partition(".")[0] for name in found[known].who} if known is not None else set()
            if known is None or who.partition(".")[0] in slots:
                found.append(Commit(at_s, step, frozenset({who})))
            else:
                found[known] = found[known]._replace(who=found[known].who | {who})
        first = {who: step for _, step, who in self.lines("begin")}
        return [c._replace(who=_makers(c, first)) for c in found]

    def said(self, command: str) -> dict[str, Any]:
        words = [sys.executable, "-m", "outlast", command, "--json", str(self.driven.run_dir)]
        return dict(json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout))


CLASSES = ("productive", "degraded", "recovery", "stalled", "lost", "checkpoint", "idle")


@dataclass
class Truth:
    """What the stopwatch makes of a run of `full` replicas: seconds by class, and what else it has seen."""

    wall_s: float
    seconds: dict[str, float]
    twice: int = 0
    gaps_s: list[float] = field(default_factory=list)  # without a commit, around a disturbance

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] += seconds


class Own(NamedTuple):
    """A step's own time, and the share of it that missing replicas would have saved."""

    productive_s: float
    degraded_s: float


def truth_of(run: Watched, full: int, planned: bool, gone: bool, saves: int) -> Truth:
    """`planned`: who leaves has done its part of the step; else what it did is done again, and that is no work. `gone`:
    the run failed, and nothing remains of it. `saves`: steps from one save to the next, 0 without."""
    commits, begins = run.commits(), run.lines("begin")
    first_s = min((at for at, _, _ in begins), default=run.ended_s)
    last_s = max((c.at_s for c in commits), default=run.ended_s)
    truth = Truth(run.ended_s - run.began_s, dict.fromkeys(CLASSES, 0.0))
    truth.add("idle", first_s - run.began_s + run.ended_s - last_s)
    usual, made, held = _usual(commits, full), dict[int, Own](), _held(run, saves)
    before: Commit | None = None
    for commit in commits:
        own_s = commit.at_s - first_s
        if before is not None and commit.step <= before.step:  # another fleet makes it anew
            start_s = min(at for at, _, who in begins if who in commit.who)
            truth.add("recovery", start_s - before.at_s)
            truth.gaps_s.append(commit.at_s - before.at_s)
            own_s = commit.at_s - start_s
        elif before is not None:
            own_s = took_s = commit.at_s - before.at_s
            alike = commit.who if planned and len(commit.who) < len(before.who) else before.who
            typical_s = usual[len(alike)] or took_s
            if commit.who != before.who or took_s > 3 * typical_s + 0.1:
                own_s = min(took_s, typical_s)
                again_s = 0.0 if planned else min(_again_s(run, before, commit), took_s - own_s)
                truth.add("lost", again_s)
                truth.add("recovery" if commit.who != before.who else "stalled", took_s - own_s - again_s)
                truth.gaps_s.append(took_s)
        held_s = min(own_s, statistics.median(held.get((commit.step, who), 0.0) for who in commit.who))
        truth.add("checkpoint", held_s)
        own_s -= held_s
        for step in [s for s in made if s >= commit.step]:
            truth.add("lost", sum(made.pop(step)))
            truth.twice += 1
        missing_s = own_s * (full - len(commit.who)) / full
        made[commit.step] = Own(own_s - missing_s, missing_s)
        before = commit
    for own in made.values():
        truth.add("lost" if gone else "productive", own.productive_s)
        truth.add("lost" if gone else "degraded", own.degraded_s)
    return truth


def _usual(commits: list[Commit], full: int) -> list[float]:
    """How long a step takes, by the number of its makers; 0 where too few tell."""
    usual = [0.0] * (full + 1)
    for n in range(1, full + 1):
        alike = [b.at_s - a.at_s for a, b in itertools.pairwise(commits) if len(a.who) == len(b.who) == n]
        usual[n] = statistics.median(alike) if len(alike) > 3 else 0.0
    return usual


def _held(run: Watched, saves: int) -> dict[tuple[int, str], float]:
    """How much longer than usual (a step, a replica) was not given to it, where the step before was one to be saved."""
    waits: dict[tuple[int, str], float] = {}
    for a, b in itertools.pairwise(sorted(run.lines("commit") + run.lines("open"), key=lambda row: (row[2], row[0]))):
        if a[2] == b[2] and b[1] == a[1] + 1:
            waits[b[1:]] = b[0] - a[0]
    usual_s = statistics.median(waits.values())
    return {of: max(0.0, seconds - usual_s) for of, seconds in waits.items() if saves and of[0] % saves == 0}


def _again_s(run: Watched, before: Commit, commit: Commit) -> float:
    """What the survivors of a step computed beyond their own shares: the dead had done that, or begun to."""
    work = run.lines("work")
    one_s = statistics.median(
        b[0] - a[0] for a, b in itertools.pairwise(sorted(work, key=lambda w: (w[2], w[0]))) if a[1:] == b[1:]
    )
    stayed = before.who & commit.who
    share, done = ({who: sum(w[1:] == (c.step, who) for w in work) for who in stayed} for c in (before, commit))
    return one_s * max((done[who] - share[who] for who in stayed), default=0) if len(stayed) < len(before.who) else 0.0


def near(told_s: float, true_s: float) -> bool:
    return abs(told_s - true_s) <= max(_LEAST_S, _SHARE * abs(true_s))


def check(
    run: Watched, full: int, *, gone: int = 0, planned: bool = False, saves: int = 0
) -> tuple[dict[str, Any], Truth]:
    """All that is told, beside all that was so: each class of seconds for itself. What it saw is printed (-rP)."""
    why, truth = run.said("why"), truth_of(run, full, planned, bool(gone), saves)
    cost = why["cost"]
    told = {"wall": (cost["wall_s"], truth.wall_s)}
    told |= {name: (cost[f"{name}_s"], truth.seconds[name]) for name in CLASSES}
    for name, (told_s, true_s) in told.items():
        if max(told_s, true_s) >= _TOLD_OF_S:
            print(f"| {run.name} | {name} | {told_s:.3f} | {true_s:.3f} | {1e3 * (told_s - true_s):+.0f} ms |")
    print(f"| {run.name} | unexplained | {cost['unexplained_s']:.3f} | 0.000 | {1e3 * cost['unexplained_s']:+.0f} ms |")
    wrong = {name: pair for name, pair in told.items() if not near(*pair)}
    assert wrong == {}, f"(told, true): {wrong}\n{json.dumps(cost)}\n{truth}"
    assert cost["unexplained_s"] <= 0.01 * cost["wall_s"], cost
    assert (why["lost_steps"], why["gone_steps"]) == (truth.twice + gone, gone)
    status = run.said("status")
    done = max((c.step for c in run.commits()), default=-1) + 1
    assert status["step"] == done
    return why, truth


@pytest.fixture
def watch(tmp_path: Path) -> Any:
    """Starts the run; ends it with the test."""
    started: list[Watched] = []

    def start(steps: int, *options: str, **more: Any) -> Watched:
        started.append(Watched(tmp_path, steps, *options, **more))
        return started[-1]

    yield start
    for run in started:
        run.driven.__exit__()


THREE = ("--replicas", "3")


def test_nothing_happens(watch: Any) -> None:
    run = watch(120, *THREE)
    assert run.finish() == 0
    why, _ = check(run, 3)
    assert why["cost"]["stalled_s"] + why["cost"]["recovery_s"] < 0.02 * why["cost"]["wall_s"]


@pytest.mark.parametrize("victims", [("r1.1",), ("r0.1",), ("r1.1", "r2.1")])
def test_some_are_killed(watch: Any, victims: tuple[str, ...]) -> None:
    run = watch(160, *THREE)
    run.until_step(40)
    run.strike(*victims)
    assert run.finish() == 0
    _, truth = check(run, 3)
    told = [e for e in run.driven.recoveries() if e.replica in victims]
    assert len(told) == len(victims)
    assert all(near(e.downtime_s, max(truth.gaps_s)) for e in told), (told, truth)
    (exited,) = [e for e in run.driven.events if isinstance(e, ev.ReplicaExited) and e.replica == victims[0]]
    its = max(step for _, step, who in run.lines("commit") if who == victims[0])
    assert exited.step is not None
    assert exited.step - (its + 1) in (0, 1)  # it may have died between a commit and its writing that down


def test_one_is_stopped_for_good(watch: Any) -> None:
    run = watch(160, *THREE)
    run.until_step(40)
    run.strike("r1.1", number=signal.SIGSTOP)
    assert run.finish() == 0
    _, truth = check(run, 3)
    (told,) = [e for e in run.driven.recoveries() if e.replica == "r1.1"]
    assert near(told.downtime_s, max(truth.gaps_s)), (told, truth)


@pytest.mark.parametrize(("replicas", "seconds"), [(1, 4.0), (3, 3.3)])
def test_all_are_stopped_and_go_on(watch: Any, replicas: int, seconds: float) -> None:
    run = watch(160, "--replicas", str(replicas))
    run.until_step(40)
    run.stop_for(seconds, *(f"r{slot}.1" for slot in range(replicas)))
    assert run.finish() == 0
    why, truth = check(run, replicas)
    if replicas == 1:
        assert truth.seconds["stalled"] > 0.5
        assert "held up" in why["headline"] or why["num_recoveries"]


def test_one_body_sleeps(watch: Any) -> None:
    run = watch(120, *THREE, script=("--asleep", '{"60": 5.0}'))
    run.until_step(59)
    run.until("it is told", lambda: run.said("status")["state"] == "stalled")
    assert run.finish() == 0
    why, _ = check(run, 3)
    (stall,) = [row for row in why["timeline"] if row["kind"] == "stall"]
    assert "the loop's own code" in stall["what"]
    assert "held up for" in why["headline"]


def test_a_loader_is_slow_once(watch: Any) -> None:
    run = watch(120, "--replicas", "2", script=("--slow-sample", "600"))
    assert run.finish() == 0
    why, _ = check(run, 2)
    (stall,) = [row for row in why["timeline"] if row["kind"] == "stall"]
    assert "fetching its samples" in stall["what"]


@pytest.mark.parametrize(("replicas", "times"), [(1, 1), (1, 3), (3, 1)])
def test_the_fleet_is_lost_between_saves(watch: Any, tmp_path: Path, replicas: int, times: int) -> None:
    run = watch(
        200, "--replicas", str(replicas), "--checkpoint-dir", str(tmp_path / "saves"), "--checkpoint-every", "30"
    )
    for time_ in range(times):
        run.until_step(45 + 40 * time_)
        run.strike(*(f"r{slot}.{time_ + 1}" for slot in range(replicas)))
        run.until("it is back", lambda n=time_: any(f".{n + 2}" in who for _, _, who in run.lines("begin")))  # type: ignore[misc]
    assert run.finish() == 0
    why, truth = check(run, replicas, saves=30)
    assert truth.twice > 0
    assert why["cost"]["lost_s"] > 0.1


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_fleet_is_lost_without_a_checkpoint(watch: Any, replicas: int) -> None:
    run = watch(400, "--replicas", str(replicas))
    run.until_step(60)
    run.strike(*(f"r{slot}.1" for slot in range(replicas)))
    assert run.finish() == 6
    done = max(c.step for c in run.commits()) + 1
    why, _ = check(run, replicas, gone=done)
    assert f"failed at step {done}" in why["headline"]
    assert f"{done} steps are lost" in why["headline"]
    assert why["ettr"] == pytest.approx(0.0)


def test_the_coordinator_is_killed_and_training_goes_on(watch: Any) -> None:
    run = watch(160, *THREE)
    run.until_step(40)
    run.strike("coordinator")
    assert run.finish() == 0
    why, _ = check(run, 3)
    assert why["cost"]["recovery_s"] < 0.05
    assert why["downtime_s"] == 0.0


def test_the_coordinator_is_killed_and_then_the_fleet(watch: Any) -> None:
    run = watch(400, *THREE)
    run.until_step(60)
    run.strike("coordinator", "r0.1", "r1.1", "r2.1")
    assert run.finish() == 6
    done = max(c.step for c in run.commits()) + 1
    why, _ = check(run, 3, gone=done)
    assert f"failed at step {done}" in why["headline"]
    for exited in [e for e in run.driven.events if isinstance(e, ev.ReplicaExited)]:
        assert exited.step is not None
        assert abs(exited.step - done) <= 1


def test_an_agent_is_killed(watch: Any) -> None:
    run = watch(160, *THREE, "--agents", "2")
    run.until_step(40)
    run.strike("a1")
    assert run.finish() == 0
    check(run, 3)


def test_a_replica_is_asked_to_leave(watch: Any) -> None:
    run = watch(160, *THREE)
    run.until_step(40)
    run.strike("r1.1", number=signal.SIGTERM)
    assert run.finish() == 0
    check(run, 3, planned=True)


def test_a_fleet_trains_on_without_replacements(watch: Any) -> None:
    run = watch(160, *THREE, settings="max_restarts = 0\n")
    run.until_step(40)
    run.strike("r2.1")
    assert run.finish() == 0
    why, _ = check(run, 3)
    assert why["cost"]["degraded_s"] > 0.5


def test_saves_that_fail_are_in_the_headline(watch: Any, tmp_path: Path) -> None:
    saves = tmp_path / "saves"
    run = watch(120, "--replicas", "1", "--checkpoint-dir", str(saves), "--checkpoint-every", "25")
    run.until("one is saved", lambda: any(isinstance(e, ev.CheckpointSaved) for e in run.driven.events))
    saves.rename(tmp_path / "elsewhere")
    saves.write_text("a file where the directory was")
    run.finish()
    why = run.said("why")
    assert "save" in why["headline"]
    assert "failed" in why["headline"]
    assert "nothing failed" not in why["headline"]


def test_a_script_that_goes_on_after_its_loop(watch: Any) -> None:
    run = watch(60, "--replicas", "2", script=("--after-s", "3.0"))
    assert run.finish() == 0
    check(run, 2)


def test_replicas_that_fail_at_first(watch: Any) -> None:
    run = watch(60, *THREE, script=("--fail-before", "1"))
    assert run.finish() == 0
    check(run, 3)


def test_the_status_is_as_old_as_it_says(watch: Any) -> None:
    run = watch(200, *THREE)
    run.until_step(50)
    asked_s = time.monotonic()
    said = run.said("status")
    answered_s = time.monotonic()
    at_s = next(c.at_s for c in run.commits() if c.step == said["step"] - 1)
    assert asked_s - at_s - _LEAST_S <= said["step_age_s"] <= answered_s - at_s + _LEAST_S
    assert run.finish() == 0
