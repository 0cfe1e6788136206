"""A process that trains again and again alone, as a notebook does: no training leaves descriptors, threads or itself.

In each way that a loop may end.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import outlast
from outlast.checkpoint import LocalStore, heads

pytestmark = pytest.mark.usefixtures("training_here")
CLOSE = "to_the_end", "break", "raise"
"""What these leave, nothing can go on with: it is closed at once, and nothing waits for the collector."""
WAYS = *CLOSE, "break_amid", "raise_amid", "misuse", "never"


@pytest.fixture(autouse=True)
def _no_collector(training_here: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What goes by itself goes by references; and what a loop that is left amid a step owes the script is not said."""
    said = [outlast.errors.StepMisuse("said by nobody")]
    monkeypatch.setattr("outlast.runtime.loop._ending._unsaid", said, raising=False)
    gc.disable()
    yield
    gc.enable()


def train(way: str, model: torch.nn.Module, **more: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = outlast.join().protect(
        model, optimizer, list(torch.ones(16, 4)), global_batch_size=4, microbatches=2, seed=0, **more
    )
    for step in training.steps(until=3) if way != "never" else ():
        for batch in step:
            step.backward(model(batch).pow(2).mean())
            if step.number == 1 and way == "raise_amid":
                raise KeyError(way)
            if step.number == 1 and way == "misuse":
                step.backward(model(batch).pow(2).mean())
            if step.number == 1 and way == "break_amid":
                break
        if step.number == 1 and way == "raise":
            raise KeyError(way)
        if step.number == 1 and way in ("break", "break_amid"):
            break
    training.fingerprint()
    if way != "break_amid":
        training.evaluate([torch.ones(4)], lambda batch: {"loss": model(batch).sum()}, batch_size=1)


def trained(way: str, **more: Any) -> Any:
    """The model, if anything keeps it."""
    model = torch.nn.Linear(4, 2)
    try:
        train(way, model, **more)
    except (KeyError, outlast.errors.StepMisuse):
        assert way in ("raise", "raise_amid", "misuse")
    return weakref.ref(model)


def left() -> Counter[str]:
    """Descriptors of kinds that a training opens, by kind, and its threads by name."""
    found = Counter(thread.name for thread in threading.enumerate() if thread.name.startswith("outlast"))
    for number in os.listdir("/proc/self/fd"):
        try:
            file = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # of the listing itself
            continue
        found[file] += any(kind in file for kind in ("memfd", "eventfd", "socket", ".lock"))
    return found


def grown(way: str, collects: bool, folder: Path | None = None) -> Counter[str]:
    """What is there after the fifth training and was not after the second; nothing keeps any of them but the last.
    Each has a place of its own in `folder`, so that none resumes what another has saved."""
    gc.collect()
    models, before = [], Counter[str]()
    for number in range(5):
        keep = "off" if folder is None else outlast.Checkpoint(dir=str(folder / str(number)), every=1)
        models.append(trained(way, checkpoint=keep))
        if collects:
            outlast.join()  # what an exception left to be saved has waited for this
            gc.collect()
        if number == 1:
            before = left()
    after = left() - before
    gc.collect()
    assert [model() for model in models[:-1]] == [None] * 4
    return after


@pytest.mark.parametrize("outlast_is", ["on", "off"])
@pytest.mark.parametrize("way", WAYS)
def test_a_training_alone_leaves_nothing(way: str, outlast_is: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST", outlast_is)
    assert not grown(way, collects=way not in CLOSE)


@pytest.mark.parametrize("outlast_is", ["on", "off"])
@pytest.mark.parametrize("way", ["to_the_end", "break", "raise"])
def test_one_with_checkpoints_leaves_nothing(
    way: str, outlast_is: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTLAST", outlast_is)
    monkeypatch.setattr("outlast.runtime.saving.unsaved._found", [])
    found = grown(way, collects=True, folder=tmp_path)
    assert all(number < 3 for number in found.values()), found  # of three trainings; a save's thread may still hold one


def test_what_an_exception_left_is_saved_when_the_process_trains_anew(tmp_path: Path) -> None:
    """The script has not ended by it."""
    trained("raise", checkpoint=outlast.Checkpoint(dir=str(tmp_path), every=100))
    assert not heads(LocalStore(str(tmp_path)))[0]
    outlast.join()
    assert [head.step for head in heads(LocalStore(str(tmp_path)))[0]] == [2]
