"""A real fleet under compressed time whose hosts announce that they fail, and then do, or do not: what is lost where
work is moved away on an alarm, and where the alarm is only told."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from benchmarks._common import ROOT, Bounds, Table
from outlast import observe
from outlast.core import events as ev
from outlast.prove._drive import Driven

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["moves"]

AGENTS, REPLICAS, SPARES = 3, 2, 1
WAIT_S = 60.0
FAILS_AFTER_S = 0.2  # of the view that has moved, or of the weighing
Mode = Literal["act", "tell"]


def moves(steps: int, precision: float, seed: int, bounds: Bounds, data: list[Any]) -> Table:
    """The same script, alone and in a fleet of either mode; `precision`: share of alarms that come true."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        base = Path(folder)
        alone = _fleet(base / "alone", steps, "tell", None, precision)
        rows = []
        for mode in ("act", "tell"):
            found = _fleet(base / mode, steps, mode, random.Random(seed), precision)
            same = found["digests"] == alone["digests"]
            data.append({"mode": mode, "same": same, **{k: v for k, v in found.items() if k != "digests"}})
            rows.append([
                mode, str(found["alarms"]), str(found["failed"]), str(found["recoveries"]), f"{found['lost_steps']:g}",
                f"{found['again']:g}", f"{found['downtime_s']:.2f}", f"{found['ettr']:.2%}", "yes" if same else "NO",
            ])  # fmt: skip
            bounds.check(f"moves, {mode}: runs that end with other bits", int(not same), 0, "runs")
            if mode == "act":
                bounds.check("moves: steps lost where work was moved", found["lost_steps"], 0, "steps")
                bounds.check("moves: microbatches computed again", found["again"], 0, "microbatches")
    return Table(
        title=f"A fleet of {REPLICAS} replicas and {SPARES} spare on {AGENTS} hosts, {steps} steps, {precision:.0%} of "
        f"alarms true",
        columns=["on an alarm", "alarms", "hosts that failed", "recoveries", "steps lost", "microbatches again",
                 "downtime s", "useful time", "bits of one alone"],
        rows=rows,
        notes=["A host that fails has its agent and all its replicas killed at once."],
    )  # fmt: skip


class _Run(Driven):
    """A run that is told of alarms by recordings that appear."""

    def __init__(self, base: Path, steps: int, mode: Mode, hosts: int) -> None:
        base.mkdir()
        self.readings, self.out = base / "readings", base / "out"
        self.readings.mkdir()
        self.out.mkdir()
        replicas, spares = (REPLICAS, SPARES) if hosts > 1 else (1, 0)
        (base / "run.toml").write_text(
            f'[run]\nreadings_s = 0.2\nreadings_from = "{self.readings}"\non_alarm = "{mode}"\n'
            "restart_backoff_s = 0.0\nheartbeat_s = 0.2\nmax_restarts = 1000\n"
        )
        options = ["--config", str(base / "run.toml"), "--replicas", str(replicas), "--spares", str(spares)]
        script = [str(ROOT / "benchmarks" / "_moves_worker.py"), "--steps", str(steps), "--out", str(self.out)]
        environ = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
        super().__init__(base / "run", [*options, "--agents", str(hosts)], script, environ=environ)

    def kinds(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def agents(self) -> dict[str, ev.AgentStarted]:
        """Those that are there."""
        gone = {event.agent for event in self.kinds(ev.AgentLost)}
        return {event.agent: event for event in self.kinds(ev.AgentStarted) if event.agent not in gone}

    def exits(self) -> list[ev.ReplicaExited]:
        return self.kinds(ev.ReplicaExited)

    def candidates(self) -> list[str]:
        """Hosts that may announce that they fail: all replicas train, and a spare stands ready on another host."""
        where = {event.replica: event.agent for event in self.kinds(ev.ReplicaStarted)}
        ready = {where[name] for name in self.spares()}
        if len(self.members) < REPLICAS:
            return []
        return sorted({where[name] for name in self.members if ready - {where[name]}} & self.agents().keys())

    def wait_for(self, what: str, test: Callable[[], bool]) -> None:
        self.until(what, test, WAIT_S, lambda: None)

    def settle(self, seconds: float) -> None:
        """Follow for so long, however busy the run is."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.wait(0.02):
            self.poll()


def _fleet(base: Path, steps: int, mode: Mode, draw: random.Random | None, precision: float) -> dict[str, Any]:
    """Alarms of one host after the other until the run is nearly over; without a die, one replica and no alarm."""
    alarms = failed = 0
    with _Run(base, steps, mode, AGENTS if draw is not None else 1) as run:
        while draw is not None:
            run.wait_for("the fleet was whole", lambda: bool(run.candidates()) or run.step > 0.9 * steps)
            if run.step > 0.9 * steps:
                break
            host = draw.choice(run.candidates())
            true, alarms = draw.random() < precision, alarms + 1
            _announce(run, host, alarms, mode)
            if true:
                run.settle(FAILS_AFTER_S)
                failed += 1
                _fail(run, host)
            print(f"{mode}: alarm {alarms} of {host}, {'true' if true else 'false'}, step {run.step}", file=sys.stderr)
        code = run.finish(20 * WAIT_S, lambda: None)
        digests = {path.read_text() for path in run.out.iterdir()}
        recoveries = run.recoveries()
        return {
            "alarms": alarms, "failed": failed, "recoveries": len(recoveries), "digests": digests, "code": code,
            "lost_steps": sum(r.lost_steps for r in recoveries),
            "again": sum(r.microbatches_recomputed for r in recoveries),
            "downtime_s": sum(r.downtime_s for r in recoveries), "ettr": observe.accounting(run.events).ettr,
        }  # fmt: skip


def _announce(run: _Run, host: str, number: int, mode: Mode) -> None:
    """The host's recording appears, whole; wait until its alarm was weighed, and what was moved has moved."""
    device = f"0000:{number:02x}:00"  # another each time: the same alarm of one device is told again after a minute
    reading = {"at_s": float(number), "source": "kernel", "device": device, "name": "xid.fatal", "value": 79.0,
               "text": "Xid 79"}  # fmt: skip
    before = len(run.kinds(ev.AlarmWeighed))
    (run.readings / "next").write_text(json.dumps(reading) + "\n")
    (run.readings / "next").rename(run.readings / f"{host}.jsonl")
    run.wait_for("the alarm was weighed", lambda: len(run.kinds(ev.AlarmWeighed)) > before)
    moved = run.kinds(ev.AlarmWeighed)[before]
    if mode == "act" and moved.action == "move":
        run.wait_for("its work has moved", lambda: set(moved.replicas) <= {e.replica for e in run.exits()})


def _fail(run: _Run, host: str) -> None:
    """The host is gone with all that runs there, and another process of its agent comes."""
    known = set(run.agents())
    os.kill(run.agents()[host].pid, signal.SIGKILL)
    run.wait_for("another agent is there", lambda: bool(set(run.agents()) - known))
