"""What owner and second compute is one fingerprint; one bit moves it; a second's computation leaves no trace."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from outlast.errors import ConfigError
from outlast.runtime.exchange.slots import Memory
from outlast.runtime.faults.flips import Corruption
from outlast.runtime.training._partial_sums import Accumulator
from outlast.runtime.training.step_checks import NoFlips, StepChecks
from outlast.tensors import Layout

SHAPES = [(5,), (40, 7), (3,), (), (64, 2)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class Half:
    """One replica: parameters, memory, sums."""

    def __init__(self, dtype: torch.dtype = torch.float32, flips: Sequence[dict[str, object]] = ()) -> None:
        draw = torch.Generator().manual_seed(1)
        self.params = [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in SHAPES]
        self.layout = Layout(self.params, 512)
        self.memory = Memory(self.layout, 8, shared=False)
        names = [f"p{i}" for i in range(len(SHAPES))]
        self.flips = Corruption.read("r0.1", json.dumps(flips), names, self.params) or NoFlips()
        self.sums = Accumulator(self.params, self.layout, self.memory, 6, checks=StepChecks(flips=self.flips))
        self.sums.printing = True

    def compute(self, leaf: int, *, beside: bool = False, weight: float = 1.0, unused: int = -1) -> int:
        self.flips.begin(0, leaf)
        self.sums.begin(leaf, weight, None, beside)
        draw = torch.Generator().manual_seed(100 + leaf)
        total = torch.zeros(())
        for index, param in enumerate(self.params):
            factor = torch.randn(param.shape, generator=draw).to(param.dtype)
            if index != unused:
                total = total + (param * factor).sum()
        total.backward()
        self.sums.end()
        assert all(param.grad is None for param in self.params)
        return self.sums.print

    def bytes_held(self) -> list[bytes]:
        slots = sorted(self.sums.slots.values())
        return [flat.view(torch.uint8).numpy().tobytes() for slot in slots for flat in self.memory.flats(slot)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_owner_and_second_agree_wherever_the_microbatch_lands(dtype: torch.dtype, weight: float) -> None:
    owner, second = Half(dtype), Half(dtype)
    own = [owner.compute(leaf, weight=weight) for leaf in range(4)]  # into fresh slots, and onto siblings
    assert own == [second.compute(leaf, beside=True, weight=weight) for leaf in range(4)]
    assert len(set(own)) == 4
    assert second.sums.slots == {}


def test_a_microbatch_beside_leaves_no_trace() -> None:
    plain, busy = Half(), Half()
    for leaf in range(3):
        plain.compute(leaf, unused=1)
        busy.compute(leaf, unused=1)
        busy.compute(5, beside=True)
    assert busy.sums.slots == plain.sums.slots
    assert busy.bytes_held() == plain.bytes_held()
    assert busy.sums.used == plain.sums.used


def test_no_gradient_is_told_from_a_gradient_of_zeros() -> None:
    assert Half().compute(2) != Half().compute(2, unused=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_single_bit_of_any_parameter_moves_the_fingerprint(dtype: torch.dtype) -> None:
    right = Half(dtype).compute(1)
    for param in range(len(SHAPES)):
        for bit in range(8 * dtype.itemsize):
            flip = {"replica": "r0", "step": 0, "microbatch": 1, "parameter": param, "element": 7 * bit, "bit": bit}
            assert Half(dtype, [flip]).compute(1) != right, (param, bit)


def test_a_flip_strikes_as_often_as_ordered() -> None:
    right = Half().compute(1)
    once = Half(flips=[{"replica": "r0.1", "step": 0, "bit": 4}])
    assert (once.compute(1) == right, once.compute(1, beside=True) == right) == (False, True)
    always = Half(flips=[{"replica": "r0", "step": 0, "microbatch": 1, "bit": 4, "times": 0}])
    wrong = always.compute(1)
    assert wrong != right
    assert always.compute(1, beside=True) == wrong
    drifting = Half(flips=[{"replica": "r0", "step": 0, "bit": 4, "times": 0, "drift": True}])
    assert len({drifting.compute(1), drifting.compute(1, beside=True), right}) == 3
    orders = json.dumps([{"replica": "r0", "step": 0}])
    assert Corruption.read("r1.1", orders, [], []) is None
    with pytest.raises(ConfigError, match="no list of flips"):
        Corruption.read("r0.1", '{"replica": 1}', [], [])


def test_sums_are_fingerprinted_when_they_are_made() -> None:
    half = Half(flips=[{"replica": "r0", "step": 0, "microbatch": 0, "target": "sum", "parameter": 0, "bit": 2}])
    half.compute(0)
    slot = half.sums.slots[0, 1]
    before = half.memory.flats(slot)[0].clone()
    first = half.sums.sent((0, 1), slot, 0)
    assert not torch.equal(half.memory.flats(slot)[0], before), "struck after the fingerprint was taken"
    assert half.sums.sent((0, 1), slot, 0) == first, "an offer in a later view does not cover it up"
    half.sums.keep([])
    half.compute(0)
    assert half.sums.sent((0, 1), half.sums.slots[0, 1], 0) == first, "made again, the same sum"
