"""Runs on one device, held against one process alone on it."""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "training.py"
QUIET = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # without it cuBLAS may add in another order each time


@functools.cache
def fleets() -> Any:
    """The tests' own fleets."""
    spec = importlib.util.spec_from_file_location("outlast_fleets", HERE.parent / "runtime" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Held:
    """Starts runs on one kind of device, and holds who reaches their end against one process."""

    def __init__(self, device: str, base: Path) -> None:
        self.device, self.base, self._known = device, base, dict[tuple[Any, ...], dict[str, Any]]()

    def fleet(self, *faults: Any, steps: int, options: tuple[str, ...] = (), script: Path = SCRIPT, **how: Any) -> Any:
        place = self.base / str(time.monotonic_ns())
        place.mkdir()
        words = [script, "--device", self.device, *options]
        return fleets().Fleet(place, faults, steps=steps, script=words, environ=QUIET, **({"max_restarts": 0} | how))

    def ended(self, run: Any, survivors: set[str], code: int = 0) -> dict[str, dict[str, Any]]:
        """What they found, all of them at the end."""
        try:
            assert run.finish() == code, run.logs()
        finally:
            run.driven.__exit__()
        results: dict[str, dict[str, Any]] = run.results()
        assert set(results) == survivors, f"{sorted(results)} reached the end\n{run.logs()}"
        return results

    def alone(self, steps: int, *options: str) -> dict[str, Any]:
        """What one process finds."""
        if (steps, options) not in self._known:
            how = {"tolerated": 0} if "--rule" in options else {}  # all rows are its own
            run = self.fleet(replicas=1, steps=steps, options=options, **how)
            self._known[steps, options] = self.ended(run, {"r0.1"})["r0.1"]
        return self._known[steps, options]

    def same(self, run: Any, survivors: set[str], steps: int, *options: str) -> None:
        want = self.alone(steps, *options)
        for name, found in self.ended(run, survivors).items():
            assert found["fingerprint"] == want["fingerprint"], f"{name} has other bits\n{run.logs()}"
            assert found["losses"].items() <= want["losses"].items(), f"{name} has other losses\n{run.logs()}"
            assert found["scale"] == want["scale"], f"{name} has another scale\n{run.logs()}"

    def held_at_gates(self, run: Any, *gates: tuple[int, str, Callable[[], bool]]) -> None:
        """Open each gate when what it waits for has come."""
        try:
            run.until("all train", lambda: len(run.driven.members) == 2)
            for step, what, test in gates:
                run.gate(step, what, test)
        except BaseException:
            run.driven.__exit__()
            raise

    def replaced(self, *options: str) -> None:
        """One of two replicas is killed, another process has its place, and both have the bits of one process."""
        run = self.fleet(replicas=2, steps=26, gates=(2, 3, 4, 12, 22), max_restarts=4, options=options)

        def struck() -> bool:
            """When both have made two steps: a compiler has done by then."""
            if there := all((run.base / "gates" / f"2.{run.pid(name)}").exists() for name in ("r0.1", "r1.1")):
                run.strike(run.pid("r1.1"))
            return there

        self.held_at_gates(
            run,
            (2, "it is struck", struck),
            (3, "it was gone", lambda: run.exited("r1.1")),
            (4, "its successor was served", lambda: run.served("r1.2")),
            (12, "it had caught up", lambda: run.caught_up("r1.2")),
            (22, "it trained", lambda: len(run.driven.members) == 2),
        )
        self.same(run, {"r0.1", "r1.2"}, 26, *options)
