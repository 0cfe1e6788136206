"""Checked sums: no bit changes where nothing is wrong, and what is wrong is found, put right and told."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outlast.errors import ConfigError, DeviceFault
from outlast.examples.models import GPT, next_byte_loss
from outlast.health import CheckedSums, ProductChecks
from outlast.runtime.faults.flips import flip_bit
from outlast.tensors import prepare_sums, product_misfit, sums_of, within_bound


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class MLP(nn.Module):
    """Two layers, the second computed again in the backward where `again`."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 96), nn.Linear(96, 40)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        if self.again:
            out: Tensor = checkpoint(self.second, hidden, use_reentrant=False)
            return out
        return self.second(hidden)  # type: ignore[no-any-return]


def gradients(model: nn.Module, loss: Any, checked: CheckedSums | None, seed: int = 0) -> list[Tensor]:
    """Of one microbatch, with or without checks."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    if checked is None:
        loss(model).backward()
    else:
        with checked.at(0, 0):
            loss(model).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def mlp_loss(model: nn.Module) -> Tensor:
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))
    return model(x).square().mean()  # type: ignore[no-any-return]


def other_loss(model: nn.Module, dtype: torch.dtype) -> Tensor:
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    return model(x).float().square().mean()  # type: ignore[no-any-return]


def narrow_loss(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return mlp_loss(model)


def gpt_loss(model: nn.Module) -> Tensor:
    window = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(1))
    return next_byte_loss(model, window)


class Images(nn.Module):
    """Convolutions: plain, with a stride, in groups, in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.strided = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 24, 3, stride=2, bias=False)
        self.grouped, self.line = nn.Conv2d(24, 24, 3, groups=4), nn.Conv1d(24, 8, 5, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.grouped(torch.relu(self.strided(torch.relu(self.plain(x))))))
        return self.line(hidden.flatten(2))  # type: ignore[no-any-return]


def image_loss(model: nn.Module) -> Tensor:
    x = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return model(x).square().mean()  # type: ignore[no-any-return]


