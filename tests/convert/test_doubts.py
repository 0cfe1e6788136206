"""Habits of scripts for DDP that change what is trained or written: each is told to a person, or converted rightly."""

from __future__ import annotations

import ast

import pytest

from outlast.convert import Conversion, convert

HEAD = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
"""
MIDDLE = """
dist.init_process_group("gloo")
local_rank = int(os.environ["LOCAL_RANK"])
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(data, batch_size=4, shuffle=True)
for epoch in range(3):
    for i, x in enumerate(loader):
"""
STEP = "loss = model(x).sum()\noptimizer.zero_grad()\nloss.backward()\noptimizer.step()\n"
ACCUMULATED = """loss = model(x).sum() / accum
loss.backward()
if (i + 1) % accum == 0:
    optimizer.step()
    optimizer.zero_grad()
"""


def script(before: str = "", turn: str = STEP, after: str = "", middle: str = MIDDLE) -> Conversion:
    turns = "".join(f"        {line}\n" for line in turn.splitlines())
    return convert(HEAD + before + middle + turns + after, processes=4)


def told(found: Conversion) -> set[int]:
    return {remark.line for remark in found.remarks if remark.kind == "by hand"}


def test_a_script_that_sets_no_seed_is_asked_for_one() -> None:
    """DDP and torchft give the first process's weights to the others."""
    assert [r.why.rpartition(": ")[2] for r in script().remarks if r.what == "no seed is set"] == [
        "torch.manual_seed(…) before the model"
    ]
    for before in (
        "g = torch.Generator().manual_seed(0)\n",
        "g = torch.Generator()\ng.manual_seed(0)\n",
        "import random\nimport numpy as np\nrandom.seed(1)\nnp.random.seed(1)\ntorch.cuda.manual_seed_all(1)\n",
    ):
        assert [r for r in script(before).remarks if r.what == "no seed is set"], before
    for before in (
        "torch.manual_seed(0)\n",
        "from torch import manual_seed as start\nstart(0)\n",
        "from mine import set_seed\nset_seed(3)\n",
    ):
        assert not [r for r in script(before).remarks if "seed" in r.what], before


@pytest.mark.parametrize(
    "before",
    [
        "def is_main_process():\n    return not dist.is_initialized() or dist.get_rank() == 0",
        "def size():\n    return 1 if not dist.is_available() else 2",
        "distributed = int(os.environ.get('WORLD_SIZE', 1)) > 1",
        "rank: int = dist.get_rank()",
        "torch.manual_seed(1 + dist.get_rank())",
        "lr = 0.1 * dist.get_world_size()",
        "if (r := int(os.getenv('RANK', '0'))) == 1: print(r)",
        "def main(rank, world_size):\n    if rank == 0: torch.save(1, 'a')",
        "def main(gpu):\n    net.to(gpu)",
        "mp.Process(target=print).start()",
        "mp.start_processes(print, nprocs=4)",
        "from utils import save_on_master\nsave_on_master(1)",
        "import utils\nutils.is_main_process()",
        "net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)",
        "kwargs = dict(sampler=DistributedSampler(data))\nother = DataLoader(data, **kwargs)",
        "other = DataLoader(data, worker_init_fn=seed)",
        "sampler = DistributedSampler(data, seed=3)\nother = DataLoader(data, sampler=sampler)",
        "from torch import distributed\ndistributed.all_gather_into_tensor(a, b)",
    ],
)
def test_what_is_left_of_processes_is_never_complete(before: str) -> None:
    found = script(before)
    first = len(HEAD.splitlines()) + 1
    assert told(found) & set(range(first, first + len(before.splitlines()))), found.remarks
    ast.parse(found.after)


@pytest.mark.parametrize(
    ("turn", "what"),
    [
        (STEP + "if i % 50 == 0:\n    scheduler.step()", "scheduler.step()"),
        (
            STEP.replace(
                "optimizer.step", "if epoch > 5:\n    clip_grad_norm_(model.parameters(), 1.0)\noptimizer.step"
            ),
            "clip",
        ),
        (STEP.replace("optimizer.step", "clip_grad_norm_(model.head.parameters(), 1.0)\noptimizer.step"), "clip"),
        (STEP + "ema.update_parameters(model)\nhistory.append(loss.detach())", "ema.update"),
        (STEP + "if i % 50 == 0:\n    validate(model)\nhistory.append(x.mean())", "if i % 50"),
        (ACCUMULATED + "    print('saved')", "accum"),
        (ACCUMULATED + "running = loss.item() * accum", "* accum"),
        (ACCUMULATED.replace(" / accum", ""), "not divided"),
        (ACCUMULATED.replace(" / accum", " / 10"), "/ 10"),
        (STEP + "if not local_rank:\n    print(1)", "local_rank"),
        (STEP + "if local_rank in (-1, 0):\n    print(1)", "local_rank"),
        (STEP + "torch.save(1, f'm-{local_rank}.pt')", "local_rank"),
        (STEP + "net.to(torch.device('cuda', local_rank))", "local_rank"),
    ],
)
def test_what_changes_the_training_is_never_complete(turn: str, what: str) -> None:
    found = script(turn=turn)
    assert what in " ".join(r.what for r in found.remarks if r.kind == "by hand")
    ast.parse(found.after)


@pytest.mark.parametrize(
    "loop",
    ["for epoch in tqdm(range(3)):", "for epoch in trange(3):", "for epoch in itertools.count():", "while epoch < 3:"],
)
def test_protect_is_never_in_a_loop(loop: str) -> None:
    assert not script(middle=MIDDLE.replace("for epoch in range(3):", loop)).complete


def reasons(found: Conversion) -> str:
    return " ".join(r.why for r in found.remarks if r.kind == "by hand")


