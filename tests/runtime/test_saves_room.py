"""Places that are full, read only or gone: said before the first save, room made in them, an end with its own code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import outlast
from outlast.checkpoint import LocalStore, heads, verify
from outlast.core import events as ev
from outlast.errors import EnvironmentFault
from outlast.journal import Journal
from outlast.runtime.saving import unsaved as _unsaved

here = pytest.mark.usefixtures("training_here")


def mounted(place: Path, *options: str) -> None:
    done = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB: two generations of the state below fit, three do not."""
    place = tmp_path / "small"
    place.mkdir()
    mounted(place, "-t", "tmpfs", "-o", "size=3000k", "tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


SCRIPT = """
import os, shutil, sys, time
import torch, outlast
place, gone_at = sys.argv[1], int(sys.argv[2])
model = torch.nn.Linear(570, 570)
rows = list(torch.randn(8, 570, generator=torch.Generator().manual_seed(1)))
run = outlast.join()
training = run.protect(
    model, torch.optim.SGD(model.parameters(), lr=0.01), rows, global_batch_size=4, microbatches=2,
    checkpoint=outlast.Checkpoint(dir=place, every=2, timeout_s=20))
def saved():
    from outlast.checkpoint import LocalStore, heads
    return max((head.step for head in heads(LocalStore(place))[0]), default=0)
for step in training.steps(until=12):
    # a busy machine saves fewer steps than are asked for; and what begins a step late is stable one step later
    until_s = time.monotonic() + 5
    while os.environ.get("WAITS") and saved() < step.number - 2 and time.monotonic() < until_s:
        time.sleep(0.005)
    for batch in step:
        step.backward(model(batch).pow(2).mean())
    if step.number == gone_at and run.is_writer:
        for turn in range(1000):  # a save that had begun may make the directory again
            if os.path.isdir(place):
                os.rename(place, f"{place}.gone{turn}")
            try:
                open(place, "w").close()
                break
            except IsADirectoryError:
                pass
print("the script's own end", flush=True)
"""


def ended(folder: Path, place: Path, gone_at: int, *, replicas: int, **environ: str) -> Any:
    import os

    (folder / "train.py").write_text(SCRIPT)
    run = ["-m", "outlast", "run", "--replicas", str(replicas), "--run-dir", str(folder / "run")] if replicas else []
    command = [sys.executable, *run, str(folder / "train.py"), str(place), str(gone_at)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, **environ})


def newest(place: Path) -> int:
    store = LocalStore(str(place))
    found = heads(store)[0]
    assert all(verify(store, head.generation).problems == [] for head in found)
    return found[0].step


@pytest.mark.process
@pytest.mark.parametrize("off", [False, True])
def test_a_full_disk_gives_up_older_generations_for_newer_ones(small: Path, off: bool) -> None:
    done = ended(small.parent, small / "c", -1, replicas=0, OUTLAST="off" if off else "on")
    assert (done.returncode, newest(small / "c")) == (0, 12), done.stderr


@pytest.mark.process
def test_a_fleet_on_a_full_disk_goes_on_saving(small: Path) -> None:
    done = ended(small.parent, small / "c", -1, replicas=2, WAITS="1")
    assert (done.returncode, newest(small / "c")) == (0, 12), done.stdout + done.stderr
    with Journal.open_reader(small.parent / "run") as journal:
        texts = [entry.event.text for entry in journal.events(kinds=[ev.Notice])]  # type: ignore[union-attr]
        assert any("is full: 1 of its generations stay, not 3" in text for text in texts)


@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.parametrize("replicas", [0, 2])
@pytest.mark.parametrize("off", [False, True])
def test_a_run_whose_newest_steps_are_nowhere_ends_with_a_code_of_its_own(
    tmp_path: Path, replicas: int, off: bool
) -> None:
    if replicas and off:
        pytest.skip("OUTLAST=off has no replicas")
    place = tmp_path / "c"
    done = ended(tmp_path, place, 5, replicas=replicas, OUTLAST="off" if off else "on")
    assert done.returncode == 10, done.stdout + done.stderr
    assert "the script's own end" in done.stdout
    assert f"step 12 is in no checkpoint at {place}" in done.stderr
    assert "Traceback" not in done.stderr
    if replicas:
        with Journal.open_reader(tmp_path / "run") as journal:
            (end,) = (entry.event for entry in journal.events(kinds=[ev.RunFinished]))
        assert (end.outcome, end.exit_code, end.steps) == ("finished", 10, 12)  # type: ignore[union-attr]


@here
@pytest.mark.parametrize("off", [False, True])
def test_a_place_that_cannot_be_written_is_told_before_anything_is_trained(
    small: Path, off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if off:
        monkeypatch.setenv("OUTLAST", "off")
    mounted(small, "-o", "remount,ro")
    with pytest.raises(EnvironmentFault, match=r"cannot be written to .*: Read-only file system"):
        next(train_here(small / "c"))
    ended_early = subprocess.run(
        [sys.executable, "-m", "outlast", "run", "--checkpoint-dir", str(small / "c"), __file__],
        capture_output=True, text=True, timeout=60, cwd=small.parent,
    )  # fmt: skip
    if not off:
        assert (ended_early.returncode, ended_early.stdout) == (3, "")
        assert "Read-only file system" in ended_early.stderr


@here
def test_a_place_without_room_for_one_generation_is_told_at_the_start(
    small: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (small / "other").write_bytes(b"x" * 2_500_000)
    next(train_here(small / "c"))
    assert "a generation takes at least 1.2" in capfd.readouterr().err
    _unsaved.forget()


def train_here(place: Path) -> Iterator[int]:
    model = torch.nn.Linear(570, 570)
    training = outlast.join().protect(
        model, torch.optim.SGD(model.parameters(), lr=0.1), list(torch.randn(4, 570)), global_batch_size=4,
        microbatches=2, checkpoint=outlast.Checkpoint(dir=str(place), every=100),
    )  # fmt: skip
    for step in training.steps(until=100):
        for batch in step:
            step.backward(model(batch).mean())
        yield step.number
        return