class Products(nn.Module):
    """Attention in single products."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).chunk(3, -1)
        return torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v


def products_loss(model: nn.Module) -> Tensor:
    return model(torch.randn(4, 12, 16, generator=torch.Generator().manual_seed(1))).square().mean()  # type: ignore[no-any-return]


CASES = {
    "convolution": (lambda: Images(), image_loss),
    "products of attention": (lambda: Products(), products_loss),
    "linear": (lambda: MLP(), mlp_loss),
    "activation checkpointing": (lambda: MLP(again=True), mlp_loss),
    "autocast": (lambda: MLP(), narrow_loss),
    "bfloat16": (lambda: MLP().bfloat16(), lambda m: other_loss(m, torch.bfloat16)),
    "double": (lambda: MLP().double(), lambda m: other_loss(m, torch.float64)),
    "attention": (lambda: GPT(width=32, depth=2), gpt_loss),
}


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(left, right, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_without_a_fault_no_bit_changes_and_nothing_is_found(case: str) -> None:
    make, loss = CASES[case]
    torch.manual_seed(0)
    model = make()
    plain = gradients(model, loss, None)
    checked = CheckedSums(model, ProductChecks())
    assert same(gradients(model, loss, checked), plain)
    assert checked.num_checked >= 5
    assert (checked.num_doubted, checked.num_unchecked, checked.found) == (0, 0, [])


def strike_once(at: int, bit: int) -> Any:
    """Flips a bit of the `at`-th operation's output, once."""
    seen = [0]

    def strike(name: str, out: Tensor) -> None:
        seen[0] += out.dim() > 1
        if out.dim() > 1 and seen[0] == at + 1:
            flip_bit(out, out.numel() // 3, bit)

    return strike


@pytest.mark.parametrize("case", CASES)
def test_a_flip_in_any_product_is_put_right_to_the_bit(case: str) -> None:
    make, loss = CASES[case]
    torch.manual_seed(0)
    model = make()
    plain = gradients(model, loss, None)
    checked = CheckedSums(model, ProductChecks())
    gradients(model, loss, checked)
    count = [0]

    def tell(name: str, out: Tensor) -> None:
        count[0] += out.dim() > 1  # the gradient of a bias is no product

    checked.strike = tell
    gradients(model, loss, checked)
    for at in range(count[0]):
        struck = CheckedSums(model, ProductChecks())
        struck.strike = strike_once(at, -3 + 8 * next(model.parameters()).element_size() if case != "autocast" else 13)
        assert same(gradients(model, loss, struck), plain), at
        assert [(f.action, f.num_wrong) for f in struck.found] == [("recomputed", 1)], at


def test_a_finding_says_where_it_was() -> None:
    torch.manual_seed(0)
    model = MLP()
    checked = CheckedSums(model, ProductChecks())
    checked.strike = strike_once(1, 28)
    gradients(model, mlp_loss, checked)
    (found,) = checked.found
    assert (found.operation, found.module, found.backward, found.bits) == ("addmm", "second", False, (28,))
    assert (found.row, found.column) == divmod(32 * 40 // 3, 40)
    checked = CheckedSums(model, ProductChecks())
    checked.strike = strike_once(2, 28)
    gradients(model, mlp_loss, checked)
    assert (checked.found[0].operation, checked.found[0].module, checked.found[0].backward) == ("mm", "second", True)
    assert "mm in the backward of second did not add up" in str(checked.found[0])


def test_a_device_that_is_wrong_each_time_is_not_used() -> None:
    torch.manual_seed(0)
    model = MLP()
    checked = CheckedSums(model, ProductChecks())
    checked.strike = lambda name, out: flip_bit(out, 7, 28)
    with pytest.raises(DeviceFault, match="addmm in the forward of first is wrong each time"):
        gradients(model, mlp_loss, checked)


def test_a_drifting_device_is_not_used() -> None:
    torch.manual_seed(0)
    model = MLP()
    checked, times = CheckedSums(model, ProductChecks()), [0]

    def strike(name: str, out: Tensor) -> None:
        times[0] += 1
        flip_bit(out, times[0], 27 + times[0] % 3)

    checked.strike = strike
    with pytest.raises(DeviceFault):
        gradients(model, mlp_loss, checked)


@pytest.mark.parametrize(
    ("dtype", "bit"), [*((torch.float32, bit) for bit in (31, 30, 26, 22, 14, 3)), (torch.bfloat16, 15),
                       (torch.bfloat16, 14), (torch.bfloat16, 12), (torch.bfloat16, 8)]
)  # fmt: skip
def test_a_parameter_that_changes_in_memory_gets_its_bits_back(dtype: torch.dtype, bit: int) -> None:
    def loss(model: nn.Module) -> Tensor:
        return other_loss(model, dtype)

    torch.manual_seed(0)
    model = MLP().to(dtype)
    plain = gradients(model, loss, None)
    checked = CheckedSums(model, ProductChecks())
    gradients(model, loss, checked)
    weight = model.second.weight.detach()
    before = weight.clone()
    flip_bit(weight.data, 1234, bit)
    again = gradients(model, loss, checked)
    if not checked.found:  # too small to show in any sum
        assert bit < 10
        return
    assert same(again, plain)
    assert torch.equal(model.second.weight, before)
    assert [(f.action, f.module) for f in checked.found] == [("repaired", "second.weight")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_equal_neighbour_is_not_taken_for_the_one_that_changed(dtype: torch.dtype) -> None:
    """1.0 becomes 1.5 where other elements of its row and its column are 1.5 already."""

    def loss(model: nn.Module) -> Tensor:
        return other_loss(model, dtype)

    torch.manual_seed(0)
    model = MLP().to(dtype)
    weight = model.second.weight.data
    weight[5, 3], weight[9, 3], weight[20, 3], weight[9, 7] = 1.5, 1.0, 1.5, 1.5
    before, plain = weight.clone(), gradients(model, loss, None)
    checked = CheckedSums(model, ProductChecks())
    gradients(model, loss, checked)
    flip_bit(weight, 9 * 96 + 3, 22 if dtype == torch.float32 else 6)
    assert weight[9, 3] == 1.5
    assert same(gradients(model, loss, checked), plain)
    assert torch.equal(weight, before)
    assert [f.action for f in checked.found] == ["repaired"]


def test_several_changes_in_memory_are_told_or_end_it() -> None:
    """Two of different inputs of a layer are put back; two of one input end the replica: never a wrong repair."""
    for places, repaired in (((100, 1234), True), ((96, 97), True), ((96 * 3 + 5, 96 * 7 + 5), False)):
        torch.manual_seed(0)
        model = MLP()
        plain = gradients(model, mlp_loss, None)
        checked = CheckedSums(model, ProductChecks())
        gradients(model, mlp_loss, checked)
        before = model.second.weight.detach().clone()
        for place in places:
            flip_bit(model.second.weight.data, place, 28)
        if repaired:
            assert same(gradients(model, mlp_loss, checked), plain)
            assert torch.equal(model.second.weight, before)
        else:
            with pytest.raises(DeviceFault, match="changed in memory"):
                gradients(model, mlp_loss, checked)


def test_a_step_of_the_optimizer_is_no_change_in_memory() -> None:
    torch.manual_seed(0)
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checked = CheckedSums(model, ProductChecks())
    for step in range(3):
        with checked.at(step, 0):
            mlp_loss(model).backward()
        optimizer.step()
    with torch.no_grad():
        model.first.weight.mul_(2.0)  # the loop's own, within a step
    with checked.at(2, 1):
        mlp_loss(model).backward()
    assert (checked.num_doubted, checked.found) == (0, [])


def test_a_parameter_that_the_loop_writes_unseen_by_torch_is_no_fault() -> None:
    torch.manual_seed(0)
    model = MLP()
    checked = CheckedSums(model, ProductChecks())
    gradients(model, mlp_loss, checked)
    model.second.weight.data.mul_(1.01)
    model.first.weight.data.clamp_(-0.05, 0.05)
    plain = gradients(model, mlp_loss, None)
    assert same(gradients(model, mlp_loss, checked), plain)
    doubted = checked.num_doubted
    assert same(gradients(model, mlp_loss, checked), plain)
    assert (checked.num_doubted, checked.found) == (doubted, [])


def test_only_the_modules_that_were_named_are_checked() -> None:
    torch.manual_seed(0)
    model = MLP()
    checked = CheckedSums(model, ProductChecks(modules=("second",)))
    gradients(model, mlp_loss, checked)
    assert checked.num_checked == 3
    checked.strike = strike_once(0, 28)
    gradients(model, mlp_loss, checked)
    assert checked.found == []


def test_patterns_that_match_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"matches 'secnd'") as refused:
        CheckedSums(MLP(), ProductChecks(modules=("first", "secnd")))
    assert "second" in refused.value.remedy


def test_a_threshold_leaves_what_is_smaller() -> None:
    torch.manual_seed(0)
    model = MLP()
    plain = gradients(model, mlp_loss, None)
    for threshold, found in ((0.0, 1), (0.9, 0)):
        checked = CheckedSums(model, ProductChecks(threshold=threshold))
        checked.strike = strike_once(0, 21)
        after = gradients(model, mlp_loss, checked)
        assert len(checked.found) == found
        assert same(after, plain) is bool(found)


def test_compiled_models_are_refused_by_name() -> None:
    model = MLP()
    with pytest.raises(ConfigError, match="the model is compiled"):
        CheckedSums(torch.compile(model), ProductChecks())  # type: ignore[arg-type]
    model.second.compile()
    with pytest.raises(ConfigError, match="second is compiled"):
        CheckedSums(model, ProductChecks())


@pytest.mark.process
def test_where_nothing_is_compiled_nothing_is_warned_of() -> None:
    code = """
import torch
from torch import nn
from outlast.health import CheckedSums, ProductChecks
model = nn.Linear(4, 4)
optimizer, checked = torch.optim.AdamW(model.parameters()), CheckedSums(model, ProductChecks())
for step in range(2):
    with checked.at(step, 0):
        model(torch.ones(4, 4)).sum().backward()
    optimizer.step()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "outlast:" not in done.stderr


def test_compiled_functions_in_the_loop_are_warned_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    compiled = torch.compile(lambda x: (x @ x).sum(), backend="eager")
    compiled(torch.ones(2, 2))
    checked = CheckedSums(MLP(), ProductChecks())
    for step in range(3):
        with checked.at(step, 0):
            assert compiled(torch.ones(2, 2)) == 8
    assert capsys.readouterr().err.count("run uncompiled") == 1


@pytest.mark.parametrize("given", ["abtf", 3, [], [1], {"modules": "x"}])
def test_what_is_no_check_is_refused_with_what_would_be(given: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        ProductChecks.of(given)
    assert "abft" in refused.value.remedy


def test_what_may_be_asked_for() -> None:
    assert ProductChecks.of(None) is ProductChecks.of("off") is None
    assert ProductChecks.of("abft") == ProductChecks.of(ProductChecks()) == ProductChecks()
    assert ProductChecks.of(["a.*"]) == ProductChecks(modules=("a.*",))
    for wrong in ({"deviations": 1.0}, {"threshold": 1.0}, {"attention": "thrice"}):
        with pytest.raises(ConfigError):
            ProductChecks(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("turned", [False, True])
def test_both_paths_say_the_same(dtype: torch.dtype, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_sums()
    torch.manual_seed(0)
    a = torch.randn(37, 53).t().to(dtype) if turned else torch.randn(53, 37).to(dtype)
    b, bias = torch.randn(101, 37).to(dtype).t(), torch.randn(101).to(dtype)
    c = torch.addmm(bias, a, b)
    c[3, 4] += c.abs().max() * 8
    fast = product_misfit(c, a, sums_of(b, dtype), bias=bias)
    monkeypatch.setattr("outlast.tensors._native.library", lambda source: None)
    slow = product_misfit(c, a, sums_of(b, dtype), bias=bias)
    assert (fast.row, fast.block) == (slow.row, slow.block)
    assert fast.deviations == pytest.approx(slow.deviations, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tolerance_follows_from_type_and_length(dtype: torch.dtype) -> None:
    """Over lengths from 1 to 4,096, signs at random and all alike: no product is off by more than its limit, and the
    limit is not so wide that a flip of the largest bit of a mantissa would be lost in a short one."""
    torch.manual_seed(0)
    for length in (1, 2, 16, 100, 1024, 4096):
        for shift in (0.0, 3.0):
            a, b = (torch.randn(24, length) + shift).to(dtype), (torch.randn(length, 40) + shift).to(dtype)
            c = a @ b
            assert product_misfit(c, a, sums_of(b, dtype)).deviations < 4.0, (length, shift)
            flip_bit(c, 100, 22 if dtype == torch.float32 else 14)
            assert product_misfit(c, a, sums_of(b, dtype)).deviations > 6.0, (length, shift)


def test_a_model_can_be_copied_and_saved_as_before(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MLP()
    plain = gradients(model, mlp_loss, None)
    checked = CheckedSums(model, ProductChecks())
    gradients(model, mlp_loss, checked)
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert same(gradients(other, mlp_loss, None), plain)
        assert not other._forward_hooks


def test_products_of_tensors_without_plain_numbers_are_left_alone() -> None:
    checked = CheckedSums(MLP(), ProductChecks())
    dense = torch.randn(6, 6)
    with checked.at(0, 0):
        assert torch.equal(torch.sparse.mm(dense.to_sparse(), dense), torch.sparse.mm(dense.to_sparse(), dense))
        assert (torch.ones(3, 0) @ torch.ones(0, 4)).sum() == 0
        assert (torch.ones(3, 4, device="meta") @ torch.ones(4, 2, device="meta")).shape == (3, 2)
        assert (torch.ones(3, 4).int() @ torch.ones(4, 2).int()).sum() == 24
        assert (torch.ones(3, 4).cfloat() @ torch.ones(4, 2).cfloat()).shape == (3, 2)
        assert torch.addmm(torch.randn(6, 6), dense, dense).shape == (6, 6)
    assert checked.num_checked == 0
    assert checked.num_unchecked >= 4


def test_numbers_that_are_not_finite_are_not_a_fault() -> None:
    torch.manual_seed(0)
    model = MLP()
    with torch.no_grad():
        model.first.weight[0, 0] = float("inf")
        model.first.weight[1, 0] = float("nan")
    checked = CheckedSums(model, ProductChecks())
    gradients(model, mlp_loss, checked)
    assert checked.found == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("flush", [False, True])
def test_gradients_that_vanish_are_no_faults(dtype: torch.dtype, flush: bool) -> None:
    """Next to the least numbers a product is rounded to nothing, whatever its size; kernels may do so from the least
    normal number on. A flip that matters is still seen beside them."""
    least = 2.0**-1074 if dtype == torch.float64 else 2.0**-149
    torch.manual_seed(0)
    a = (torch.randint(-8, 9, (8, 300)).double() * (least if dtype != torch.bfloat16 else 2.0**-133)).to(dtype)
    a[4:] = torch.randn(4, 300).to(dtype)
    b = (torch.randn(300, 60) * 0.03).to(dtype)
    torch.set_flush_denormal(flush)
    try:
        c = a @ b
        if flush:
            c[:4] = 0.0
    finally:
        torch.set_flush_denormal(False)
    every = torch.arange(len(c))
    assert within_bound(c, a, b, every)
    assert product_misfit(c, a, sums_of(b, dtype)).deviations < 6.0 or flush
    c[5, 7] += 0.5
    assert not within_bound(c, a, b, every)
    assert product_misfit(c, a, sums_of(b, dtype)).deviations > 6.0
