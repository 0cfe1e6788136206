"""What a rule promises: measured kappa never above the stated one, non-finite rows counted, bad arguments refused."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from outlast.core.policy import PRE_STEPS, RULES, kappa, largest_f
from outlast.errors import ConfigError, TrainingError
from outlast.tensors import ATTACKS, aggregate, make_rule, strongest

INF, NAN = float("inf"), float("nan")
BOUNDED = [rule for rule, fact in RULES.items() if fact.kappa is not None]
PRES = [(), ("nnm",), ("clip",), ("bucketing",), ("clip", "nnm")]


def measured_kappa(stack, result, num_honest):
    """The largest ratio over all sets of n - f rows: whoever lied, the bound must hold for the others."""
    wide = stack.double()
    honest = wide[torch.tensor(list(itertools.combinations(range(len(stack)), num_honest)))]
    means = honest.mean(dim=1)
    variances = (honest - means[:, None]).square().sum(dim=2).mean(dim=1)
    errors = (result.double() - means).square().sum(dim=1)
    equal = variances <= 0.0
    assert bool((errors <= 1e-12 * means.square().sum(dim=1) + 1e-60)[equal].all())
    return float((errors / variances)[~equal].max()) if bool((~equal).any()) else 0.0


def hostile_stacks(n, f, seed):
    draw = np.random.default_rng(seed)
    for kind in ("line", "corners", "heavy", "two", "outlier", "gauss"):
        d = int(draw.integers(1, 4))
        honest = {
            "line": lambda d=d: np.linspace(-1, 1, n - f)[:, None] * draw.normal(size=(1, d)),
            "corners": lambda d=d: draw.choice([-1.0, 1.0], size=(n - f, d)),
            "heavy": lambda d=d: draw.standard_cauchy(size=(n - f, d)),
            "two": lambda d=d: np.repeat(draw.normal(size=(2, d)), [(n - f) // 2, n - f - (n - f) // 2], axis=0),
            "outlier": lambda d=d: np.vstack([np.zeros((n - f - 1, d)), np.full((1, d), 7.0)]),
            "gauss": lambda d=d: draw.normal(size=(n - f, d)),
        }[kind]()
        for factor in (0.3, 1.0, 3.0, 30.0):
            direction = draw.normal(size=(1, d))
            lies = honest.mean(axis=0) + factor * honest.std(axis=0).mean() * np.repeat(direction, f, axis=0)
            yield torch.from_numpy(np.vstack([lies, honest]).astype(np.float32))


@pytest.mark.parametrize("pre", PRES, ids=str)
@pytest.mark.parametrize("rule", BOUNDED)
def test_measured_kappa_is_never_above_the_stated_one(rule, pre):
    for n, seed in ((7, 0), (8, 1), (11, 2)):
        most = largest_f(rule, n, pre)
        for f in {most, min(1, most)} - {-1}:
            stated = kappa(rule, n, f, pre)
            assert stated is not None
            for stack in itertools.islice(hostile_stacks(n, f, seed), 12):
                found = measured_kappa(stack, aggregate(stack, rule, f=f, pre=pre), n - f)
                assert found <= stated * (1 + 1e-4) + 1e-6, (n, f, stack)


@pytest.mark.campaign
@pytest.mark.parametrize("pre", PRES, ids=str)
@pytest.mark.parametrize("rule", BOUNDED)
def test_measured_kappa_at_length(rule, pre):
    for n, seed in itertools.product((5, 7, 9, 12), range(6)):
        for f in range(largest_f(rule, n, pre) + 1):
            stated = kappa(rule, n, f, pre)
            for stack in hostile_stacks(n, f, seed):
                found = measured_kappa(stack, aggregate(stack, rule, f=f, pre=pre), n - f)
                assert found <= stated * (1 + 1e-4) + 1e-6, (n, f, stack)


@pytest.mark.parametrize("pre", PRES, ids=str)
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "mean"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_non_finite_rows_up_to_f_do_not_poison(rule, pre, value):
    n = 14
    f = min(2, largest_f(rule, n, pre))
    stack = torch.randn(n, 200, generator=torch.Generator().manual_seed(3)) + 5.0
    for share in (1, 200):
        bad = stack.clone()
        bad[1, :share] = value
        if f == 2:
            bad[n - 1, -share:] = -value
        result = aggregate(bad, rule, f=f, pre=pre)
        assert bool(torch.isfinite(result).all())
        assert float((result - 5.0).abs().max()) < 5.0


@pytest.mark.parametrize("pre", [(), ("nnm",), ("clip",)], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_more_non_finite_rows_than_f_are_refused(rule, pre):
    n = 12
    f = min(2, largest_f(rule, n, pre))
    stack = torch.randn(n, 50)
    stack[3 : 4 + f, 7] = NAN
    with pytest.raises(TrainingError, match=rf"{f + 1} of 12 rows are not finite.* \(rows 3"):
        aggregate(stack, rule, f=f, pre=pre)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("rule", ["krum", "geometric_median", "trimmed_mean"])
def test_the_first_rows_are_named_when_they_are_bad_and_no_others(rule, value, compiled):
    """The centre of distances is the median of the first rows: more bad ones than f among them must not hide it all."""
    bound = make_rule(rule, num_rows=9, f=1, pre="nnm")
    bound.prepare()
    rows = list(torch.randn(9, 300, generator=torch.Generator().manual_seed(0)))
    rows[0][7] = rows[1][7] = value
    with pytest.raises(TrainingError, match=r"^[^(]*\b2 of 9 rows are not finite[^(]* \(rows 0, 1\)"):
        bound.aggregate(rows, compiled=compiled)


def test_bad_rows_seen_in_different_slices_are_counted_together():
    rule = make_rule("trimmed_mean", num_rows=5, f=1)
    rows = [torch.ones(4) for _ in range(5)]
    rows[0][0], rows[3][3] = NAN, INF
    left, right = ([row[a:b] for row in rows] for a, b in ((0, 2), (2, 4)))
    assert rule.reduce_and_count(left)[1] == [0]
    assert rule.reduce_and_count(right)[1] == [3]
    with pytest.raises(TrainingError):
        rule.admit_nonfinite([0, 3])


@pytest.mark.parametrize("far", [1e10, 1e20, 1e30])
@pytest.mark.parametrize("rule", ["krum", "multi_krum", "geometric_median", "minimum_diameter", "bulyan"])
def test_a_far_liar_takes_nothing_from_the_precision_of_the_others(rule, far):
    draw = torch.Generator().manual_seed(0)
    honest = torch.randn(10, 64, generator=draw) + 1000.0
    lie = torch.full((1, 64), far)
    near = torch.cat([honest, torch.full((1, 64), 1e6)])
    result = aggregate(torch.cat([honest, lie]), rule, f=1)
    assert torch.allclose(result, aggregate(near, rule, f=1), atol=1e-3)


def test_a_far_first_row_is_not_the_centre():
    honest = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    lies = torch.full((1, 64), 1e25)
    assert torch.equal(
        aggregate(torch.cat([lies, honest]), "krum", f=1), aggregate(torch.cat([honest, lies]), "krum", f=1)
    )


def test_rows_that_are_all_equal_come_back():
    row = torch.randn(33)
    for rule in RULES:
        f = max(0, min(2, largest_f(rule, 11)))
        assert torch.equal(aggregate(row.expand(11, -1), rule, f=f), row)


def test_krum_returns_a_row_and_coordinate_rules_ignore_the_order_of_rows():
    stack = torch.randn(13, 90, generator=torch.Generator().manual_seed(1))
    assert any(torch.equal(aggregate(stack, "krum", f=5), row) for row in stack)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(2))
    for rule in ("median", "trimmed_mean", "mean_around_median"):
        assert torch.equal(aggregate(stack, rule, f=4), aggregate(stack[order], rule, f=4))


def test_float64_keeps_float64_s_precision():
    stack = torch.randn(9, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) + 1e6
    result = aggregate(stack, "geometric_median", f=2)
    residual = (stack - result) / (stack - result).norm(dim=1, keepdim=True)
    assert float(residual.sum(dim=0).norm()) < 1e-6
    middle = stack.sort(dim=0).values[2:7]
    assert torch.allclose(aggregate(stack, "trimmed_mean", f=2), middle.mean(dim=0), rtol=1e-15)


def test_geometric_median_does_not_depend_on_the_scale():
    stack = torch.randn(9, 40, generator=torch.Generator().manual_seed(4))
    for scale in (2.0**-100, 2.0**60):
        assert torch.allclose(
            aggregate(stack * scale, "geometric_median", f=2) / scale, aggregate(stack, "geometric_median", f=2)
        )


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", PRES, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_f_beyond_the_limit_is_refused_with_the_largest_f(rule, pre):
    for n in range(1, 18):
        most = largest_f(rule, n, pre)
        with pytest.raises(ConfigError, match=f"at most f = {most}" if most >= 0 else "cannot be used"):
            aggregate(torch.zeros(n, 2), rule, f=most + 1, pre=pre)
        if most >= 0:
            assert aggregate(torch.ones(n, 2), rule, f=most, pre=pre).tolist() == [1.0, 1.0]


def test_bad_arguments_are_named():
    stack = torch.zeros(7, 3)
    for call, text in [
        (lambda: aggregate(stack, "trimed_mean"), "did you mean 'trimmed_mean'"),
        (lambda: aggregate(stack, "median", f=1, pre="nmm"), "did you mean 'nnm'"),
        (lambda: aggregate(stack[0], "median"), "two dimensions"),
        (lambda: aggregate([], "median"), "no row"),
        (lambda: aggregate(stack.long(), "median"), "float64, float32"),
        (lambda: aggregate([stack[0], stack[0, :2]], "mean"), "row 1 is"),
        (lambda: aggregate(stack, "krum", f=1, m=2), "only multi_krum"),
        (lambda: aggregate(stack, "multi_krum", f=1, m=7), "between 1 and"),
        (lambda: aggregate(stack, "centered_clipping", f=1, radius=-1.0), "radius"),
        (lambda: aggregate(stack, "median", f=-1), "at least 0"),
        (lambda: aggregate(stack, "median", f=1.5), "no whole number"),
        (lambda: aggregate(stack, "krum", f="1"), "no whole number"),
        (lambda: aggregate(stack, "krum", f=None), "no whole number"),
        (lambda: aggregate(None, "median"), "not a NoneType"),
        (lambda: aggregate("cuda", "median"), "not a str"),
        (lambda: aggregate([1.0, 2.0, 3.0], "median"), "row 0 is a float"),
        (lambda: aggregate(stack.to_sparse(), "median"), "no plain values"),
        (lambda: aggregate(stack.to("meta"), "median"), "no plain values"),
        (lambda: aggregate(stack, "median", f=0, pre="bucketing", bucket_size=0), "bucket_size"),
    ]:
        with pytest.raises(ConfigError, match=text):
            call()


def test_a_memory_that_is_not_finite_is_no_memory():
    stack = torch.randn(7, 30, generator=torch.Generator().manual_seed(0))
    stack[0] = 1e6
    lost = aggregate(stack, "centered_clipping", f=1, state=torch.full((30,), NAN))
    assert torch.equal(lost, aggregate(stack, "centered_clipping", f=1))
    assert float(lost.abs().max()) < 5
    with pytest.raises(ConfigError, match="memory"):
        aggregate(stack, "centered_clipping", f=1, state=torch.zeros(29))


def test_a_mixed_row_at_the_centre_does_not_poison_the_geometric_median():
    """Its squared distance to the centre rounds to less than nothing; the root of that is no number."""
    row = [0.767839789390564, 1.989909291267395, 0.7182523012161255, -0.4966665208339691]
    row += [1.3100289106369019, 0.39555686712265015, 0.08947940915822983]
    stack = torch.tensor(row)[:, None]
    for pre in PRES:
        for f in range(max(0, largest_f("geometric_median", 7, pre)) + 1):
            result = aggregate(stack, "geometric_median", f=f, pre=pre)
            assert -0.5 <= float(result) <= 2.0, (pre, f)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "mean"])
def test_rows_too_far_from_zero_to_be_clipped_are_refused(rule):
    """Close to each other, so that no row is out, but the origin that lengths are measured from cannot be."""
    stack = torch.full((11, 2), 3e38) + torch.arange(11.0)[:, None] * 1e32
    with pytest.raises(TrainingError, match="too far from zero"):
        aggregate(stack, rule, f=1, pre="clip")
    assert bool(torch.isfinite(aggregate(stack, rule, f=1)).all())


def test_values_at_the_edges_of_the_types():
    largest = torch.finfo(torch.float32).max
    huge = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 1e300
    for rule in RULES:
        f = 0 if rule == "mean" else 1
        assert torch.equal(aggregate(torch.full((7, 5), largest), rule, f=f), torch.full((5,), largest))
        if RULES[rule].family == "distance":
            with pytest.raises(TrainingError, match="too far"):
                aggregate(huge, rule, f=f)
        else:
            assert bool(torch.isfinite(aggregate(huge, rule, f=f)).all())


@pytest.mark.parametrize("n", [1, 2, 64, 65, 130])
def test_few_and_many_rows(n):
    draw = torch.Generator().manual_seed(n)
    for rule in RULES:
        f = min(5, largest_f(rule, n))
        if f < 0:
            continue
        stack = torch.randn(n, 57, generator=draw)
        stack[:f] = NAN
        assert bool(torch.isfinite(aggregate(stack, rule, f=f)).all())


def test_rules_by_name_are_the_one_call():
    import outlast.tensors

    stack = torch.randn(11, 20, generator=torch.Generator().manual_seed(0))
    for rule, fact in RULES.items():
        options = {} if rule == "mean" else {"f": 1, "pre": "nnm"}
        assert torch.equal(getattr(outlast.tensors, rule)(stack, **options), aggregate(stack, rule, **options))
        assert getattr(outlast.tensors, rule).__doc__, fact.name
    memory = torch.ones(20)
    named = outlast.tensors.centered_clipping(stack, f=1, state=memory, radius=0.5)
    assert torch.equal(named, aggregate(stack, "centered_clipping", f=1, state=memory, radius=0.5))


def test_every_fact_is_stated():
    for fact in [*RULES.values(), *PRE_STEPS.values()]:
        assert all([fact.title, fact.condition, fact.kappa_text, fact.cost, fact.source])


# --- attacks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_are_pure_and_reach_the_mean_but_not_the_robust_rule(attack):
    honest = torch.randn(11, 60, generator=torch.Generator().manual_seed(0)) + 2.0
    before = honest.clone()
    extra = {"earlier": honest - 3.0} if attack == "stale" else {}
    lies = ATTACKS[attack](honest, 4, **extra)
    assert (lies.shape, lies.dtype) == ((4, 60), honest.dtype)
    assert torch.equal(lies.nan_to_num(), ATTACKS[attack](honest, 4, **extra).nan_to_num())
    assert torch.equal(honest, before)
    result = aggregate(torch.cat([lies, honest]), "trimmed_mean", f=4, pre="nnm")
    bound = kappa("trimmed_mean", 15, 4, ("nnm",))
    variance = float((honest - honest.mean(0)).square().sum(1).mean())
    assert float((result - honest.mean(0)).square().sum()) <= bound * variance


def test_the_strongest_factor_is_the_worst_of_those_tried():
    honest = torch.randn(11, 60, generator=torch.Generator().manual_seed(0)) + 1.0
    rule = make_rule("trimmed_mean", num_rows=15, f=4)

    def judge(stack):
        return rule.aggregate(list(stack))

    rows, factor = strongest(ATTACKS["alie"], honest, 4, judge, (0.1, 0.5, 1.0, 2.0, 8.0))
    assert factor in (0.1, 0.5, 1.0, 2.0, 8.0)
    worst = float((judge(torch.cat([rows, honest])) - honest.mean(0)).norm())
    for other in (0.1, 0.5, 1.0, 2.0, 8.0):
        lies = ATTACKS["alie"](honest, 4, factor=other)
        assert float((judge(torch.cat([lies, honest])) - honest.mean(0)).norm()) <= worst * (1 + 1e-6)


def test_the_strongest_factor_against_rows_that_are_not_finite_is_the_first():
    honest = torch.full((3, 4), NAN)
    rows, factor = strongest(ATTACKS["ipm"], honest, 2, lambda stack: stack.mean(dim=0), (0.1, 0.5))
    assert (tuple(rows.shape), factor) == ((2, 4), 0.1)


def test_mda_limits_its_search():
    with pytest.raises(ConfigError, match="at most f = "):
        make_rule("minimum_diameter", num_rows=40, f=10)
    assert math.comb(40, largest_f("minimum_diameter", 40)) <= 50_000
