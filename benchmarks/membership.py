"""How membership grows: the coordinator's pure machine with up to 100,000 members, and 64 real processes.

The machine: N members report, form a view, lose one, form the next, take in the replacement. Every action is carried
out as its driver does (records and messages are encoded), one member computes the roll call's plan; nothing is sent.
Each size runs in a process of its own, so that peak memory is its own.

The processes: `outlast run` with 64 replicas of a model of a few parameters, one microbatch each, on the cores that
there are. How long from the last greeting to the first step of all, and how long the step in which one is killed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks._analysis import Outcome, measure_survivors
from benchmarks._common import ROOT, Bounds, Table, alone, environment, options, publish, spread
from benchmarks._systems import SYSTEMS, Launch
from outlast.core.protocol import Coordinator, RollEntry, Settings, View, ViewId, messages, resolve
from outlast.core.protocol.delta import apply

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks._fleet import Fleet

__all__ = ["main"]

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
EXPONENT = 1.2
"""Near linear: from one size to the next, time and memory grow by at most the ratio of the sizes to this power."""
VISIBLE_BYTES = 4 * 2**20
"""Less than this is lost in what the interpreter had left over."""
CROWD_S, CALM_STEPS = 300.0, 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """One size. Seconds of processor time: to form the first view, change it for a death, admit the replacement."""

    members: int
    form_s: float
    change_s: float
    admit_s: float
    plan_s: float
    peak_bytes: int
    install_bytes: int  # a whole view with its addresses
    death_bytes: int  # told to all members together, from a death to the next view
    admission_bytes: int  # ... and from a joiner's last word to the view with it
    death_whole_bytes: int  # what the first would be if that view were told whole

    @property
    def total_s(self) -> float:
        return self.form_s + self.change_s + self.admit_s


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.machine:
        print(json.dumps(dataclasses.asdict(grow(args.machine))))
        return 0
    machine, bounds, found = environment(args, packages=("msgspec",)), Bounds(), list[Growth]()
    notes: list[str] = []
    with alone(args.lock):
        for size in args.sizes:
            one = measure(size, args.limit_s)
            if one is None:
                notes.append(f"{size:,} members were not done in {args.limit_s:g} s")
                bounds.check(f"{size:,} members: done", math.inf, args.limit_s)
                break
            found.append(one)
            print(one, file=sys.stderr)
    for before, after in itertools.pairwise(found):
        step = f"{before.members:,} to {after.members:,} members"
        bounds.check(f"{step}: time grows by N to the power", exponent(before, after, "total_s"), EXPONENT, "")
        bounds.check(
            f"{step}: bytes told after a death grow by N to the power", exponent(before, after, "death_bytes"), 1.05, ""
        )
        if before.peak_bytes > VISIBLE_BYTES:
            bounds.check(f"{step}: memory grows by N to the power", exponent(before, after, "peak_bytes"), EXPONENT, "")
    crowd = gather(args) if args.processes else None
    tables = [tabulate(found, notes), *([tabulate_crowd(crowd)] if crowd else [])]
    return publish("membership", args, machine, tables, bounds, {"machine": found, "processes": crowd})


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="members in the pure machine")
    parser.add_argument("--limit-s", type=float, default=120.0, help="give up on a size after this long")
    parser.add_argument("--processes", type=int, default=64, help="real ones; 0 leaves them out")
    parser.add_argument("--kills", type=int, default=5, help="of the real processes, one after the other")
    parser.add_argument("--machine", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def measure(size: int, limit_s: float) -> Growth | None:
    command = [sys.executable, "-m", "benchmarks.membership", "--machine", str(size)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=True)
    except subprocess.TimeoutExpired:
        return None
    return Growth(**json.loads(done.stdout))


def exponent(before: Growth, after: Growth, what: str) -> float:
    return math.log(getattr(after, what) / getattr(before, what)) / math.log(after.members / before.members)


def grow(size: int) -> Growth:
    """Drive one coordinator through its life with `size` members."""
    fleet = _Driver(size)
    began_bytes = _peak_bytes()
    marks = [time.process_time()]
    for act in (fleet.form, fleet.lose_one, fleet.replace):
        fleet.told_bytes.append(0)
        act()
        marks.append(time.process_time())
    fleet.plan()
    marks.append(time.process_time())
    form_s, change_s, admit_s, plan_s = (b - a for a, b in itertools.pairwise(marks))
    _, death_bytes, admission_bytes = fleet.told_bytes
    return Growth(
        members=size, form_s=form_s, change_s=change_s, admit_s=admit_s, plan_s=plan_s,
        peak_bytes=_peak_bytes() - began_bytes, install_bytes=fleet.install_bytes,
        death_bytes=death_bytes, admission_bytes=admission_bytes, death_whole_bytes=fleet.death_whole_bytes,
    )  # fmt: skip


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _Driver:
    """Carries out a coordinator's actions without sockets, and answers for its members."""

    def __init__(self, size: int) -> None:
        self.coordinator = Coordinator(Settings(num_replicas=size), epoch=1)
        self.members: list[str] = []
        self.view = ViewId(1, 0)
        self.held = View(id=self.view, members=())  # what each member holds
        self.told_bytes: list[int] = []  # to members, in each act
        self.death_whole_bytes = 0
        self.joiner, self.serve = "", (0, 0)
        self.install_bytes = 0
        self._encoder, self._now_s = msgspec.msgpack.Encoder(), 0.0

    def hear(self, events: Iterable[messages.Event]) -> None:
        for event in events:
            self._now_s += 1e-6
            for action in self.coordinator.handle(self._now_s, event):
                self._carry_out(action)

    def _carry_out(self, action: messages.Action) -> None:
        if not isinstance(action, messages.Tell):
            self._encoder.encode(action)
            return
        told: Any = action.message
        num_bytes = len(self._encoder.encode(told))
        self.told_bytes[-1] += num_bytes * sum(name != "a0" for name in action.to)
        if isinstance(told, messages.Spawn):
            self.joiner = told.member
            self.members.append(told.member)
        elif isinstance(told, messages.BeginServe):
            self.serve = told.serve
        elif isinstance(told, messages.Install):
            self.install_bytes = num_bytes
            self._enter(told.view)
        elif isinstance(told, messages.Amend):
            self._enter(apply(self.held, told.delta))
            self.death_whole_bytes = self.told_bytes[-1] + (self.install_bytes - num_bytes) * len(action.to)
        elif isinstance(told, messages.Take) and told.delta is not None:
            self._enter(apply(self.held, told.delta))

    def _enter(self, view: View) -> None:
        self.view, self.held, self.members = view.id, view, list(view.members)

    def form(self) -> None:
        self.hear([messages.AgentHello(agent="a0", pid=1)])
        started = list(self.members)
        self.hear(messages.Spawned(member=name, agent="a0", pid=1) for name in started)
        self.hear(self._hello(name) for name in started)
        self._formed(step=0)

    def _hello(self, name: str) -> messages.Hello:
        return messages.Hello(member=name, agent="a0", epoch=1, address=f"127.0.0.1:{name}", store=f"127.0.0.1:{name}")

    def _formed(self, step: int) -> None:
        view = self.view
        self.hear(messages.Formed(member=name, view=view, step=step) for name in tuple(self.members))

    def lose_one(self) -> None:
        victim = self.members[len(self.members) // 2]
        old, survivors = self.view, [name for name in self.members if name != victim]
        self.hear([messages.Exited(member=victim, cause="signal", noticed_at_s=self._now_s)])
        self.hear(messages.Left(member=name, view=old) for name in survivors)
        assert self.view > old, "the coordinator installed no successor"
        self._formed(step=10)

    def replace(self) -> None:
        old, joiner = self.view, self.joiner
        self.hear([self._hello(joiner)])
        self.hear([messages.Ready(member=joiner, step=20, serve=self.serve)])
        assert self.view > old, "the coordinator planned no view with the replacement"
        self._formed(step=21)

    def plan(self) -> None:
        """What each member computes from the roll: here once, with one microbatch a member."""
        size = len(self.members)
        roll = [
            RollEntry(member=name, view=self.view, committed=9, held=() if i == 0 else ((i, i + 1),),
                      keeps_output=False, fingerprint=1, outcome=1)
            for i, name in enumerate(self.members)
        ]  # fmt: skip
        orphans = resolve(roll, size).orphans
        assert sum(map(len, orphans.values())) == 1, "one microbatch was nobody's"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Crowd:
    """Real processes. `start_s`: from nothing to the last greeting; `form_s`: from there to everybody's first step;
    `changes`: one a kill; `pss_bytes`: memory of one process, what it shares counted by its share."""

    processes: int
    start_s: float
    pss_bytes: float
    form_s: float
    changes: list[Outcome]


def gather(args: argparse.Namespace) -> Crowd:
    """Start them, let them form a view, kill some one by one. Raises FleetStuck when they do not go on."""
    num = args.processes
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        launch = Launch(
            replicas=num, model="none", microbatches=num, seed=args.seed, python=Path(sys.executable),
            scratch=Path(scratch), settings={"max_restarts": "0"},
        )  # fmt: skip
        with SYSTEMS["outlast"].fleet(launch) as fleet, alone(args.lock):
            began_s = time.monotonic()
            fleet.wait_for("first view", lambda: sum(bool(m.commits) for m in fleet.living) == num, CROWD_S)
            firsts = [member.commits[0].at_s for member in fleet.living]
            form_s = max(firsts) - max(member.greeted_s for member in fleet.living)
            start_s = max(member.greeted_s for member in fleet.living) - began_s
            pss_bytes = statistics.mean(_pss_bytes(member.pid) for member in fleet.living)
            changes = [lose(fleet, num - 1 - index) for index in range(args.kills)]
    return Crowd(processes=num, start_s=start_s, form_s=form_s, changes=changes, pss_bytes=pss_bytes)


def _pss_bytes(pid: int) -> int:
    """Proportional set size, from /proc."""
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("Pss:"))


