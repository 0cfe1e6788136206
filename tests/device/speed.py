"""What a step of two replicas takes on one device, beside two ranks of plain DDP over Gloo on the same one, in turn."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from held import HERE, QUIET, Held  # beside this file

SCRIPT = HERE / "paced.py"
SIZES = {"cuda": ("10.7M", 384, 16, 10, 8), "cpu": ("0.7M", 96, 1, 1, 2)}  # model, width, samples, block, rounds


class Ranks:
    """Two processes of plain DDP, which wait at gates as a fleet does."""

    def __init__(self, base: Path, words: list[str], gates: list[int]) -> None:
        base.mkdir()
        self._gates = {}
        (base / "gates").mkdir()
        for step in gates:
            self._gates[step] = (base / "gates" / str(step)).open("w")
            fcntl.flock(self._gates[step], fcntl.LOCK_EX)
        command = [sys.executable, str(SCRIPT), *words, "--gates", str(base / "gates"), "--out", str(base)]
        self._log = (base / "log").open("w+")
        how: dict[str, Any] = {"stdout": self._log, "stderr": self._log, "env": os.environ | QUIET}
        self._processes = [subprocess.Popen([*command, "--rank", str(rank)], **how) for rank in range(2)]

    def open_gate(self) -> None:
        """The next of them."""
        self._gates.pop(min(self._gates)).close()

    def failed(self) -> str:
        """What they said, if one has ended otherwise than well; "" if none."""
        if not any(process.poll() for process in self._processes):
            return ""
        self._log.seek(0)
        return self._log.read()[-2000:]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._log.close()


@dataclass
class System:
    """What is measured: its name in the result, what is waited for, and where its processes write their blocks."""

    title: str
    gates: Any  # a fleet, or ranks
    blocks: Path
    names: tuple[str, str]

    def over(self, number: int) -> bool:
        return all((self.blocks / f"{name}-{number}.json").exists() for name in self.names)

    def took_s(self, number: int) -> float:
        parts = [json.loads((self.blocks / f"{name}-{number}.json").read_text()) for name in self.names]
        return float(max(part["seconds"] for part in parts))


class Speed(Held):
    """Measures; nothing is asserted of what comes out."""

    def speed(self) -> str:
        return self._beside_ddp({"two replicas": ()})

    def copies(self) -> str:
        return self._beside_ddp(
            {"two replicas": (), "two replicas whose threads copy the outcome": ("--thread-copies",)}
        )

    def _beside_ddp(self, fleets: dict[str, tuple[str, ...]]) -> str:
        model, _, _, block, rounds = SIZES[self.device]
        steps = block * (rounds + 1) + 1
        gates = [block * number for number in range(1, rounds + 2)]  # the last, so that none ends before the others
        with self._started(fleets, gates, steps) as systems:
            times = self._turns(systems, rounds)
            for system in systems:
                system.gates.open_gate()
        for system in systems[:-1]:
            self.ended(system.gates, set(system.names))
        told = [
            f"of {system.title} {spread([1000 * row[n] / block for row in times])}" for n, system in enumerate(systems)
        ]
        ratios = [spread([row[n] / row[-1] for row in times]) for n in range(len(fleets))]
        return (
            f"{model} parameters, ms a step {', '.join(told)}; ratio {', '.join(ratios)}; "
            f"{rounds} rounds of {block} steps each"
        )

    @contextlib.contextmanager
    def _started(self, fleets: dict[str, tuple[str, ...]], gates: list[int], steps: int) -> Iterator[list[System]]:
        _, width, samples, block, _ = SIZES[self.device]
        systems: list[System] = []
        told = ["--block", str(block), "--width", str(width), "--samples", str(samples)]
        with contextlib.ExitStack() as failed:
            for title, options in fleets.items():
                words = (*told, "--blocks", str(self._blocks(len(systems))), *options)
                run = self.fleet(replicas=2, steps=steps, gates=gates, options=words, script=SCRIPT)
                failed.callback(run.driven.__exit__)
                systems.append(System(title, run, self._blocks(len(systems)), ("r0.1", "r1.1")))
            words = ("--device", self.device, *told, "--blocks", str(self._blocks(len(systems))), "--steps", str(steps))
            ranks = Ranks(self.base / f"ranks-{len(fleets)}", list(words), gates)
            systems.append(System("DDP over Gloo", ranks, self._blocks(len(systems)), ("d0", "d1")))
            try:
                yield systems
            finally:
                ranks.end()
            failed.pop_all()

    def _blocks(self, number: int) -> Path:
        path = self.base / f"blocks-{number}"
        path.mkdir(exist_ok=True)
        return path

    def _turns(self, systems: list[System], rounds: int) -> list[list[float]]:
        """Seconds of a block of each, round by round; each is the first in turn. The first block of each is nobody's:
        kernels are loaded in it, and pages locked."""
        run, ranks = systems[0].gates, systems[-1].gates

        def over(system: System, number: int) -> bool:
            assert not ranks.failed(), ranks.failed()
            return system.over(number)

        for system in systems:
            run.until("a first block", lambda system=system: over(system, 1))
        for number in range(2, rounds + 2):
            first = number % len(systems)
            for system in (*systems[first:], *systems[:first]):
                system.gates.open_gate()
                run.until("a block", lambda system=system, number=number: over(system, number))
        return [[system.took_s(number) for system in systems] for number in range(2, rounds + 2)]


def spread(values: list[float]) -> str:
    """The median, the least and the most."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"
