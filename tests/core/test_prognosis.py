"""Alarms are worth what they were worth so far: learned parameters decide nearly as well as known ones."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from outlast.core.policy import ActionCosts, AlarmKind, Prognosis, choose_action
from outlast.errors import ConfigError

COSTS = ActionCosts(failure_s=300.0, save_s=20.0, move_s=30.0, idle_s=120.0, period_s=120.0)


@dataclass
class World:
    """A fleet whose alarms are true with probability `p`, `delay_s` before the failure."""

    p: float
    delay_s: float


def expected(world: World, costs: ActionCosts, unsaved: float, decide: Callable[[float, float], str]) -> float:
    """Seconds of work that an alarm is expected to cost if `decide(age, unsaved)` says what to do in each period: over
    all delays and both truths, without a die."""
    alive, false, total, age = world.p, 1 - world.p, 0.0, 0.0
    hit = 1 - math.exp(-costs.period_s / world.delay_s)
    while age < 32 * costs.period_s:
        action = decide(age, unsaved)
        if action == "move":
            return total + (alive + false) * costs.move_s + false * costs.idle_s
        if action == "save":
            total, unsaved = total + (alive + false) * costs.save_s, 0.0
        total += alive * hit * (costs.failure_s + costs.exposure * unsaved)
        alive, age, unsaved = alive * (1 - hit), age + costs.period_s, unsaved + costs.period_s
    return total


def spent(world: World, costs: ActionCosts, policy: str, num_alarms: int) -> list[float]:
    """By alarms in turn, each of which is learned from: a device that was moved away from is tested."""
    draw, found, known = random.Random(3), [], Prognosis()
    for number in range(num_alarms):
        now, device, unsaved = number * 1e6, f"d{number}", draw.uniform(0, 1800)
        known = known.alarm(device, "xid", now)

        def decide(
            age: float, unsaved: float, before: Prognosis = known, device: str = device, now: float = now
        ) -> str:
            if policy == "learned":
                if device not in before.open:
                    return "wait"
                kind = before.kind("xid")
                return choose_action(kind.p, kind.delay_s, age, unsaved, costs).action
            if policy == "known":
                return choose_action(world.p, world.delay_s, age, unsaved, costs).action
            return "move" if policy == "always" else "wait"

        found.append(expected(world, costs, unsaved, decide))
        true, delay = draw.random() < world.p, draw.expovariate(1 / world.delay_s)
        known = known.failed(device, now + delay) if true else known.closed(now + 9e5)
    return found


WORLDS = [World(0.9, 600.0), World(0.5, 1800.0), World(0.1, 900.0), World(0.02, 1800.0)]


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_what_is_learned_decides_within_five_percent_of_what_is_known(world: World) -> None:
    each = {policy: spent(world, COSTS, policy, 600) for policy in ("learned", "known", "always", "never")}
    cost = {policy: statistics.mean(found) for policy, found in each.items()}
    assert cost["known"] <= 1.01 * min(cost["always"], cost["never"]), cost
    assert cost["learned"] <= 1.1 * cost["known"], "what learning cost is in it"
    settled = {policy: statistics.mean(found[300:]) for policy, found in each.items()}
    assert settled["learned"] <= 1.05 * settled["known"], settled


def test_an_alarm_without_consequence_loses_its_weight() -> None:
    chances = [choose_action(0.5, 600.0, since, 600.0, COSTS).chance for since in (0.0, 600.0, 1800.0, 6000.0)]
    assert chances == sorted(chances, reverse=True)
    assert choose_action(0.5, 600.0, 6000.0, 300.0, COSTS).action == "wait"


def test_what_costs_least_is_done() -> None:
    assert choose_action(0.9, 600.0, 0.0, 3600.0, COSTS).action == "move"
    assert choose_action(0.9, 600.0, 0.0, 3600.0, COSTS, can_move=False).action == "save"
    assert choose_action(0.002, 600.0, 0.0, 3600.0, COSTS).action == "wait"
    masked = ActionCosts(failure_s=0.3, save_s=20.0, move_s=30.0, exposure=0.0)
    assert choose_action(0.9, 600.0, 0.0, 3600.0, masked).action == "wait", "a failure that costs nothing needs no care"


def test_kinds_are_learned_apart_and_false_ones_are_closed() -> None:
    known = Prognosis()
    for number in range(20):
        at_s = number * 1e6
        known = known.alarm("a", "fell off", at_s).failed("a", at_s + 100)
        known = known.alarm("b", "one flip", at_s)
    known = known.closed(1e9)
    assert known.kind("fell off").p > 0.9
    assert known.kind("fell off").delay_s < 300
    assert known.kind("one flip").p < 0.1
    assert known.kind("never seen") == AlarmKind()
    assert known.open == {}


def test_the_share_of_foretold_failures_is_measured_with_its_interval() -> None:
    known = Prognosis()
    assert known.share() == (0.0, 0.0, 1.0)
    for number in range(40):
        at_s = number * 1e6
        if number % 4 == 0:
            known = known.alarm("a", "xid", at_s)
        known = known.failed("a", at_s + 60)
    share, low, high = known.share()
    assert (known.failures, known.foretold, share) == (40, 10, 0.25)
    assert 0.13 < low < 0.25 < high < 0.41


def test_a_second_alarm_while_one_is_open_adds_nothing() -> None:
    known = Prognosis().alarm("a", "xid", 0.0)
    assert known.alarm("a", "ecc", 1.0) == known


@pytest.mark.parametrize("wrong", [{"failure_s": -1.0}, {"save_s": float("nan")}, {"exposure": 2.0}, {"period_s": 0.0}])
def test_costs_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        ActionCosts(**({"failure_s": 1.0, "save_s": 1.0, "move_s": 1.0} | wrong))
    with pytest.raises(ConfigError):
        AlarmKind(prior_true=2.0, prior_alarms=2.0)
    with pytest.raises(ConfigError):
        AlarmKind(prior_delay_s=0.0)
