"""Scripts for torchrun and DDP, converted as text: what becomes of each habit, and what is left to a person."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from tests.convert.scripts import IMPORTS, LOOP

from outlast.cli import main
from outlast.convert import Conversion, convert
from outlast.errors import ConfigError

SCRIPTS = Path(__file__).parents[1] / "runtime" / "ddp_scripts"
PLAIN = (
    f"\nimport os{IMPORTS}import torch.distributed as dist\n"
    + '{before}\ndist.init_process_group("gloo")'
    + LOOP
    + "{after}\n"
)


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


def test_of_a_while_loop_the_rest_is_converted_and_each_line_of_the_loop_is_named() -> None:
    found = convert((SCRIPTS / "while_loop.py").read_text())
    assert not found.complete
    assert "dataset=range(N)" in by_hand(found)
    ast.parse(found.after)
    assert "the_run" not in found.after
    assert "run = outlast.join()" in found.after
    assert not {"DDP", "init_process_group", "ddp_rank", "of_loader"} & set(found.after.replace("(", " ").split())
    begin = found.before.index("X = get_batch()")
    assert found.after.endswith(found.before[begin:]), "the loop is as it was"
    lines = found.before.splitlines()
    told = {lines[r.line - 1].strip() for r in found.remarks if r.kind == "by hand"}
    assert told >= {
        "while True:", "for _ in range(4):", "loss.backward()", "optimizer.step()",
        "optimizer.zero_grad(set_to_none=True)", "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "break",
    }  # fmt: skip


def test_of_two_backwards_the_rest_is_converted() -> None:
    found = plain(
        before="rank = dist.get_rank()",
        first="if x is None: continue",
        last="scaler.update(); scheduler.step(); other.backward()",
        after="if rank == 0:\n    torch.save(model.module.state_dict(), 'x')",
    )
    assert not found.complete
    assert "if run.is_writer:\n    torch.save(model.state_dict(), 'x')" in found.after
    assert "model = torch.nn.Linear(2, 2)" in found.after
    told = by_hand(found)
    for word in (
        "2 calls of backward()",
        "0.0 * loss",
        "protect(scaler=scaler)",
        "protect(scheduler=…)",
        "for x in loader:",
    ):
        assert word in told


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])", ""),
        ("rank, world = dist.get_rank(), dist.get_world_size()", ""),
        ("(rank, local) = dist.get_rank(), int(os.environ['LOCAL_RANK'])", "local = run.device"),
        ("rank, seed, first = dist.get_rank(), 7, rank == 0", "seed = 7"),
        ("seed, [a, b] = 7, (1, 2)", "seed, [a, b] = 7, (1, 2)"),
        ("(local,) = (int(os.environ['LOCAL_RANK']),)", "local = run.device"),
        ("[local] = [int(os.environ['LOCAL_RANK'])]", "local = run.device"),
    ],
)
def test_ranks_that_are_given_among_others(line: str, becomes: str) -> None:
    found = plain(before=line, last="if rank == 0 and epoch: print(epoch)" if "rank" in line else "pass")
    assert found.complete, by_hand(found)
    between = found.after[found.after.index("run = outlast.join()") :].splitlines()
    assert becomes in between
    assert "world" not in found.after
    assert "rank" not in found.after.lower().replace("import", "")
    if "rank" in line:
        assert "if run.is_writer and epoch" in found.after


@pytest.mark.parametrize(
    ("place", "habit", "told"),
    [
        ("before", "rank = dist.get_rank()\ntorch.manual_seed(rank)", "rank is used"),
        ("before", "args.local_rank + 1", "args.local_rank is used"),
        ("before", "if int(os.environ['RANK']) == 0: print('begin')", "before the first step"),
        ("first", "if x is None: continue", "0.0 * loss"),
        ("last", "if loss.item() < 0.1: break", "training.stop"),
        ("last", "norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))", "step.grad_norm"),
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


TORCHFT = """
import os
import torch
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from torch.utils.data import DataLoader


def main():
    group = int(os.environ.get("REPLICA_GROUP_ID", 0))
    sampler = DistributedSampler(data, replica_group_id=group, num_replica_groups=2, rank=0, num_replicas=1)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    inner = torch.nn.Linear(2, 2)
    adam = torch.optim.AdamW(inner.parameters())
    manager = Manager(pg=ProcessGroupGloo(), load_state_dict=load, state_dict=save)
    model = DistributedDataParallel(manager, inner)
    optimizer = Optimizer(manager, adam)
    for epoch in range(3):
        for x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            print(manager.current_step())


