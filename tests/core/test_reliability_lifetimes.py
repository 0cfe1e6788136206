"""Lifetimes, rates and estimators: identities, quadrature, known answers, scipy as an oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from outlast.core import reliability as rel
from outlast.errors import ConfigError

LIVES = [
    (rel.Exponential(rate=0.5), stats.expon(scale=2)),
    (rel.Weibull(shape=0.7, scale=3.0), stats.weibull_min(0.7, scale=3)),
    (rel.Weibull(shape=2.5, scale=3.0), stats.weibull_min(2.5, scale=3)),
    (rel.LogNormal(mu=0.3, sigma=1.2), stats.lognorm(1.2, scale=np.exp(0.3))),
    (rel.Gamma(shape=0.6, rate=0.4), stats.gamma(0.6, scale=2.5)),
    (rel.Gamma(shape=4.0, rate=2.0), stats.gamma(4.0, scale=0.5)),
]


@pytest.mark.parametrize(("life", "oracle"), LIVES)
def test_against_scipy(life: rel.Lifetime, oracle) -> None:  # type: ignore[no-untyped-def]
    t, p = np.array([0.01, 0.5, 1.0, 4.0, 12.0]), np.array([0.0, 0.01, 0.3, 0.9, 0.999])
    assert life.sf(t) == pytest.approx(oracle.sf(t), rel=1e-9)
    assert life.cdf(t) == pytest.approx(oracle.cdf(t), rel=1e-9)
    assert life.logpdf(t) == pytest.approx(oracle.logpdf(t), rel=1e-8)
    assert life.quantile(p) == pytest.approx(oracle.ppf(p), rel=1e-8)
    assert rel.Lifetime.quantile(life, p) == pytest.approx(oracle.ppf(p), rel=1e-8)
    assert life.mean() == pytest.approx(oracle.mean())
    drawn = life.sample(np.random.default_rng(0), 4000)
    assert stats.kstest(drawn, oracle.cdf).pvalue > 1e-3


def test_composed_lives() -> None:
    tub = rel.bathtub(infant_shape=0.5, infant_scale=100.0, rate=0.01, wear_shape=4.0, wear_scale=60.0)
    early, middle, late = tub.hazard([0.01, 15.0, 70.0])
    assert early > middle < late
    assert tub.mean() == pytest.approx(integrate.quad(lambda t: float(tub.sf(t)), 0, 300, limit=300)[0], rel=1e-6)
    assert sum(tub.share(i) for i in range(3)) == pytest.approx(1.0, abs=1e-5)
    frail = rel.Frailty(unit=rel.Exponential(rate=1.0), variance=2.0)
    z = np.random.default_rng(1).gamma(0.5, 2.0, 400_000)
    assert frail.sf(1.5) == pytest.approx(np.exp(-z * 1.5).mean(), rel=0.01)
    assert frail.posterior(5, 1.0) == pytest.approx((0.5 + 5) / 1.5)
    z.sort()
    assert frail.share_of_worst(0.1) == pytest.approx(z[-40_000:].sum() / z.sum(), rel=0.02)
    assert rel.pooled_rate([rel.Exponential(rate=1.0), rel.Weibull(shape=2.0, scale=1.0)]) == pytest.approx(
        1 + 1 / rel.Weibull(shape=2.0, scale=1.0).mean()
    )


def test_renewal_function() -> None:
    assert rel.renewal_function(rel.Exponential(rate=2.0), 3.0)[-1] == pytest.approx(6.0, rel=1e-3)
    erlang = rel.renewal_function(rel.Gamma(shape=2.0, rate=1.0), 5.0)[-1]
    assert erlang == pytest.approx(5 / 2 - (1 - np.exp(-10)) / 4, rel=1e-3)


def test_rates() -> None:
    posterior = rel.gamma_poisson(8, 100.0)
    assert (posterior.low, posterior.high) == pytest.approx(tuple(stats.gamma(8.5, scale=0.01).ppf([0.025, 0.975])))
    wanted = stats.nbinom(8.5, 100 / 150).ppf([0.025, 0.5, 0.975])
    assert posterior.predictive(50.0, [0.025, 0.5, 0.975]) == pytest.approx(wanted)
    assert rel.count_interval(0)[0] == 0.0
    assert rel.count_interval(10) == pytest.approx((4.795, 18.39), abs=0.01)


def test_hierarchical_rates_find_the_lemons() -> None:
    rng = np.random.default_rng(5)
    rate = np.where(np.arange(200) < 10, 8.0, 0.5)
    failures = rng.poisson(rate)
    found = rel.hierarchical_rates(failures, np.ones(200))
    assert found.lemons[:10].min() > found.lemons[10:].mean()
    assert found.mean_interval[0] < rate.mean() < found.mean_interval[1]
    assert (found.unit_low <= found.unit_mean).all()
    assert (found.unit_mean <= found.unit_high).all()
    alike = rel.hierarchical_rates(rng.poisson(3.0, 300), np.ones(300))
    assert alike.shape > 10 * found.shape


@pytest.mark.parametrize(
    ("units", "each", "shape"), [(50, 600.0, 0.5), (5000, 20.0, 2.0), (300, 3.0, 1e6), (1, 5.0, 1.0)]
)
def test_intervals_of_a_population_have_width_and_hold_the_estimate(units: int, each: float, shape: float) -> None:
    """A fixed grid had one point where thousands of failures leave little doubt, and none beyond its edges."""
    rng = np.random.default_rng(7)
    failures = rng.poisson(rng.gamma(shape, each / shape, units))
    found = rel.hierarchical_rates(failures, np.full(units, 100.0))
    for low, best, high in (
        (found.mean_interval[0], found.mean, found.mean_interval[1]),
        (found.shape_interval[0], found.shape, found.shape_interval[1]),
    ):
        assert low < best < high
    if shape <= 2 and units > 1:
        assert found.shape_interval[0] < shape < found.shape_interval[1]
        spread = np.sqrt(each + each**2 / shape) / np.sqrt(units) / 100
        assert found.mean_interval[1] - found.mean_interval[0] == pytest.approx(2 * 1.96 * spread, rel=0.35)


def test_telling_apart() -> None:
    hours = rel.time_to_tell_apart(1 / 42.1, 1 / 56.4)
    rng = np.random.default_rng(6)
    a, b = rng.poisson(hours / 42.1, 20_000), rng.poisson(hours / 56.4, 20_000)
    told = np.abs(np.sqrt(a) - np.sqrt(b)) > 1.96 * np.sqrt(0.5)
    assert told.mean() == pytest.approx(0.8, abs=0.02)
    assert rel.time_to_tell_apart(1.0, 1.0) == float("inf")


def test_survival_estimators_against_scipy() -> None:
    rng = np.random.default_rng(7)
    life, limit = rng.weibull(1.3, 80), rng.uniform(0, 2, 80)
    t, seen = np.round(np.minimum(life, limit), 2) + 0.01, life <= limit
    found, oracle = rel.kaplan_meier(t, seen), stats.ecdf(stats.CensoredData.right_censored(t, ~seen)).sf
    assert found.at(oracle.quantiles, 1.0) == pytest.approx(oracle.probabilities)
    assert ((found.low <= found.value) & (found.value <= found.high)).all()
    hazard = rel.nelson_aalen([1.0, 2.0, 3.0], [True, False, True])
    assert hazard.value == pytest.approx([1 / 3, 1 / 3 + 1])


@given(st.sampled_from([0.6, 1.0, 2.0]), st.booleans())
@settings(max_examples=6)
def test_censored_weibull_recovers_its_parameters(shape: float, censor: bool) -> None:
    rng = np.random.default_rng(int(shape * 10) + censor)
    life = 5 * rng.weibull(shape, 1500)
    limit = rng.uniform(0, 12, 1500) if censor else np.full(1500, np.inf)
    fit = rel.fit_lifetime("weibull", np.minimum(life, limit), life <= limit)
    for name, true in (("shape", shape), ("scale", 5.0)):
        estimate, low, high = fit.parameters[name]
        assert low < estimate < high
        assert estimate == pytest.approx(true, rel=0.12)
    assert high - low < 1.5


def test_comparison_and_goodness_of_fit() -> None:
    rng = np.random.default_rng(8)
    repairs = rng.lognormal(3.0, 1.5, 300)
    fits = rel.compare_fits(repairs)
    assert fits[0].family == "lognormal"
    good = rel.goodness_of_fit(fits[0], repairs, None, rng, rounds=39)
    bad = rel.goodness_of_fit(rel.fit_lifetime("exponential", repairs), repairs, None, rng, rounds=39)
    assert good[1] > 0.05
    assert bad[1] <= 0.025
    z, p = rel.laplace_trend(np.sqrt(rng.random(200)) * 10, 10.0)
    assert z > 3
    assert p < 0.01


@pytest.mark.parametrize(
    "call",
    [
        lambda: rel.Weibull(shape=0, scale=1),
        lambda: rel.Exponential(rate=-1),
        lambda: rel.gamma_poisson(-1, 10),
        lambda: rel.fit_lifetime("normal", [1.0]),
        lambda: rel.fit_lifetime("weibull", [1.0, 2.0], [False, False]),
        lambda: rel.kaplan_meier([1.0, -2.0]),
        lambda: rel.bathtub(infant_shape=2, infant_scale=1, rate=1, wear_shape=3, wear_scale=1),
    ],
)
def test_nonsense_is_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError):
        call()