def test_more_that_is_left_to_a_person() -> None:
    assert not script(after="    if acc > best:\n        best = acc\n").complete
    assert "carries it" in reasons(script(after="    if acc > best:\n        best = acc\n"))
    alone = "    if dist.get_rank() == 0:\n        acc = measure()\n        if acc > best:\n            best = acc\n"
    assert "one replica alone comes here" in reasons(script(after=alone))
    assert not script(middle=MIDDLE.replace("for epoch", "loader = tqdm(loader)\nfor epoch")).complete
    assert not script(after="print(len(loader.sampler))\n").complete


def test_what_can_be_converted_is() -> None:
    found = script("text = '''a\n\n\n\nb'''\naccum = 2", ACCUMULATED, "    data.set_epoch(epoch)\nn = len(loader)\n")
    assert found.complete, [r for r in found.remarks if r.kind == "by hand"]
    assert "text = '''a\n\n\n\nb'''" in found.after
    assert "loss = model(x).sum()\n" in found.after
    assert "data.set_epoch(epoch)" in found.after
    assert "n = -(-len(loader) // (4 * accum))" in found.after
    kept = script(turn=STEP.replace("optimizer.zero", "loss = loss / 10.0\noptimizer.zero"))
    assert kept.complete
    assert "loss = loss / 10.0" in kept.after
    moved = script(turn=STEP + "torch.load(p, map_location=f'cuda:{local_rank}')\nname = f'on cuda: {epoch}'")
    assert moved.complete
    assert "map_location=run.device" in moved.after
    assert "name = f'on cuda: {epoch}'" in moved.after


EPOCHS = "    now = evaluate(net)\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("stopper = EarlyStopping(3)", "    stopper(now)\n    if stopper.early_stop:\n        break\n"),
        ("stopper = EarlyStopping(3)\nstop = False", "    stop = stopper.step(now)\n    if stop:\n        break\n"),
        ("wait = 0", "    wait = 0 if now < 1 else wait + 1\n    if wait > 2:\n        break\n"),
        ("wait = 0", "    if now > 1:\n        wait += 1\n    print(now)\n    if wait > 2:\n        break\n"),
        ("history = []", "    history.append(now)\n    if history[-1] > history[0]:\n        break\n"),
        ("from mine import monitor", "    if monitor.should_stop:\n        break\n"),
        ("class Self: pass\nself = Self()\nself.early = Stopper()", "    if self.early.done(now):\n        break\n"),
    ],
)
def test_leaving_by_what_is_remembered_is_left_to_a_person(before: str, after: str) -> None:
    """A replica that joins remembers something else, and would leave after another step."""
    found = script(before + "\n", after=EPOCHS + after)
    [line] = [number for number, text in enumerate(found.before.split("\n"), 1) if text.strip() == "break"]
    assert line in told(found), found.remarks


@pytest.mark.parametrize("test", ["now < 0.1", "epoch > 1 and now < 1"])
def test_leaving_by_what_is_equal_on_all_is_to_be_looked_at(test: str) -> None:
    found = script("from mine import evaluate\n", after=f"{EPOCHS}    if {test}:\n        break\n")
    assert found.complete, found.remarks
    assert any(r.kind == "check" and r.what == "break" and "after the same step" in r.why for r in found.remarks)


@pytest.mark.parametrize(
    "draw", ["random.random()", "numpy.random.rand()", "torch.randn(2)", "torch.ones(2).uniform_()"]
)
def test_numbers_drawn_between_the_loops_are_left_to_a_person(draw: str) -> None:
    turn = STEP.replace("model(x)", "(scale * model(x))")
    found = script("import random, numpy\n", f"scale = {draw}\n{turn}")
    [line] = [number for number, text in enumerate(found.before.split("\n"), 1) if draw in text]
    assert line in told(found), found.remarks
    inside = script("import random, numpy\n", f"x = x * {draw}\n{STEP}")
    assert inside.complete, inside.remarks


def test_a_meter_is_told_of_microbatches() -> None:
    lines = STEP.splitlines()
    found = script("meter = Meter()\n", "\n".join([lines[0], "meter.update(loss.item(), len(x))", *lines[1:]]))
    assert any(r.kind == "check" and r.what.startswith("meter") and "step.metric" in r.why for r in found.remarks)
    behind = script("meter = Meter()\n", STEP + "meter.update(loss.item())\n")
    assert "meter.update(step.loss)" in behind.after
    assert not any(r.what.startswith("meter.update") for r in behind.remarks if r.kind == "check")


@pytest.mark.parametrize("word", ["finally", "except KeyboardInterrupt"])
def test_a_block_that_is_empty_now_has_something_in_it(word: str) -> None:
    found = script(after=f"try:\n    print(1)\n{word}:\n    dist.destroy_process_group()\n")
    assert found.complete, found.remarks
    assert f"{word}:\n    pass" in found.after


RESUMES = """
import os, torch
if os.path.exists("a.pt"):
    state = torch.load("a.pt")
    start = state["epoch"]
    {loads}
"""


def test_own_checkpoints_are_told_beside_those_that_a_run_keeps() -> None:
    save = "torch.save({'model': model.state_dict(), 'epoch': epoch}, 'a.pt')"
    told = script(RESUMES.format(loads="net.load_state_dict(state['model'])"), turn=STEP + save).remarks
    found = {r.what: (r.kind, "--checkpoint-dir" in r.why) for r in told if r.what.startswith("torch.")}
    assert found == {"torch.load(…)": ("check", True), "torch.save(…)": ("check", True)}
    only_data = script(RESUMES.format(loads="pass"), turn=STEP + save).remarks
    assert not [r for r in only_data if r.what.startswith("torch.")]