def lose(fleet: Fleet, left: int) -> Outcome:
    """Kill the newest member after a few calm steps."""
    goal = max(len(member.commits) for member in fleet.living) + CALM_STEPS
    fleet.wait_for("calm steps", lambda: all(len(m.commits) >= goal for m in fleet.living), CROWD_S)
    victim, *others = reversed(fleet.living)
    at_s = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)

    def gone_on() -> bool:
        return all(sum(commit.at_s > at_s for commit in member.commits) > CALM_STEPS for member in others)

    fleet.wait_for(f"a view of {left}", gone_on, CROWD_S)
    return dataclasses.replace(measure_survivors(others, at_s), system="outlast", fault="SIGKILL")


def tabulate_crowd(crowd: Crowd) -> Table:
    nets, steps = spread(o.net_s for o in crowd.changes), spread(o.median_step_s for o in crowd.changes)
    return Table(
        title=f"{crowd.processes} processes that compute next to nothing",
        columns=["start s", "form s", "change after a kill: net s", "median step ms", "MiB a process"],
        rows=[
            [
                f"{crowd.start_s:.1f}",
                f"{crowd.form_s:.3f}",
                nets.show(),
                steps.show(1e3, 1),
                f"{crowd.pss_bytes / 2**20:.0f}",
            ]
        ],
    )


def tabulate(found: Sequence[Growth], notes: Sequence[str]) -> Table:
    columns = ["members", "form s", "change for a death s", "admit the replacement s", "plan s (each member)",
               "peak MiB", "Install KiB", "bytes a member: death", "the view whole", "admission",
               "µs a member"]  # fmt: skip
    rows = [
        [
            f"{g.members:,}", f"{g.form_s:.3f}", f"{g.change_s:.3f}", f"{g.admit_s:.3f}", f"{g.plan_s:.3f}",
            f"{g.peak_bytes / 2**20:.1f}", f"{g.install_bytes / 1024:.0f}",
            f"{g.death_bytes / g.members:.0f}", f"{g.death_whole_bytes / g.members:,.0f}",
            f"{g.admission_bytes / g.members:.0f}", f"{g.total_s / g.members * 1e6:.0f}",
        ]
        for g in found
    ]  # fmt: skip
    return Table(title="The coordinator's machine", columns=columns, rows=rows, notes=notes)


if __name__ == "__main__":
    sys.exit(main())
