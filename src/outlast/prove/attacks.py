"""Replicas that lie, in real fleets: what each attack costs under a robust rule, and what it does to the mean.

One fleet of four, in which one replica owns a quarter of the rows and lies about all of them, holds every attack: each
has a network under the rule and one under the mean (`_attacked.py`). Two more fleets put a lying reducer to the test:
with every slice computed again the liar must be named and put out, and the bits be those of an honest run. An attack
knows what the literature's adversary knows: the honest rows (`outlast.tensors.ATTACKS`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from outlast.core import events as ev
from outlast.core.policy import check_choice
from outlast.core.protocol import plan_of
from outlast.errors import ProveError
from outlast.prove._drive import Driven
from outlast.prove._patience import HANG_S
from outlast.runtime.faults.liars import Lie

__all__ = ["ATTACKS", "Attacked", "Attacks", "Report", "Unmasked"]

ATTACKS = (
    "sign_flip", "scaling", "alie", "ipm", "mimic", "label_flip", "random_bits", "stale", "inconsistent", "nan",
    "colluding_groups", "lying_reducer",
)  # fmt: skip
_OPTIMISED = ("alie", "ipm")  # with the factor of each step that carries the rule furthest
_REPLICAS, _ROWS_EACH, _LIAR = 4, 3, "r3"
_CHECKED_STEPS = 8


class Attacked(msgspec.Struct, frozen=True, kw_only=True):
    """Per cent right on digits held back, after training under the attack; `lost`: against the rule when none lies."""

    attack: str
    rule: float
    mean: float
    lost: float


class Unmasked(msgspec.Struct, frozen=True, kw_only=True):
    """A reducer that lied from `step` on. `named`: who was put out for it, and in which step; `equal`: the bits are
    those of an honest run."""

    liar: str
    step: int
    named: list[tuple[str, int]]
    equal: bool

    @property
    def right(self) -> bool:
        return self.equal and self.named == [(self.liar, self.step)]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`clean`, `clean_mean`: accuracy when nobody lies. `reducer` is None if that was not asked for."""

    rule: str
    pre: list[str]
    f: int
    rows: int
    steps: int
    clean: float
    clean_mean: float
    attacks: list[Attacked]
    reducer: Unmasked | None


class Attacks:
    """`watch(what)` is called before each fleet. ConfigError for a rule that does not allow f among the rows,
    ProveError for a run that does not end well."""

    def __init__(
        self,
        base: Path,
        attacks: Sequence[str],
        rule: str,
        pre: Sequence[str],
        steps: int,
        watch: Callable[[str], None],
    ) -> None:
        self.rows, self.f = _REPLICAS * _ROWS_EACH, _ROWS_EACH
        check_choice(rule, self.rows, self.f, pre)
        self.base, self.attacks, self.rule, self.pre, self.steps = base, list(attacks), rule, list(pre), steps
        self._watch = watch
        dealt = plan_of([f"r{i}" for i in range(_REPLICAS)], 0, self.rows, self.rows).leaves
        self._lying = list(dealt[_LIAR])
        if len(self._lying) != self.f:
            raise ProveError(f"{_LIAR} owns {len(self._lying)} rows, not {self.f}", remedy="this is a fault of outlast")

    def run(self) -> Report:
        """All attacks."""
        told = [attack for attack in self.attacks if attack != "lying_reducer"]
        self._watch(f"{len(told)} attacks, each on {self.rule} and on the mean")
        right = self._train("rows", self._cases(told), self._lies(told), self.steps)[0]["accuracy"]
        found = [
            Attacked(
                attack=attack,
                rule=right[f"rule_{attack}"],
                mean=right[f"mean_{attack}"],
                lost=right["rule_none"] - right[f"rule_{attack}"],
            )
            for attack in told
        ]
        reducer = self._reducer() if "lying_reducer" in self.attacks else None
        return Report(
            rule=self.rule,
            pre=self.pre,
            f=self.f,
            rows=self.rows,
            steps=self.steps,
            clean=right["rule_none"],
            clean_mean=right["mean_none"],
            attacks=found,
            reducer=reducer,
        )

    def _cases(self, attacks: Sequence[str]) -> dict[str, Any]:
        robust = {"rule": self.rule, "f": self.f, "pre": self.pre}
        return {
            f"{kind}_{attack}": {"aggregation": rule, "flipped": self._lying if attack == "label_flip" else []}
            for attack in ("none", *attacks)
            for kind, rule in (("rule", robust), ("mean", {"rule": "mean"}))
        }

    def _lies(self, attacks: Sequence[str]) -> list[Lie]:
        return [
            Lie(replicas=(_LIAR,), attack=attack, optimise=attack in _OPTIMISED, pattern=f"nets.{kind}_{attack}")
            for attack in attacks
            if attack != "label_flip"
            for kind in ("rule", "mean")
        ]

    def _reducer(self) -> Unmasked:
        self._watch("a reducer that lies, and none")
        first, cases = 2, self._cases(())
        lie = Lie(replicas=(f"{_LIAR}.1",), attack="lying_reducer", first_step=first)
        honest, _ = self._train("honest", cases, (), _CHECKED_STEPS, check=1.0)
        found, events = self._train("reducer", cases, [lie], _CHECKED_STEPS, check=1.0)
        named = [(e.replica, e.step) for e in events if isinstance(e, ev.ReducerAccused) and e.decision == "evict"]
        equal = found["fingerprint"] == honest["fingerprint"]
        return Unmasked(liar=f"{_LIAR}.1", step=first, named=named, equal=equal)

    def _train(
        self, name: str, cases: dict[str, Any], lies: Sequence[Lie], steps: int, check: float = 0.0
    ) -> tuple[dict[str, Any], list[ev.AnyEvent]]:
        out, listed, config = (self.base / f"{name}.{kind}" for kind in ("json", "cases.json", "toml"))
        listed.write_text(json.dumps(cases))
        config.write_text("[run]\nmax_restarts = 0\ntolerated = 0\n")
        words = [str(Path(__file__).with_name("_attacked.py")), "--cases", str(listed), "--rows", str(self.rows)]
        words += ["--steps", str(steps), "--check-reducers", str(check), "--out", str(out)]
        options = ["--replicas", str(_REPLICAS), "--config", str(config)]
        with Driven(self.base / name, options, words, lies=lies) as driven:
            code = driven.finish(HANG_S, lambda: None)
            if code != 0 or not out.exists():
                raise ProveError(f"{name} ended with code {code}", remedy=f"outlast why {self.base / name}")
            return json.loads(out.read_text()), driven.events