main()
"""


def test_of_torchft_the_model_and_the_optimizer_are_kept_and_its_manager_is_named() -> None:
    found = convert(TORCHFT, processes=2)
    assert "    model = inner\n    optimizer = adam\n" in found.after
    assert "protect(model, optimizer, **of_loader(loader, microbatches=2))" in found.after
    told = [(found.before.splitlines()[r.line - 1].split()[0], r.why) for r in found.remarks if r.kind == "by hand"]
    assert [line for line, why in told if "torchft" in why] == ["manager", "print(manager.current_step())"]
    assert [line for line, why in told if "torchft" not in why] == ["group"]


def test_a_function_that_is_called_once_trains_one_epoch_and_twice_is_left_to_a_person() -> None:
    head, loop = PLAIN.split("for epoch in range(3):")
    body = loop.format(first="pass", last="pass", after="")
    once = head.format(before="") + "def train():" + body + "\ntrain()\n"
    assert convert(once).complete, by_hand(convert(once))
    assert "training.steps(until=training.steps_per_epoch)" in convert(once).after
    assert "is called 2 times" in by_hand(convert(once + "train()\n"))
    assert "is called 1 times" in by_hand(convert(once.replace("\ntrain()", "\nwhile True: train()")))


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


def test_the_next_command_is_for_as_many_processes_as_were_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text((SCRIPTS / "flat.py").read_text())
    assert main(["convert", str(script), "--processes", "3"]) == 0
    assert capsys.readouterr().out.endswith(f"then: outlast convert {script} --processes 3 --write\n")
    assert main(["convert", str(script), "--processes", "3", "--write"]) == 0
    assert capsys.readouterr().out.endswith(f"Next: outlast run --replicas 3 {script}\n")


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
    part = tmp_path / "part.py"
    assert main(["convert", str(script), "--output", str(part)]) == 1
    assert f"{part} is what was converted, with that still to do" in capsys.readouterr().out
    assert part.read_text() == convert(script.read_text()).after
    assert main(["convert", str(script), "--output", str(part)]) == 2  # it is there


def test_where_the_output_cannot_be_written_the_script_is_as_it_was_and_what_was_found_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script, output = tmp_path / "train.py", tmp_path / "new.py"
    before = (SCRIPTS / "flat.py").read_bytes().replace(b"\n", b"\r\n")
    script.write_bytes(before)
    for taken in (script, tmp_path / "none" / "new.py", tmp_path / "train.py.orig"):
        assert main(["convert", str(script), "--write", "--output", str(taken)]) == 2
        assert script.read_bytes() == before
        told = capsys.readouterr()
        assert "run.protect(…)" in told.out
        assert "is converted" not in told.out
    (tmp_path / "train.py.orig").unlink()
    assert main(["convert", str(script), "--write", "--json", "--output", str(script)]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2
    assert script.read_bytes() == before

    def full(text: str) -> int:
        raise OSError(28, "No space left on device")

    opened = Path.open

    def on_a_full_disk(path: Path, *args: Any, **kwargs: Any) -> Any:
        file = opened(path, *args, **kwargs)
        if path == output:
            file.write = full
        return file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", on_a_full_disk)
        assert main(["convert", str(script), "--write", "--output", str(output)]) == 2
    assert not output.exists()
    assert script.read_bytes() == before
    assert main(["convert", str(script), "--write", "--output", str(output)]) == 0
    assert output.read_bytes() == script.read_bytes()
    assert output.read_bytes().count(b"\r\n") == output.read_bytes().count(b"\n") > 0


def test_a_script_without_ddp_is_converted_completely() -> None:
    """The only thing whose parameters are asked for is the model; `module` is a name of its own there."""
    script = PLAIN.replace("DDP(torch.nn.Linear(2, 2))", "torch.nn.Linear(2, 2)").replace(
        'dist.init_process_group("gloo")', ""
    )
    text = script.format(before="data = Rows()", first="pass", last="pass", after="print(model.module)")
    found = convert(
        text.replace(
            "        optimizer.step()", "        clip_grad_norm_(model.parameters(), 1.0)\n        optimizer.step()"
        )
    )
    assert [r for r in found.remarks if r.kind == "by hand"] == []
    assert "protect(model, optimizer, " in found.after
    assert "clip_norm=1.0" in found.after
    assert "print(model.module)" in found.after
    two = convert(text.replace("print(model.module)", "print(other.parameters())"))
    assert "0 models are known here" in "".join(r.what for r in two.remarks if r.kind == "by hand")


def test_what_is_no_script_is_refused() -> None:
    with pytest.raises(ConfigError, match="line 1"):
        convert("for x in:")


NORM = """
loss = model(x).sum()
optimizer.zero_grad()
loss.backward()
{clip}
optimizer.step()
{after}
"""


def normed(clip: str, after: str) -> Conversion:
    turn = "".join(f"        {line}\n" for line in NORM.format(clip=clip, after=after).strip().splitlines())
    head, _, _ = LOOP.partition("        {first}")
    return convert(f"import torch.distributed as dist{IMPORTS}{head}{turn}", processes=4)


@pytest.mark.parametrize("after", ["{}", "scheduler.step()\n{}", "norm = {}"])
def test_clipping_behind_the_step_is_not_made_to_clip(after: str) -> None:
    """There it did nothing; as an argument of protect it would."""
    found = normed("pass", after.format("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"))
    assert "clip_norm" not in found.after
    assert any("stands behind the optimizer's step" in r.why for r in found.remarks if r.kind == "by hand")


def test_the_norm_that_clipping_gave_is_the_step_s() -> None:
    clip = "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)"
    found = normed(clip, "print(norm, norm.item())")
    assert found.complete, by_hand(found)
    assert "clip_norm=0.5" in found.after
    assert "        norm = step.grad_norm\n        print(norm, norm)\n" in found.after


@pytest.mark.parametrize(
    ("clip", "after", "words"),
    [
        ("norm = clip_grad_norm_(model.parameters(), 1.0)", "log(norm.detach())", "norm is a number now"),
        ("norm = clip_grad_norm_(model[0].parameters(), 1.0)", "pass", "clips the gradient of the whole model"),
        ("norms.append(clip_grad_norm_(model.parameters(), 1.0))", "pass", "step.grad_norm behind the loop"),
        ("norm = clip_grad_norm_(model.parameters(), 1.0, 1)", "pass", "step.grad_norm behind the loop"),
        ("norm = 2 * clip_grad_norm_(model.parameters(), 1.0)", "pass", "step.grad_norm behind the loop"),
    ],
)
def test_a_norm_that_is_used_otherwise_is_left_to_a_person(clip: str, after: str, words: str) -> None:
    found = normed(clip, after)
    assert not found.complete
    assert words in by_hand(found)
