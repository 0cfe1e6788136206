"""A campaign: real fleets with injected faults, one after the other, and their bits beside an undisturbed fleet of one.

It drives the public `outlast run`. A trial whose faults were not met proves nothing and is counted as such.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec

from outlast.core import events as ev
from outlast.errors import ProveError
from outlast.prove._drive import Driven
from outlast.prove._generations import SAVED, wrong_generation
from outlast.prove._patience import HANG_S
from outlast.prove._trials import MICROBATCHES, STEPS, Gate, Trial, trial_of

__all__ = ["Campaign", "Result"]

_QUICK = {"restart_backoff_s": 0.0, "heartbeat_s": 0.2, "outside_s": 6.0, "formation_s": 3.0}
_HARMLESS = ("finished", "left")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """`identical`: every replica that reached the end has the undisturbed bits and losses, and so has every generation
    that was saved; `missed`: so they have, but the faults were not met; `different`; `failed`: the run did not reach
    its end, or something of it was left."""

    trial: Trial
    verdict: Literal["identical", "missed", "different", "failed"]
    detail: str
    ended: int  # processes that ended before their time
    recoveries: int
    seconds: float


class Campaign:
    """Folders of its runs are made under `base`. ProveError if an undisturbed run does not end."""

    def __init__(self, base: Path, seed: int) -> None:
        self.base, self.seed = base, seed
        self._wanted: dict[str, dict[str, Any]] = {}

    def run(self, numbers: Iterable[int], progress: Callable[[Result], None]) -> list[Result]:
        """Trials by number, in order."""
        results = []
        for number in numbers:
            results.append(self.attempt(trial_of(number, self.seed)))
            progress(results[-1])
        return results

    def attempt(self, trial: Trial) -> Result:
        """One trial."""
        wanted = self._undisturbed(trial.dtype)
        folder = self.base / f"trial-{trial.number}"
        began_s = time.monotonic()
        with _fleet(folder, trial) as (driven, gates):
            try:
                for gate in trial.gates:
                    driven.until(f"{gate.replica} {gate.what}", _reached(driven, gate), HANG_S, lambda: None)
                    gates.pop(gate.step).close()
                code = driven.finish(HANG_S, lambda: None)
                verdict, detail = _judge(trial, driven, code, folder, wanted)
            except ProveError as error:
                verdict, detail = "failed", error.message
        return Result(
            trial=trial,
            verdict=verdict,
            detail=detail,
            ended=_ended(driven),
            recoveries=len(driven.recoveries()),
            seconds=time.monotonic() - began_s,
        )

    def _undisturbed(self, dtype: str) -> dict[str, Any]:
        if dtype not in self._wanted:
            folder = self.base / f"undisturbed-{dtype}"
            alone = Trial(
                number=-1,
                phase="",
                action="",
                bucket=None,
                dtype=dtype,
                replicas=1,
                spares=0,
                agents=1,
                exchange="shm",
                faults=(),
                checkpoint_every=3,
            )
            with _fleet(folder, alone) as (driven, _):
                if driven.finish(HANG_S, lambda: None) != 0:
                    raise ProveError("the undisturbed run failed", remedy=f"logs under {driven.run_dir}")
            (self._wanted[dtype],) = _found(folder).values()
        return self._wanted[dtype]


@contextmanager
def _fleet(folder: Path, trial: Trial) -> Iterator[tuple[Driven, dict[int, TextIO]]]:
    """The trial's run, with its gates closed."""
    (folder / "gates").mkdir(parents=True)
    settings = _QUICK | {"max_restarts": trial.restarts, "exchange": trial.exchange}
    if trial.checkpoint_every:
        settings |= {"checkpoint_dir": str(folder / SAVED), "checkpoint_every": trial.checkpoint_every}
        settings |= {"checkpoint_keep": STEPS}
    config = folder / "run.toml"
    config.write_text("[run]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    options = ["--config", str(config), "--replicas", str(trial.replicas), "--spares", str(trial.spares)]
    options += ["--agents", str(trial.agents), "-m", "outlast.prove._training"]
    script = ["--steps", str(STEPS), "--microbatches", str(MICROBATCHES), "--dtype", trial.dtype]
    script += ["--audit", str(trial.audit)]
    gates: dict[int, TextIO] = {}
    for gate in trial.gates:
        gates[gate.step] = (folder / "gates" / str(gate.step)).open("w")
        fcntl.flock(gates[gate.step], fcntl.LOCK_EX)
    try:
        with Driven(folder / "run", options, [*script, "--folder", str(folder)], trial.faults) as driven:
            yield driven, gates
    finally:
        for file in gates.values():
            file.close()


def _reached(driven: Driven, gate: Gate) -> Callable[[], bool]:
    kinds: dict[str, type[ev.Event]] = {
        "served": ev.JoinerServed, "caught up": ev.JoinerCaughtUp, "exited": ev.ReplicaExited,
        "started": ev.ReplicaStarted,
    }  # fmt: skip
    kind = kinds[gate.what]
    return lambda: any(isinstance(e, kind) and getattr(e, "replica", "") == gate.replica for e in driven.events)


def _ended(driven: Driven) -> int:
    """Processes that ended, or were replaced, before their time."""
    exits = sum(isinstance(e, ev.ReplicaExited) and e.cause not in _HARMLESS for e in driven.events)
    return exits + sum(isinstance(e, ev.CoordinatorStarted) and e.takeover for e in driven.events)


def _found(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def _judge(
    trial: Trial, driven: Driven, code: int, folder: Path, wanted: dict[str, Any]
) -> tuple[Literal["identical", "missed", "different", "failed"], str]:
    found = _found(folder)
    if code != 0 or not found:
        ends = [e.detail for e in driven.events if isinstance(e, ev.RunFinished)]
        return "failed", f"the run ended with code {code}: {ends[-1] if ends else 'without a word'}"
    losses = dict(wanted["losses"])
    for name, result in sorted(found.items()):
        odd = [step for step, loss in result["losses"] if losses[step] != loss]
        if odd or result["fingerprint"] != wanted["fingerprint"]:
            return "different", f"{name} differs" + (f" from step {odd[0]} on" if odd else " at the end")
    if trial.checkpoint_every:
        wrong = wrong_generation(folder / SAVED, folder.parent / f"undisturbed-{trial.dtype}" / SAVED)
        if wrong:
            return "different", wrong
    if _ended(driven) < trial.loses:
        return "missed", f"{_ended(driven)} of {trial.loses} processes ended"
    undone = sum(isinstance(e, ev.CheckpointFailed) for e in driven.events)
    if undone < trial.fails:
        return "missed", f"{undone} of {trial.fails} saves came to nothing"
    return "identical", ", ".join(sorted(found))
