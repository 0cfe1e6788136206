"""Gradients summed over the ranks of a replica: the same bits whatever their number, and none of a library's adding."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outlast.errors import ConfigError, StepMisuse
from outlast.runtime.exchange.shard_sums import ShardSums, sharded

HERE = Path(__file__).parent


@pytest.mark.process
@pytest.mark.campaign
def test_one_two_and_four_ranks_have_the_bits_of_one_plain_process(tmp_path: Path) -> None:
    """Shapes that do not divide, microbatches of unlike weights, four steps of AdamW."""
    ranks = [(width, place, str(tmp_path / str(width))) for width in (1, 2, 4) for place in range(width)]
    started = [_rank(*given) for given in [(1, 0), *ranks]]
    try:
        found = [rank.communicate(timeout=300)[0].strip() for rank in started]
    finally:
        for rank in started:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in started] == [0] * len(started)
    assert len(set(found)) == 1, found
    assert len(found[0]) == 64


def _rank(*given: object) -> Any:
    """A process that has nothing of this one: torch's threads, here, would not survive a fork."""
    script = [sys.executable, str(HERE / "shard_training.py"), *map(str, given)]
    return subprocess.Popen(script, stdout=subprocess.PIPE, text=True)


@pytest.mark.process
@pytest.mark.campaign
def test_a_fleet_of_one_trains_under_fsdp_with_the_bits_of_the_plain_model(tmp_path: Path) -> None:
    """In processes of their own: a process group is a process's, once and for all."""
    found = []
    for number, how in enumerate(([], ["--whole"])):
        out = tmp_path / str(number)
        out.mkdir()
        script = [sys.executable, str(HERE / "sharded.py"), "--steps", "5", "--unclipped", "--out", str(out), *how]
        subprocess.run(script, check=True, timeout=300)
        (file,) = out.glob("*.json")
        found.append(json.loads(file.read_text()))
    sharded_too, plain = found
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
