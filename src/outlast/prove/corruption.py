"""Flip single bits in real fleets and see what notices: gradients, parameters, moments, sums, reductions; by bit.

Each fleet of five trains an example with three flips ordered, each in another replica and at another step, so that a
majority is left after each. What the run's journal says of each flip is the result; the final state is compared, bit
for bit, with that of a run that nothing happened to. Replicas are not restarted: a flip is judged once. With audits,
persistent means a broken device, wrong in everything from its step on; without, one gradient of every later step. A
parameter or moment has a stuck bit then.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from outlast.core import events as ev
from outlast.errors import ProveError
from outlast.prove._drive import Driven
from outlast.prove._patience import HANG_S
from outlast.runtime.faults.flips import Flip

__all__ = ["Corruptions", "Injection", "FlipTally"]

_REPLICAS, _FLIPS, _FIRST, _APART = 5, 3, 24, 12  # a fleet's; the first flip's step, after the bands' warm-up
_BITS = {"float32": 32, "bfloat16": 16}
_TARGETS = ("parameter", "moment", "gradient")
_AUDITED = ("gradient", "reducer", "sum", "parameter", "moment")
_SUMMED = ("reducer", "sum")  # in float32, whatever the parameters are


class Injection(msgspec.Struct, frozen=True, kw_only=True):
    """One flip and what came of it. `after_steps`: from the flip to the verdict; `right`: the replica was named."""

    target: str
    dtype: str
    bit: int
    persistent: bool
    parameter: str
    replica: str
    step: int
    detected: bool
    action: str
    after_steps: int
    right: bool
    evidence: str
    run: int


class FlipTally(msgspec.Struct, frozen=True, kw_only=True):
    """The campaign. `clean_steps`: judged without a flip in them; `false_alarm_bound`: 3/n, the rate that so many steps
    exclude at 95 % if there was no alarm. `equal_runs`: ended with the bits of the undisturbed run."""

    injections: list[Injection]
    recall: dict[str, dict[str, int]]  # target -> found, of
    recall_by_bit: dict[str, dict[str, int]]
    after_steps: dict[str, float]  # target -> mean
    latest: dict[str, int]  # target -> most steps; 0: every one was caught before the step was committed
    wrong_culprits: int
    clean_steps: int
    false_alarms: int
    false_alarm_bound: float
    runs: int
    equal_runs: int
    unequal_without_a_miss: int
    guards: str
    audit: float


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal says that somebody noticed: a guard's verdict, or an audit's finding."""

    step: int
    action: str
    replica: str
    evidence: str

    @classmethod
    def of(cls, event: ev.AnyEvent) -> Seen | None:
        if isinstance(event, ev.VerdictReached):
            return cls(step=event.step, action=event.action, replica=event.replica, evidence=event.evidence)
        if isinstance(event, ev.AuditMismatch):
            return cls(step=event.step, action=event.verdict, replica=event.culprit, evidence=event.evidence)
        return None


class Corruptions:
    """`watch(done, of)` is called after each run. ProveError for a run that does not end well."""

    def __init__(
        self,
        base: Path,
        num_flips: int,
        seed: int,
        guards: str,
        dtypes: Sequence[str],
        audit: float,
        watch: Callable[[int, int], None],
    ) -> None:
        import outlast.examples

        self.base, self.guards, self.audit, self._watch = base, guards, audit, watch
        self.first = _FIRST if guards == "full" else 4
        self.steps = self.first + _FLIPS * _APART
        self.script = Path(str(outlast.examples.__file__)).with_name("gpt.py")
        self.plan = planned(num_flips, seed, dtypes, _names(), audited=audit > 0.0, first_step=self.first)

    def run(self) -> FlipTally:
        """Every flip, some to a fleet; and per dtype one fleet without any."""
        references = {dtype: self._train(f"clean-{dtype}", dtype, ()) for dtype in dict(self.plan)}
        alarms = sum(len(verdicts) for verdicts, _ in references.values())
        steps, found, equal, unexplained = len(references) * self.steps, list[Injection](), 0, 0
        for number, (dtype, flips) in enumerate(self.plan):
            verdicts, fingerprint = self._train(f"run-{number}", dtype, flips)
            judged, stray = match(flips, verdicts, dtype, number)
            found += judged
            alarms += stray
            steps += self.steps - len(flips)
            same = fingerprint == references[dtype][1]
            equal += same
            unexplained += not same and all(each.detected for each in judged)
            self._watch(number + 1, len(self.plan))
        return tally(found, self.guards, self.audit, steps, alarms, len(self.plan), equal, unexplained)

    def _train(self, name: str, dtype: str, flips: Sequence[Flip]) -> tuple[list[Seen], str]:
        out = self.base / f"{name}.json"
        options = ["--replicas", str(_REPLICAS), "--guards", self.guards, "--config", str(self._config())]
        words = [str(self.script), "--steps", str(self.steps), "--dtype", dtype, "--out", str(out)]
        with Driven(self.base / name, options, words, flips=flips) as driven:
            code = driven.finish(HANG_S, lambda: None)
            if code != 0 or not out.exists():
                raise ProveError(f"{name} ended with code {code}", remedy=f"outlast why {self.base / name}")
            noticed = [notice for notice in map(Seen.of, driven.events) if notice is not None]
        return noticed, str(json.loads(out.read_text())["fingerprint"])

    def _config(self) -> Path:
        path = self.base / "run.toml"
        path.write_text(f"[run]\nmax_restarts = 0\nheartbeat_s = 0.2\naudit = {self.audit}\n")
        return path


