"""Learned bands, where a tensor is not finite, collapsed activations."""

from __future__ import annotations

import math
import random

import pytest
import torch

from outlast.tensors import (
    Band,
    activation_stats,
    collapse_reasons,
    find_nonfinite,
    flip_labels,
    inconsistent,
    lying_reducer,
)


def run(band, values):
    readings = []
    for value in values:
        reading, band = band.read(value)
        readings.append(reading)
    return readings, band


def decaying_losses(num, seed):
    draw = random.Random(seed)
    return [3.0 * math.exp(-step / 150) + 0.5 + draw.gauss(0, 0.08) for step in range(num)]


def test_clean_losses_raise_no_alarm_and_a_spike_does():
    for seed in range(50):
        readings, band = run(Band(), decaying_losses(500, seed))
        assert {r.finding for r in readings} == {"learning", "inside"}
        assert [r.finding for r in readings].index("inside") == 20
        spike, after = band.read(3.0)
        assert spike.finding == "spike"
        assert spike.value > spike.limit
        assert spike.score > band.width
        assert (after.mean, after.deviation) == (band.mean, band.deviation)
        assert after.read(0.55)[1].num_spikes == 0


def test_heavy_gradient_norms_raise_few_alarms():
    draw = random.Random(1)
    readings, _ = run(Band(), [math.exp(draw.gauss(0, 0.3)) for _ in range(3000)])
    assert sum(r.finding == "spike" for r in readings) <= 3


def test_non_finite_values_are_found_even_while_learning_and_teach_nothing():
    band = Band()
    for value in (math.nan, math.inf, -math.inf):
        reading, after = band.read(value)
        assert reading.finding == "nonfinite"
        assert after == band


def test_a_new_level_is_accepted_after_patience_and_reset_forgets():
    _, band = run(Band(patience=3), [1.0, 1.1] * 20)
    readings, band = run(band, [9.0, 9.0, 9.0])
    assert [r.finding for r in readings] == ["spike"] * 3
    assert band.num_seen == 0
    assert band == Band(patience=3)
    assert run(Band(), [1.0] * 30)[1].reset() == Band()


def test_a_constant_value_does_not_make_the_band_infinitely_narrow():
    _, band = run(Band(), [2.0] * 100)
    assert band.read(2.0001)[0].finding == "inside"
    _, band = run(Band(), [0.0] * 100)
    assert band.read(0.0)[0].finding == "inside"
    assert band.read(1e-3)[0].finding == "spike"


def test_losses_below_zero_are_handled():
    _, band = run(Band(), [-5.0 + 0.01 * (i % 3) for i in range(50)])
    assert band.read(-5.0)[0].finding == "inside"
    assert band.read(-9.0)[0].finding == "inside", "lower is never a spike"
    assert band.read(2.0)[0].finding == "spike"


def test_non_finite_elements_are_located():
    weight = torch.zeros(4, 5)
    weight[2, 3], weight[3, 0], weight[3, 1] = math.nan, math.inf, -math.inf
    named = [
        ("fine", torch.ones(3)),
        ("count", torch.tensor([1, 2])),
        ("weight", weight),
        ("scalar", torch.tensor(math.inf)),
    ]
    found = find_nonfinite(named)
    assert [(f.name, f.num_nan, f.num_inf, f.index) for f in found] == [("weight", 1, 2, (2, 3)), ("scalar", 0, 1, ())]
    assert find_nonfinite([("empty", torch.zeros(0)), ("half", torch.ones(3, dtype=torch.bfloat16))]) == []
    strided = torch.zeros(6, 4).t()
    strided[1, 5] = math.nan
    assert find_nonfinite([("strided", strided)])[0].index == (1, 5)


def test_activation_statistics():
    draw = torch.Generator().manual_seed(0)
    healthy = activation_stats(torch.randn(8, 16, 32, generator=draw).relu())
    assert (healthy.num_samples, healthy.num_units, healthy.dead) == (128, 32, 0.0)
    assert healthy.rank > 10
    dead = torch.randn(128, 32, generator=draw).relu()
    dead[:, :24] = 0.0
    assert activation_stats(dead).dead == pytest.approx(0.75)
    line = torch.randn(128, 1, generator=draw) @ torch.randn(1, 32, generator=draw)
    assert activation_stats(line).rank == pytest.approx(1.0, abs=1e-6)
    flat = torch.full((128, 32), 3.0)
    assert activation_stats(flat).constant == 1.0
    for gone, word in [(dead, "dead"), (line, "one line"), (1e-5 * torch.randn(128, 32, generator=draw), "vanishing")]:
        assert any(word in reason for reason in collapse_reasons(activation_stats(gone), healthy))
    assert collapse_reasons(healthy, healthy) == []
    mixed = torch.randn(128, 32, generator=draw)
    grown = mixed + 300.0 * torch.randn(128, 1, generator=draw) @ torch.randn(1, 32, generator=draw)
    assert activation_stats(grown).rank < 1.01
    assert collapse_reasons(activation_stats(grown), activation_stats(mixed)) == [], "one more direction, none lost"
    half = activation_stats(line.bfloat16())
    assert half.rest > 1e-3 * healthy.rest, "rounding looks like a second direction"
    assert collapse_reasons(half, healthy) == collapse_reasons(activation_stats(line), healthy)[:1]
    assert activation_stats(torch.zeros(0, 4)).rank == 0.0


def test_lies_about_labels_slices_and_peers():
    assert flip_labels(torch.tensor([0, 3, 9]), 10).tolist() == [9, 6, 0]
    honest = torch.ones(3, 4)
    told = inconsistent(honest, 2, num_peers=3)
    assert len({tuple(lie[0].tolist()) for lie in told}) == 3
    truth = torch.arange(1.0, 5.0)
    assert lying_reducer(truth, start=1, stop=2).tolist() == [1.0, -2.0, 3.0, 4.0]
    assert truth.tolist() == [1.0, 2.0, 3.0, 4.0]
