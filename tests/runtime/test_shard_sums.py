"""Gradients summed over the ranks of a replica: the same bits whatever their number, and none of a library's adding."""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outlast.errors import ConfigError, StepMisuse
from outlast.runtime.exchange.shard_sums import ShardSums, sharded


def _module(file: str) -> Any:
    """A script beside this one."""
    name = f"outlast_{file}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{file}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.mark.process
@pytest.mark.campaign
def test_one_two_and_four_ranks_have_the_bits_of_one_plain_process(tmp_path: Path) -> None:
    """Shapes that do not divide, microbatches of unlike weights, four steps of AdamW."""
    training, start = _module("shard_training"), multiprocessing.get_context("fork")
    into, widths = start.SimpleQueue(), (1, 2, 4)
    ranks = [
        start.Process(target=training.report, args=(width, place, tmp_path / str(width), into))
        for width in widths
        for place in range(width)
    ]
    ranks.append(start.Process(target=training.report, args=(1, 0, None, into)))
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0] * len(ranks)
    found = [into.get() for _ in ranks]
    assert len({digest for _, _, digest in found}) == 1, found


def _in_a_fleet_of_one(shard: bool, into: Any) -> None:
    into.put(_module("sharded").train(5, shard, clip_norm=None)[1])


@pytest.mark.process
@pytest.mark.campaign
def test_a_fleet_of_one_trains_under_fsdp_with_the_bits_of_the_plain_model() -> None:
    """In processes of their own: a process group is a process's, once and for all."""
    start = multiprocessing.get_context("fork")
    into = start.SimpleQueue()
    for shard in (False, True):
        rank = start.Process(target=_in_a_fleet_of_one, args=(shard, into))
        rank.start()
        rank.join(120)
        assert rank.exitcode == 0
    plain, sharded_too = into.get(), into.get()
    assert plain["fingerprint"] == sharded_too["fingerprint"]
    assert plain["losses"] == sharded_too["losses"]


def test_the_order_of_the_sum_is_the_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four ranks, whose sum in any other order is another."""
    parts = torch.tensor([1e8, 1.0, -1e8, 1.0])
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda received, given, group: received.copy_(parts))
    sums, out = ShardSums(), torch.empty(1)
    sums.begin(1.0)
    sums(out, torch.zeros(4), SimpleNamespace(size=lambda: 4), None)
    assert out.item() == ((parts[0] + parts[1]) + (parts[2] + parts[3])).item() != parts.double().sum().item()
    sums.ended()


def test_what_would_depend_on_the_width_is_refused() -> None:
    sums = ShardSums()
    sums.begin(1.0)
    with pytest.raises(StepMisuse, match="no gradient of this microbatch"):
        sums.ended()
    with pytest.raises(ConfigError, match="the sum would depend on the number of ranks"):
        sums(torch.empty(1), torch.zeros(2, dtype=torch.bfloat16), None, None)
    plain = [("weight", torch.nn.Parameter(torch.zeros(2)))]
    assert not sharded(plain, 1)
    with pytest.raises(ConfigError, match="weight is not sharded by rows over the 2 ranks"):
        sharded(plain, 2)
