"""Digits with lying replicas, as real processes: the fixed choice keeps its accuracy, the mean does not.

The whole campaign (fifteen replicas, every attack, five seeds) is `benchmarks/byzantine_fleet.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from benchmarks.byzantine_fleet import CHOICE, COLLAPSED_POINTS, KEPT_POINTS, train

pytestmark = [pytest.mark.process, pytest.mark.campaign]

SHAPE = {"rows": 5, "liars": 1, "seeds": 3, "steps": 60}


@functools.cache
def clean(robust: bool) -> list[float]:
    return train("none", CHOICE if robust else {}, **SHAPE)


def worst_loss(attack: str, rule: dict[str, Any]) -> float:
    """Points that the worst seed loses."""
    found = train(attack, rule, **SHAPE)
    return max(c - a for c, a in zip(clean(bool(rule)), found, strict=True))


@pytest.mark.parametrize("attack", ["ipm", "alie", "nan", "label_flip"])
def test_the_choice_keeps_its_accuracy(attack: str) -> None:
    assert worst_loss(attack, CHOICE) <= KEPT_POINTS


@pytest.mark.parametrize("attack", ["ipm", "nan"])
def test_the_mean_does_not(attack: str) -> None:
    assert worst_loss(attack, {}) >= COLLAPSED_POINTS