def planned(
    num_flips: int,
    seed: int,
    dtypes: Sequence[str],
    names: Sequence[str],
    audited: bool = False,
    first_step: int = _FIRST,
) -> list[tuple[str, list[Flip]]]:
    """(dtype, the flips of a fleet), some fleets: targets in turn, bits spread evenly over the word, places drawn."""
    draw, targets = random.Random(seed), _AUDITED if audited else _TARGETS
    runs: list[tuple[str, list[Flip]]] = []
    for first in range(0, num_flips, _FLIPS):
        dtype, flips = dtypes[len(runs) % len(dtypes)], list[Flip]()
        for number in range(first, min(first + _FLIPS, num_flips)):
            target: Any = targets[number % len(targets)]
            bits = 32 if target in _SUMMED else _BITS[dtype]
            again = number % 2 == 1
            flips.append(
                Flip(
                    replica=f"r{number - first + 1}.1",
                    target=target,
                    step=first_step + (number - first) * _APART,
                    bit=(bits - 1 - (number // len(targets)) * 5 - len(runs) // bits) % bits,
                    parameter=-1 if target in _SUMMED else draw.choice(names),
                    element=draw.randrange(1 << 20),
                    persistent=again,
                    times=0 if again and audited else 1,
                )
            )
        runs.append((dtype, flips))
    return runs


def match(flips: Sequence[Flip], notices: Sequence[Seen], dtype: str, run: int) -> tuple[list[Injection], int]:
    """What became of each flip, and how many notices belong to none. A notice belongs to the flip of the replica that
    it names, else to the newest flip at or before its step."""
    mine: dict[int, Seen] = {}
    stray = 0
    for verdict in notices:
        before = [i for i, flip in enumerate(flips) if flip.step <= verdict.step]
        named = [i for i in before if flips[i].replica == verdict.replica]
        if not before:
            stray += 1
        elif named:
            mine[named[-1]] = mine.get(named[-1], verdict)
        elif flips[before[-1]].step + 1 >= verdict.step or flips[before[-1]].persistent:
            mine[before[-1]] = mine.get(before[-1], verdict)
        else:
            stray += 1
    rows = []
    for number, flip in enumerate(flips):
        verdict_ = mine.get(number)
        rows.append(
            Injection(
                target=flip.target,
                dtype=dtype,
                bit=flip.bit,
                persistent=flip.persistent,
                parameter=str(flip.parameter),
                replica=flip.replica,
                step=flip.step,
                detected=verdict_ is not None,
                run=run,
                action=verdict_.action if verdict_ else "",
                after_steps=verdict_.step - flip.step if verdict_ else -1,
                right=verdict_ is not None and verdict_.replica == flip.replica,
                evidence=verdict_.evidence if verdict_ else "",
            )
        )
    return rows, stray


def tally(
    found: Sequence[Injection],
    guards: str,
    audit: float,
    steps: int,
    alarms: int,
    runs: int,
    equal: int,
    unexplained: int,
) -> FlipTally:
    """The figures of a campaign."""
    recall: dict[str, dict[str, int]] = defaultdict(lambda: {"found": 0, "of": 0})
    by_bit: dict[str, dict[str, int]] = defaultdict(lambda: {"found": 0, "of": 0})
    waits: dict[str, list[int]] = defaultdict(list)
    for each in found:
        for row in (recall[each.target], by_bit[f"{each.target} {each.dtype} bit {each.bit}"]):
            row["found"] += each.detected
            row["of"] += 1
        if each.detected:
            waits[each.target].append(each.after_steps)
    return FlipTally(
        injections=list(found),
        recall=dict(recall),
        recall_by_bit=dict(sorted(by_bit.items())),
        after_steps={target: sum(values) / len(values) for target, values in waits.items()},
        latest={target: max(values) for target, values in waits.items()},
        audit=audit,
        wrong_culprits=sum(each.detected and not each.right for each in found),
        clean_steps=steps,
        false_alarms=alarms,
        false_alarm_bound=3.0 / steps,
        runs=runs,
        equal_runs=equal,
        unequal_without_a_miss=unexplained,
        guards=guards,
    )


def _names() -> list[str]:
    """The example's parameters."""
    from outlast.examples.models import GPT

    return [name for name, _ in GPT().named_parameters()]
