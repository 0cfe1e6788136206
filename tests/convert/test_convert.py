"""Scripts for torchrun and DDP, converted as text: what becomes of each habit, and what is left to a person."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from outlast.cli import main
from outlast.convert import Conversion, convert
from outlast.errors import ConfigError

SCRIPTS = Path(__file__).parents[1] / "runtime" / "ddp_scripts"
PLAIN = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
{before}
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(data, batch_size=4, shuffle=True)
for epoch in range(3):
    for x in loader:
        {first}
        loss = model(x).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        {last}
{after}
"""


def plain(before: str = "", first: str = "pass", last: str = "pass", after: str = "") -> Conversion:
    return convert(PLAIN.format(before=before, first=first, last=last, after=after), processes=4)


def by_hand(found: Conversion) -> str:
    return "; ".join(f"{r.what}: {r.why}" for r in found.remarks if r.kind == "by hand")


@pytest.mark.parametrize("name", ["trainer_class", "images", "flat"])
def test_usual_scripts_are_converted_completely(name: str) -> None:
    found = convert((SCRIPTS / f"{name}.py").read_text(), processes=4)
    assert found.complete, by_hand(found)
    read = {node.id for node in ast.walk(ast.parse(found.after)) if isinstance(node, ast.Name)}
    called = {node.attr for node in ast.walk(ast.parse(found.after)) if isinstance(node, ast.Attribute)}
    assert not read & {"DDP", "DistributedDataParallel", "DistributedSampler", "dist", "init_process_group"}
    assert not called & {"zero_grad", "clip_grad_norm_", "set_epoch", "module", "barrier"}
    assert {"join", "protect", "epochs", "is_writer"} <= called
    kept = [line.strip() for line in found.before.splitlines() if line.strip().startswith(("#", "print(", "def "))]
    lost = [line for line in kept if line not in found.after and "{" not in line and "len(" not in line]
    assert lost in ([], ["def ddp_setup():"])


def test_a_while_loop_is_explained_and_nothing_is_changed() -> None:
    found = convert((SCRIPTS / "while_loop.py").read_text())
    assert found.before == found.after
    assert not found.complete
    assert found.diff() == ""
    assert "dataset=range(N)" in by_hand(found)
    assert "protect(clip_norm=…)" in by_hand(found)


@pytest.mark.parametrize(
    ("place", "habit", "told"),
    [
        ("before", "rank = dist.get_rank()\ntorch.manual_seed(rank)", "rank is used"),
        ("before", "args.local_rank + 1", "args.local_rank is used"),
        ("before", "if int(os.environ['RANK']) == 0: print('begin')", "before the first step"),
        ("first", "if x is None: continue", "0.0 * loss"),
        ("last", "if loss.item() < 0.1: break", "training.stop"),
        ("last", "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "step.grad_norm"),
        ("last", "dist.all_reduce(loss)", "step.metric"),
        ("last", "other.step()", "a second optimizer"),
        ("last", "scheduler.step(loss)", "stepped in the loop"),
        ("first", "x = x + 1; count = 0; count += 1; y = x", "differ from replica to replica"),
        ("after", "loss.backward()", "2 calls of backward()"),
        ("after", "torch.multiprocessing.spawn(main, nprocs=4)", "outlast run starts them"),
    ],
)
def test_what_is_not_understood_is_left_to_a_person(place: str, habit: str, told: str) -> None:
    found = plain(**{place: habit})
    assert told in by_hand(found)
    ast.parse(found.after)


def test_names_lengths_and_counters() -> None:
    """Names that the script has are not taken; what a loader's length and a counter meant is kept, or said."""
    found = plain(
        before="run = step = 0\ntext = '''\nfor x in loader:\n'''",
        last="step += 1",
        after="total = len(loader) * 3",
    )
    assert found.complete, by_hand(found)
    assert "the_run = outlast.join()" in found.after
    assert "for the_step in steps:" in found.after
    assert "total = -(-len(loader) // 4) * 3" in found.after
    assert "\nfor x in loader:\n'''" in found.after
    assert [r.what for r in found.remarks if "carried" in r.what] == ["step is carried from turn to turn"]
    body = found.after[found.after.index("the_step.backward(loss)") :].splitlines()
    assert body[1] == "        step += 1"


@pytest.mark.parametrize(
    ("header", "lines"),
    [
        ("for i, x in enumerate(loader):", ["for step in steps:", "i = step.number % len(steps)"]),
        ("for i, x in enumerate(tqdm(loader), 1):", ["for step in tqdm(steps):", "i = step.number % len(steps) + 1"]),
        ("for x in tqdm(loader, desc='a'):", ["for step in tqdm(steps, desc='a'):"]),
    ],
)
def test_who_comes_in_amid_an_epoch_counts_like_the_others(header: str, lines: list[str]) -> None:
    found = convert(PLAIN.replace("for x in loader:", header).format(before="", first="pass", last="pass", after=""))
    assert found.complete, by_hand(found)
    at = [line.strip() for line in found.after.splitlines()]
    start = at.index(lines[0])
    assert at[start : start + len(lines)] == lines
    wrapped = PLAIN.replace("for x in loader:", "for i, x in tqdm(enumerate(loader)):")
    assert not convert(wrapped.format(before="", first="pass", last="pass", after="")).complete


def test_epochs_that_count_from_one() -> None:
    found = convert(PLAIN.replace("range(3)", "range(1, n + 1)").format(before="", first="pass", last="pass", after=""))
    assert "for steps in training.epochs(n + 1 - 1):\n    epoch = steps.number + 1\n" in found.after


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    before = (SCRIPTS / "flat.py").read_text()
    script.write_text(before)
    assert main(["convert", str(script), "--json", "--processes", "2"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (told["complete"], told["written"]) == (True, False)
    assert {"line", "kind", "what", "why"} == set(told["remarks"][0])
    assert script.read_text() == before
    assert main(["convert", str(script), "--write", "--processes", "2"]) == 0
    assert (tmp_path / "train.py.orig").read_text() == before
    assert "microbatches=2 * accum" in script.read_text()
    assert main(["convert", str(script), "--write"]) == 2  # it is converted
    script.write_text(before)
    assert main(["convert", str(script), "--write"]) == 2  # what was kept is not written over
    assert script.read_text() == before
    other = tmp_path / "windows.py"
    other.write_bytes(before.replace("\n", "\r\n").encode())
    was = other.read_bytes()
    assert main(["convert", str(other), "--write", "--processes", "2"]) == 0
    assert (tmp_path / "windows.py.orig").read_bytes() == was
    assert other.read_bytes().count(b"\r\n") == other.read_bytes().count(b"\n")
    script.write_text((SCRIPTS / "while_loop.py").read_text())
    assert main(["convert", str(script), "--write"]) == 1
    assert "by hand" in capsys.readouterr().out
    assert script.read_text() == (SCRIPTS / "while_loop.py").read_text()


def test_what_is_no_script_is_refused() -> None:
    with pytest.raises(ConfigError, match="line 1"):
        convert("for x in:")
