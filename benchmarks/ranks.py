"""Replicas of two ranks: a healthy step beside plain HSDP's, and a rank's SIGKILL to the next committed step.

All fleets are up at once, four processes each, and run blocks of steps in turn; the order turns around every round, and
a ratio is taken within a round. Then outlast's fleet trains alone, and again and again one of its ranks is killed,
whichever, at a random moment. A strike's time is a clock's on the wall: to the first step that all survivors commit
after it, steps themselves included. The next strike comes when the replica is back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._common import ROOT, Bounds, Spread, Table, alone, environment, options, publish, spread
from outlast.prove import Driven

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["main"]

WORKER = ["-m", "benchmarks._ranks_worker"]
REPLICAS, RANKS = 2, 2
SYSTEMS = {
    "outlast": "outlast",
    "hsdp": "plain HSDP, gradients reduced over the ranks with each microbatch",
    "hsdp-once": "plain HSDP, reduced once a step",
}
MANY, LIMIT_S, STEP_LIMIT, RECOVERY_S = 1_000_000, 180.0, 1.05, 0.15
FREE_S = (0.3, 1.0)


@dataclasses.dataclass(kw_only=True)
class Side:
    """One fleet: how far it may go, and when its ranks committed what."""

    name: str
    folder: Path
    living: Callable[[], bool]
    allowed: int = 0
    step_s: list[float] = dataclasses.field(default_factory=list)

    def allow(self, steps: int) -> None:
        with (self.folder / "turn").open("r+b") as file:
            file.write(steps.to_bytes(8, "little"))
        self.allowed = steps

    def commits(self) -> dict[int, dict[int, float]]:
        """By process: when it committed which step."""
        found = {}
        for path in (self.folder / "out").iterdir():
            rows = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            found[int(path.name)] = {int(step): float(at_s) for step, at_s in rows}
        return found

    def wait(self, what: str, done: Callable[[], bool]) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not done():
            if time.monotonic() > end_s or not self.living():
                raise SystemExit(f"{self.name}: {what} did not happen in {LIMIT_S:g} s")
            time.sleep(0.005)

    def block(self, steps: int) -> float:
        """Seconds a step, of the slowest rank; the first step of the block only starts the clock."""
        last = self.allowed + steps
        self.allow(last + 1)
        self.wait("a block", lambda: self._ranks_at(last) >= REPLICAS * RANKS)
        times = [mine for mine in self.commits().values() if last in mine and last - steps in mine]
        if len(times) < REPLICAS * RANKS:
            raise SystemExit(f"{self.name}: a rank was lost before step {last}")
        return max(mine[last] - mine[last - steps] for mine in times) / steps

    def _ranks_at(self, step: int) -> int:
        return sum(step in mine for mine in self.commits().values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--block", type=int, default=15, help="steps a block")
    parser.add_argument("--strikes", type=int, default=10)
    parser.add_argument("--width", type=int, default=96, help="of the GPT")
    args = parser.parse_args(argv)
    machine, bounds, rng = environment(args), Bounds(), random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch, contextlib.ExitStack() as stack:
        sides = {name: stack.enter_context(begin(name, Path(scratch) / name, args)) for name in SYSTEMS}
        with alone(args.lock):
            in_turn(list(sides.values()), args)
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch, alone(args.lock):
        taken_s, steps_s = struck(Path(scratch) / "outlast", args, rng)
    mine, reference = sides["outlast"], sides["hsdp"]
    rows = [
        [what, spread(sides[name].step_s).show(1e3, 1), ratio(sides[name], reference).show(1.0, 3)]
        for name, what in SYSTEMS.items()
    ]
    healthy = Table(
        title=f"A healthy step, {REPLICAS} replicas of {RANKS} ranks", rows=rows,
        columns=["system", "ms a step", "over plain HSDP"],
        notes=["the GPT of the examples, 8 microbatches of 4, one thread a rank, Gloo, everything on this one machine"],
    )  # fmt: skip
    strikes = Table(
        title="A rank's SIGKILL to the next step that all survivors have committed", columns=["ms", "ms a step before"],
        rows=[[spread(taken_s).show(1e3, 0), f"{statistics.median(steps_s) * 1e3:.0f}"]] if taken_s else [],
    )  # fmt: skip
    bounds.check("median step over plain HSDP's", ratio(mine, reference).median, STEP_LIMIT, "times")
    if taken_s:
        net_s = statistics.median(taken_s) - statistics.median(steps_s)
        bounds.check("median from SIGKILL to the next step, less a step", net_s, RECOVERY_S)
    data = {name: side.step_s for name, side in sides.items()} | {"strikes_s": taken_s, "steps_s": steps_s}
    return publish("ranks", args, machine, [healthy, strikes], bounds, data)


def ratio(side: Side, reference: Side) -> Spread:
    """Round by round."""
    return spread(mine / other for mine, other in zip(side.step_s, reference.step_s, strict=True))


@contextlib.contextmanager
def begin(name: str, folder: Path, args: argparse.Namespace) -> Iterator[Side]:
    """A fleet of this system, of which every rank is ready to train."""
    with contextlib.ExitStack() as stack:
        side, _ = started(name, folder, args, stack)
        side.allow(3)
        side.wait("its first steps", lambda: side._ranks_at(2) >= REPLICAS * RANKS)
        yield side


def started(
    name: str, folder: Path, args: argparse.Namespace, stack: contextlib.ExitStack
) -> tuple[Side, Driven | None]:
    (folder / "out").mkdir(parents=True)
    (folder / "turn").write_bytes((0).to_bytes(8, "little"))
    given = ["--system", name, "--steps", str(MANY), "--seed", str(args.seed), "--width", str(args.width)]
    given += ["--turn", str(folder / "turn"), "--out", str(folder / "out")]
    if name == "outlast":
        config = folder / "run.toml"
        config.write_text("[run]\nrestart_backoff_s = 0.0\nmax_restarts = 1000\n", encoding="utf-8")
        how = ["--config", str(config), "--replicas", str(REPLICAS), "--ranks", str(RANKS)]
        driven = stack.enter_context(Driven(folder / "run", how, [*WORKER, *given], []))
        return Side(name=name, folder=folder, living=lambda: driven.process.poll() is None), driven
    ranks = [
        subprocess.Popen(
            [sys.executable, *WORKER, *given, "--store", str(folder / "store"), "--rank", str(rank),
             "--shape", str(REPLICAS), str(RANKS)], cwd=ROOT,
        )
        for rank in range(REPLICAS * RANKS)
    ]  # fmt: skip
    for rank in ranks:
        stack.callback(rank.wait)
        stack.callback(rank.kill)
    return Side(name=name, folder=folder, living=lambda: all(rank.poll() is None for rank in ranks)), None


def in_turn(sides: list[Side], args: argparse.Namespace) -> None:
    """Rounds of blocks; the first one warms up and is dropped."""
    for turn in range(args.rounds + 1):
        for side in sides if turn % 2 else sides[::-1]:
            step_s = side.block(args.block)
            if turn:
                side.step_s.append(step_s)
        if turn:
            print("; ".join(f"{s.name} {s.step_s[-1] * 1e3:.1f} ms" for s in sides), file=sys.stderr, flush=True)


def struck(folder: Path, args: argparse.Namespace, rng: random.Random) -> tuple[list[float], list[float]]:
    """Kill ranks of a fleet that trains freely: (seconds to the next step of all survivors, of a step before it)."""
    taken_s, steps_s = list[float](), list[float]()
    with contextlib.ExitStack() as stack:
        side, driven = started("outlast", folder, args, stack)
        assert driven is not None
        side.allow(MANY)
        for number in range(args.strikes):
            side.wait("two replicas", lambda: len(trained(side, driven)) == REPLICAS * RANKS)
            time.sleep(rng.uniform(*FREE_S))
            before = trained(side, driven)
            victim = rng.choice(sorted(before))
            at_s = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            next_s = first_after(side, at_s, doomed=before.keys() - {victim}, victim=victim)
            taken_s.append(next_s - at_s)
            gaps = [b - a for a, b in zip(before[victim][-6:], before[victim][-5:], strict=False)]
            steps_s.append(statistics.median(gaps))
            print(f"strike {number}: {taken_s[-1] * 1e3:.0f} ms", file=sys.stderr, flush=True)
    return taken_s, steps_s


def trained(side: Side, driven: Driven) -> dict[int, list[float]]:
    """When each rank of the present view committed, of those that have committed a few steps and live."""
    driven.poll()
    if len(driven.members) < REPLICAS:
        return {}
    found = {pid: sorted(mine.values()) for pid, mine in side.commits().items() if len(mine) > 8}
    return {pid: times for pid, times in found.items() if Path(f"/proc/{pid}").exists()}


def first_after(side: Side, at_s: float, *, doomed: set[int], victim: int) -> float:
    """The moment when all ranks of the surviving replica had committed a step after `at_s`. The victim's siblings may
    have committed one more before they ended: who commits nothing a while later is one of them."""
    reached: list[float] = []

    def enough() -> bool:
        reached.clear()
        later = {pid: sorted(t for t in mine.values() if t > at_s) for pid, mine in side.commits().items()}
        going = [times for pid, times in later.items() if pid in doomed and len(times) >= 3]
        reached.extend(times[0] for times in going)
        return len(going) >= (REPLICAS - 1) * RANKS

    side.wait(f"a step after process {victim} was killed", enough)
    return max(reached)


if __name__ == "__main__":
    sys.exit(main())
