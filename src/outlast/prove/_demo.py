"""The demonstration: train, kill things, train undisturbed, compare the bits.

Drives the public `outlast run` twice on the same script. Two faults strike at exact phases (fault points), two from
outside when the journal says that the moment has come.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from outlast.core import events as ev
from outlast.errors import ProveError
from outlast.prove._drive import Driven
from outlast.prove._patience import HANG_S
from outlast.runtime.settings.fault_points import Fault

__all__ = ["Demo", "DemoVerdict"]


class DemoVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the demonstration found. `useful_time`: the disturbed run's share of time spent on steps that count."""

    identical: bool
    fingerprint: str
    reference: str
    steps: int
    lost_steps: int
    useful_time: float
    recoveries: list[dict[str, Any]]
    run_dir: str
    reference_dir: str
    losses_equal: bool


class Demo:
    """`watch(title, driven)` is called several times a second. ProveError if a run does not survive."""

    def __init__(self, base: Path, steps: int, seed: int, watch: Callable[[str, Driven], None]) -> None:
        import outlast.examples

        self.base, self.steps, self.seed, self._watch = base, steps, seed, watch
        self.script = Path(str(outlast.examples.__file__)).with_name("gpt.py")

    def run(self) -> DemoVerdict:
        """Both runs and the comparison."""
        disturbed = self._disturbed()
        undisturbed = self._undisturbed()
        mine, other = self._result("disturbed"), self._result("reference")
        return DemoVerdict(
            identical=mine["fingerprint"] == other["fingerprint"],
            fingerprint=mine["fingerprint"],
            reference=other["fingerprint"],
            steps=self.steps,
            useful_time=_useful(disturbed),
            lost_steps=max((r.lost_steps for r in disturbed.recoveries()), default=0),
            recoveries=[msgspec.to_builtins(r) for r in disturbed.recoveries()],
            run_dir=str(disturbed.run_dir),
            reference_dir=str(undisturbed.run_dir),
            losses_equal=_losses(disturbed) == _losses(undisturbed),
        )

    def _command(self, name: str) -> list[str]:
        out = self.base / f"{name}.json"
        return [str(self.script), "--steps", str(self.steps), "--seed", str(self.seed), "--out", str(out)]

    def _result(self, name: str) -> dict[str, Any]:
        path = self.base / f"{name}.json"
        if not path.exists():
            raise ProveError(f"the {name} run left no result", remedy=f"logs under {self.base / name}")
        result: dict[str, Any] = json.loads(path.read_text())
        return result

    def _disturbed(self) -> Driven:
        kill, stop, coordinator, late = (self.steps * part // 8 for part in (1, 4, 5, 6))
        faults = [
            Fault(replica="r1.1", phase="reduce", step=kill, action="SIGKILL"),
            Fault(replica="r2.1", phase="backward", step=stop, action="SIGSTOP"),
        ]
        options = ["--replicas", "4", "--spares", "1"]
        with Driven(self.base / "disturbed", options, self._command("disturbed"), faults) as driven:

            def watch() -> None:
                self._watch("disturbed", driven)

            def reached(step: int) -> Callable[[], bool]:
                return lambda: driven.step >= step

            def spare_to_lose() -> bool:  # one that has caught up, while there is time to wait for that
                return driven.step > kill and bool(driven.spares(ready=driven.step < late))

            driven.until("the coordinator's moment", reached(coordinator), HANG_S, watch)
            os.kill(driven.coordinator_pid, signal.SIGKILL)
            driven.until("there was a spare to lose", spare_to_lose, HANG_S, watch)
            os.kill(next(iter(driven.spares(ready=driven.step < late).values())), signal.SIGKILL)
            self._end(driven, watch)
        return driven

    def _undisturbed(self) -> Driven:
        with Driven(self.base / "reference", ["--replicas", "2"], self._command("reference")) as driven:
            self._end(driven, lambda: self._watch("reference", driven))
        return driven

    def _end(self, driven: Driven, watch: Callable[[], None]) -> None:
        code = driven.finish(HANG_S, watch)
        if code != 0:
            _, err = driven.process.communicate()
            raise ProveError(f"the run ended with code {code}: {err.strip()[-1500:]}", remedy="see its logs")


def _losses(driven: Driven) -> dict[int, float]:
    return {step: loss for e in driven.events if isinstance(e, ev.ProgressMade) for step, loss in e.losses}


def _useful(driven: Driven) -> float:
    from outlast.observe import accounting

    account = accounting(driven.events)
    began = account.idle_s  # starting is not a fault's cost
    return account.productive_s / max(account.wall_s - began, 1e-9)
