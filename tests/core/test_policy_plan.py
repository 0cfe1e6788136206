"""Policies on scalars and on arrays: the same objects, the same answers; and against the mathematics."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.core import policy as pol
from outlast.core import reliability as rel
from outlast.errors import ConfigError

DAY = 86_400.0


def _belief(rate: float = 1 / (500 * DAY), weight: float = 2.0) -> pol.Belief:
    return pol.Belief.from_priors(
        {"hardware": pol.ClassPrior(rate=rate, weight=weight), "silent": pol.ClassPrior(rate=rate / 20, shape=0.7)}
    )


def test_the_posterior_is_prior_plus_evidence() -> None:
    belief = _belief().observe("hardware").expose(1000 * DAY).observe("hardware")
    same = rel.gamma_poisson(2, 1000 * DAY, prior_alpha=2.0, prior_beta=1000 * DAY)
    assert belief.rate(0) == pytest.approx(same.mean)
    assert belief.upper(0, 1.959964) == pytest.approx(same.high, rel=0.02)
    assert belief.rate(1) < _belief().rate(1)
    assert belief.hazard(1, 100, DAY) > belief.hazard(1, 100, 50 * DAY)
    assert belief.hazard(0, 100, DAY) == pytest.approx(100 * belief.rate(0))
    with pytest.raises(ConfigError, match="hardware"):
        belief.observe("hardwear")


@given(st.floats(1e-9, 1e-4), st.floats(0.1, 3000), st.floats(1, 1e5), st.sampled_from(["young", "daly", "exact"]))
@settings(max_examples=60)
def test_intervals_agree_with_the_mathematics(rate: float, write: float, machines: float, kind: str) -> None:
    belief = pol.Belief.from_priors({"any": pol.ClassPrior(rate=rate)})
    policy = pol.IntervalPolicy(kind=kind, min_s=1e-9, max_s=1e15)  # type: ignore[arg-type]
    found = policy.decide(belief, pol.IntervalState(machines=machines, write_s=write))
    mtbr = 1 / (rate * machines)
    formula = {"young": rel.young_interval, "daly": rel.daly_interval, "exact": rel.exact_interval}[kind]
    assert found.mtbr_s == pytest.approx(mtbr, rel=1e-6)
    if kind == "young" or write < 0.5 * mtbr:
        assert found.interval_s == pytest.approx(float(formula(write, mtbr)), rel=1e-5)


@given(st.lists(st.floats(0, 40), min_size=1, max_size=5), st.floats(1, 1e6))
@settings(max_examples=40)
def test_arrays_and_scalars_decide_alike(failures: list[float], days: float) -> None:
    prior = _belief()
    many = pol.Belief(
        classes=prior.classes, alpha=(prior.alpha[0] + np.array(failures), prior.alpha[1] + np.zeros(len(failures))),
        beta_s=prior.beta_s, shape=prior.shape, exposure_s=np.full(len(failures), days * DAY),
    )  # fmt: skip
    for i, seen in enumerate(failures):
        one = prior.observe("hardware", seen).expose(days * DAY)
        for policy, state in (
            (pol.IntervalPolicy(), pol.IntervalState(machines=512.0, write_s=60.0)),
            (pol.SparesPolicy(), pol.SparesState(wanted=512.0)),
            (pol.AuditPolicy(weights=(0.0, 1.0)), pol.AuditState(machines=512.0, step_s=5.0)),
        ):
            scalar, array = policy.decide(one, state), policy.decide(many, state)  # type: ignore[arg-type]
            for name in scalar.__slots__:
                a, b = getattr(scalar, name), getattr(array, name)
                assert a == pytest.approx(b[i] if np.ndim(b) else b), name


def test_spares_are_the_poisson_quantile_within_one() -> None:
    for load_rate in (0.5, 3.0, 20.0, 200.0):
        belief = pol.Belief.from_priors({"any": pol.ClassPrior(rate=load_rate / (1000 * DAY))})
        state = pol.SparesState(wanted=1000.0, repair_s=DAY)
        spares = pol.SparesPolicy(deviate=2.326).decide(belief, state).spares
        exact = next(s for s in range(1000) if rel.spares_poisson(1000, s, load_rate / 1000, 1.0) >= 0.99)
        assert abs(spares - exact) <= 1


def test_none_is_held_where_a_place_is_hardly_ever_empty_and_who_is_there_stays_a_while() -> None:
    def spares(load: float, held: float | None) -> float:
        belief = pol.Belief.from_priors({"any": pol.ClassPrior(rate=load / 1000)})
        state = pol.SparesState(wanted=10.0, repair_s=100.0, held=held)
        return float(pol.SparesPolicy().decide(belief, state).spares)

    assert [spares(load, None) for load in (1e-6, 0.0099, 0.0103, 0.3)] == [0, 0, 1, 2]
    assert [spares(load, 1.0) for load in (1e-6, 0.0017, 0.0099, 0.0103)] == [0, 1, 1, 1], "none to and fro at the edge"
    assert spares(0.0099, 5.0) == 2, "those that even a warier policy would not hold go at once"
    assert spares(3.0, 1.0) == spares(3.0, None) > 1, "more come at once"


def test_audit_rate_is_the_minimum() -> None:
    policy, belief = pol.AuditPolicy(weights=(0.0, 1.0), min_rate=1e-9), _belief()
    state = pol.AuditState(machines=2048.0, step_s=10.0)
    best = policy.decide(belief, state)
    for factor in (0.5, 2.0):
        other = pol.AuditPolicy(weights=(0.0, 1.0), fixed=best.rate * factor).decide(belief, state)
        assert other.overhead > best.overhead


def test_deciding_on_floats_imports_no_numpy() -> None:
    code = (
        "import sys; from outlast.core.policy import AuditPolicy, AuditState, Belief, ClassPrior\n"
        "from outlast.core.policy import IntervalPolicy, IntervalState, SparesPolicy, SparesState\n"
        "b = Belief.from_priors({'a': ClassPrior(rate=1e-6)}).observe('a').expose(1e6)\n"
        "IntervalPolicy().decide(b, IntervalState(machines=8.0, write_s=1.0))\n"
        "SparesPolicy().decide(b, SparesState(wanted=8.0))\n"
        "AuditPolicy(weights=(1.0,)).decide(b, AuditState(machines=8.0, step_s=1.0))\n"
        "sys.exit('numpy' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: pol.ClassPrior(rate=0),
        lambda: pol.IntervalPolicy(kind="often"),  # type: ignore[arg-type]
        lambda: pol.IntervalPolicy(weights=(1.2,)),
        lambda: pol.SparesPolicy(deviate=-1),
        lambda: pol.AuditPolicy(fixed=1.5),
        lambda: _belief().observe("hardware", -1),
    ],
)
def test_nonsense_is_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError):
        call()
