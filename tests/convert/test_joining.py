"""A script that was converted in part, and changed by hand since, is gone on with: it joins once."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.convert import convert
from outlast.errors import ConfigError

SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
local_rank = int(os.environ["LOCAL_RANK"])
model = DDP(net.to(local_rank))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(data, batch_size=4, shuffle=True)
for epoch in range(3):
    for x in loader:
        loss = model(x).sum()
        optimizer.zero_grad()
        loss.backward()
        loss.backward()
        optimizer.step()
        print(dist.get_rank() == 0)
"""


@pytest.mark.parametrize("word", ["run", "the_run"])
def test_the_second_conversion_goes_on_from_the_first(word: str) -> None:
    half = convert(SCRIPT if word == "run" else f"run = 0\n{SCRIPT}", processes=4)
    assert not half.complete
    mended = half.after.replace("        loss.backward()\n", "", 1) + f"        print({word}.rank, {word}.size)\n"
    found = convert(mended, processes=4)
    assert found.complete, found.remarks
    assert found.after.count("outlast.join()") == found.after.count("import outlast\n") == 1
    assert f"\n{word} = outlast.join()\n" in found.after
    assert f"training = {word}.protect(model" in found.after
    assert found.after.count("import of_loader") == 1
    assert [r.what for r in found.remarks if r.kind == "added"] == [
        "from outlast.adapters.loaders import of_loader", "run.protect(…)",
    ]  # fmt: skip


def test_of_a_loop_that_is_not_understood_the_second_conversion_changes_nothing() -> None:
    half = convert((Path(__file__).parents[1] / "runtime" / "ddp_scripts" / "while_loop.py").read_text())
    assert convert(half.after).after == half.after


@pytest.mark.parametrize(
    "join",
    [
        "import outlast\nrun = outlast.join()\nrun = outlast.join()\n",
        "import outlast as o\ndef begin():\n    run = o.join()\n    return run\n",
        "from outlast import join\njoin()\n",
        "import outlast\nrun = other = outlast.join()\n",
        "import outlast\nrun = outlast.join()\ndef save(run): pass\n",
    ],
)
def test_a_join_that_is_not_understood_is_refused(join: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.py, line \d+: outlast\.join\(\) is called already"):
        convert(join + SCRIPT)
