"""What a step of two replicas takes on one device, beside two ranks of plain DDP over Gloo on the same one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from held import HERE, QUIET, Held  # beside this file

SCRIPT = HERE / "paced.py"
SIZES = {"cuda": ("10.7M", 384, 16, 10, 8), "cpu": ("0.7M", 96, 1, 1, 2)}  # model, width, samples, block, pairs


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


class Speed(Held):
    """Measures; nothing is asserted of what comes out."""

    def speed(self) -> str:
        model, width, samples, block, pairs = SIZES[self.device]
        gates = [block * number for number in range(1, pairs + 1)]
        blocks = self.base / "blocks"
        blocks.mkdir()
        told = ["--block", str(block), "--width", str(width), "--samples", str(samples)]
        words = [*told, "--blocks", str(blocks)]
        steps = block * (pairs + 1) + 1
        with self._both(words, gates, steps) as (run, ranks):
            times = self._turns(run, ranks, blocks, pairs)
        self.ended(run, {"r0.1", "r1.1"})
        ratios = [ours / theirs for ours, theirs in times]
        ours, theirs = (spread([1000.0 * pair[side] / block for pair in times]) for side in (0, 1))
        return (
            f"{model} parameters, a step of two replicas {ours} ms, of DDP over Gloo {theirs} ms; "
            f"ratio {spread(ratios)}, {pairs} pairs of {block} steps"
        )

    @contextlib.contextmanager
    def _both(self, words: list[str], gates: list[int], steps: int) -> Iterator[tuple[Any, Ranks]]:
        run = self.fleet(replicas=2, steps=steps, gates=gates, options=tuple(words), script=SCRIPT)
        ranks = Ranks(self.base / "ranks", ["--device", self.device, *words, "--steps", str(steps)], gates)
        try:
            yield run, ranks
        except BaseException:
            run.driven.__exit__()
            raise
        finally:
            ranks.end()

    def _turns(self, run: Any, ranks: Ranks, blocks: Path, pairs: int) -> list[tuple[float, float]]:
        """(seconds of a block of the fleet, of one of DDP) in turn, who is first in turn, too. The first block of each
        is nobody's: kernels are loaded in it."""
        names = {run: ("r0.1", "r1.1"), ranks: ("d0", "d1")}

        def over(system: Any, number: int) -> bool:
            assert not ranks.failed(), ranks.failed()
            return all((blocks / f"{name}-{number}.json").exists() for name in names[system])

        def took(system: Any, number: int) -> float:
            parts = [json.loads((blocks / f"{name}-{number}.json").read_text()) for name in names[system]]
            return float(max(part["seconds"] for part in parts))

        for system in names:
            run.until("a first block", lambda system=system: over(system, 1))
        for number in range(2, pairs + 2):
            for system in (run, ranks) if number % 2 else (ranks, run):
                system.open_gate()
                run.until("a block", lambda system=system, number=number: over(system, number))
        return [(took(run, number), took(ranks, number)) for number in range(2, pairs + 2)]


def spread(values: list[float]) -> str:
    """The median, the least and the most."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"
