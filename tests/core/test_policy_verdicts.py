"""Verdicts: a function of settings, memory and evidence; what is remembered; who offends again."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.core.policy import (
    PRESETS,
    Culprit,
    GuardEvidence,
    Guards,
    GuardState,
    Verdict,
    agree,
    decide,
    escalate,
    escalate_fleeting,
    fresh_state,
    remember,
)
from outlast.errors import ConfigError


def seen(step: int = 50, loss: float = 1.0, norm: float | None = 1.0, **more: Any) -> GuardEvidence:
    return GuardEvidence(**{"step": step, "num_members": 3, "loss": loss, "norm": norm} | more)


def played(
    guards: Guards, evidence: list[GuardEvidence], state: GuardState | None = None
) -> tuple[list[str], GuardState]:
    state = fresh_state(guards) if state is None else state
    actions = []
    for each in evidence:
        verdict = decide(guards, state, each)
        state = remember(guards, state, each, verdict)
        actions.append(verdict.action)
    return actions, state


def calm(guards: Guards, num: int = 40) -> GuardState:
    return played(guards, [seen(step, 1.0 + 0.01 * (step % 5), 2.0 + 0.01 * (step % 3)) for step in range(num)])[1]


@pytest.mark.parametrize(
    ("evidence", "action", "confidence"),
    [
        (seen(), "apply", "certain"),
        (seen(norm=math.nan), "skip_step", "possible"),
        (seen(norm=math.inf, culprits=(Culprit(microbatch=1, reproduced=True),)), "skip_step", "certain"),
        (seen(loss=math.nan, bad_microbatches=(2,)), "skip_step", "likely"),
        (seen(loss=math.nan, culprits=(Culprit(microbatch=2, samples=(7,), sure=True, reproduced=True),)),
         "skip_batch", "certain"),
        (seen(norm=math.nan, culprits=(Culprit(replica="r1.1", microbatch=2),)), "replace", "likely"),
        (seen(norm=math.nan, num_members=1, culprits=(Culprit(replica="r0.1", microbatch=2),)), "skip_step", "likely"),
        (seen(differing=("r1.1",)), "replace", "certain"),
        (seen(differing=("r1.2",), joined=("r1.2",)), "replace", "possible"),
        (seen(differing=("r0.1",), joined=("r1.2",)), "replace", "certain"),
        (seen(differing=("r0.1", "r1.1"), majority=False), "stop", "possible"),
        (seen(differing=("r0.1", "r1.1"), majority=False, certified=40), "rewind", "possible"),
        (seen(loss=1e9), "apply", "certain"),
        (seen(collapsed=(("relu", "dead"),)), "apply", "certain"),
    ],
)  # fmt: skip
def test_each_finding_has_its_verdict(evidence: GuardEvidence, action: str, confidence: str) -> None:
    guards = Guards()
    verdict = decide(guards, calm(guards), evidence)
    assert (verdict.action, verdict.confidence) == (action, confidence)
    assert bool(verdict.evidence) == bool(verdict.remedy)
    if action != "apply":
        assert verdict.evidence


def test_a_difference_comes_first_because_nothing_else_can_be_trusted_then() -> None:
    verdict = decide(Guards(), calm(Guards()), seen(loss=math.nan, bad_microbatches=(1,), differing=("r2.1",)))
    assert (verdict.action, verdict.culprit.replica) == ("replace", "r2.1")


def test_many_bad_steps_in_a_row_go_back_or_stop() -> None:
    bad = [seen(step, math.nan, math.nan) for step in range(40, 45)]
    actions, state = played(Guards(patience=5), bad)
    assert actions == ["skip_step"] * 4 + ["stop"]
    assert state.skipped == (40, 41, 42, 43, 44)
    guards = Guards(patience=3, certify_every=10)
    actions, state = played(guards, [msgspec.structs.replace(e, certified=30) for e in bad[:3]])
    assert actions == ["skip_step", "skip_step", "rewind"]
    assert (state.passed, state.num_bad, state.num_rewinds) == (((30, 43),), 0, 1)
    spent = msgspec.structs.replace(state, num_rewinds=guards.max_rewinds, num_bad=9)
    assert decide(guards, spent, seen(norm=math.nan, certified=30)).action == "stop"


@pytest.mark.parametrize(
    ("response", "actions"),
    [
        ("off", ["apply", "apply", "apply", "apply"]),
        ("skip", ["skip_step", "skip_step", "lower_rate", "lower_rate"]),
        ("lower_rate", ["lower_rate", "lower_rate", "lower_rate", "lower_rate"]),
        ("stop", ["stop", "stop", "stop", "stop"]),
    ],
)
def test_a_spike_is_answered_as_wished_and_a_lasting_one_more_firmly(response: Any, actions: list[str]) -> None:
    guards = Guards(loss_spike=response, patience=3)
    found, state = played(guards, [seen(60 + i, 50.0) for i in range(4)], calm(guards))
    assert found == actions
    if "lower_rate" in actions:
        assert state.rate_until == 63 + 1 + guards.rate_steps
    taught = played(guards, [seen(60 + i, 50.0) for i in range(3)], calm(guards))[1].loss
    assert taught.mean == calm(guards).loss.mean  # a spike never teaches its band
    assert state.loss.num_seen == (0 if response != "off" else calm(guards).loss.num_seen)  # a new level, after all


def test_a_spike_rewinds_after_one_batch_was_passed_and_forgets_its_bands() -> None:
    guards = Guards(norm_spike="rewind", certify_every=10)
    found, state = played(guards, [seen(60, norm=90.0, certified=50), seen(61, norm=90.0, certified=50)], calm(guards))
    assert found == ["skip_step", "rewind"]
    assert state.norm.num_seen == 0
    assert state.passed == ((50, 62),)


def test_what_is_sure_is_left_out_for_good_and_survives_the_journey() -> None:
    guards = Guards()
    bad = seen(loss=math.nan, culprits=(Culprit(microbatch=0, samples=(9, 4), sure=True, reproduced=True),))
    _, state = played(guards, [bad, seen(51)])
    assert (state.left_out, state.skipped, state.num_bad) == ((4, 9), (50,), 0)
    assert msgspec.convert(msgspec.to_builtins(state), GuardState) == state
    verdict = decide(guards, state, bad)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(verdict), type=Verdict) == verdict


@given(st.dictionaries(st.text(min_size=1), st.integers(0, 2), min_size=1, max_size=7))
def test_agreement_names_exactly_the_minority(rows: dict[str, int]) -> None:
    differing, majority = agree(rows)
    values = list(rows.values())
    most = max(values.count(v) for v in values)
    assert majority == (2 * most > len(values))
    if majority:
        winner = max(set(values), key=values.count)
        assert set(differing) == {name for name, v in rows.items() if v != winner}
    else:
        assert set(differing) == set(rows)


def test_two_replicas_have_no_majority() -> None:
    assert agree({"r0": 1, "r1": 2}) == (("r0", "r1"), False)


def test_who_offends_again_is_put_out_and_a_host_of_such_devices_too() -> None:
    host_of = {"r0": "a0", "r1": "a1", "r2": "a0", "r3": "a1"}
    assert escalate("r0", "a0", {"r0": 1}, host_of, ["a1"]) == "replace"
    assert escalate("r0", "a0", {"r0": 2}, host_of, ["a1"]) == "quarantine"
    assert escalate("r2", "a0", {"r0": 2, "r2": 2}, host_of, ["a1"]) == "evict_host"
    assert escalate("r2", "a0", {"r0": 2, "r2": 2}, host_of, []) == "quarantine"
    assert escalate("r2", "a0", {"r1": 2, "r2": 2}, host_of, ["a1"]) == "quarantine"


@pytest.mark.parametrize(
    ("counts", "num_slots", "action"),
    [
        ({"r0": 1}, 2, "replace"),
        ({"r0": 10}, 2, "replace"),
        ({"r0": 11}, 2, "quarantine"),
        ({"r0": 11, "r1": 2}, 2, "replace"),  # both do it: an operation, not a device
        ({"r0": 25, "r1": 2}, 2, "quarantine"),
        ({"r0": 5}, 4, "replace"),
        ({"r0": 6}, 4, "quarantine"),
        ({"r0": 5, "r1": 4, "r2": 6, "r3": 5}, 4, "replace"),
        ({"r0": 1000}, 1, "replace"),  # nobody to be compared with
    ],
)
def test_numbers_that_come_right_again_put_a_device_out_only_beyond_chance(
    counts: dict[str, int], num_slots: int, action: str
) -> None:
    assert escalate_fleeting("r0", counts, num_slots) == action


@pytest.mark.parametrize("num_slots", [2, 4, 8])
def test_chance_puts_a_sound_device_out_in_one_run_of_a_hundred_at_most(num_slots: int) -> None:
    """Forty findings that fall on equal replicas at random, and a look after each."""
    draw = random.Random(num_slots)
    bad = 0
    for _ in range(500):
        counts: Counter[str] = Counter()
        for _ in range(40):
            slot = f"r{draw.randrange(num_slots)}"
            counts[slot] += 1
            if escalate_fleeting(slot, counts, num_slots) == "quarantine":
                bad += 1
                break
    assert bad <= 5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Guards(agreement=-1), "agreement=-1 is out of range"),
        (lambda: Guards(loss_spike="rewind"), "no state to go back to"),
        (lambda: Guards.of("ful"), "did you mean 'full'"),
        (lambda: Guards.of("everything"), "one of default, full, off"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(make: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert words in str(caught.value)
    assert caught.value.remedy


def test_presets() -> None:
    assert Guards.of("default") == Guards()
    assert Guards.of("off") is None
    assert Guards.of(Guards(agreement=1)) == Guards(agreement=1)
    assert set(PRESETS) == {"default", "full", "off"}
