"""Training under attack, small: the rule holds where the mean collapses. At length: benchmarks/byzantine_digits."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


@functools.cache
def undisturbed():
    """(the task, the rule's training without an attack): the same for all attacks."""
    from benchmarks.byzantine_digits import dealt, train

    task = dealt(None, 0)
    return task, train(task, robust, "none", num_liars=4, num_steps=60, seed=0, clean=True)


def robust(stack):
    from outlast.tensors import make_rule

    return make_rule("trimmed_mean", num_rows=15, f=4, pre="nnm").aggregate(list(stack))


@pytest.mark.parametrize(
    "attack",
    ["ipm", "nan", *(pytest.param(a, marks=pytest.mark.campaign) for a in ("alie", "label_flip", "inconsistent"))],
)
def test_training_holds_under_attack(attack):
    from benchmarks.byzantine_digits import train

    task, clean = undisturbed()
    found = train(task, robust, attack, num_liars=4, num_steps=60, seed=0)
    assert clean > 80
    assert found > clean - 12
    if attack in ("ipm", "nan"):
        plain = train(task, lambda stack: stack.mean(dim=0), attack, num_liars=4, num_steps=60, seed=0)
        assert plain < 40
