"""One run at a time saves in a directory; a lock dies with its process; readers and pruning are let in."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import outlast
from outlast.checkpoint import CheckpointEngine, LocalStore, verify
from outlast.checkpoint.occupancy import occupants, occupy
from outlast.cli import main
from outlast.errors import ConfigError

LIVES = """
import sys, threading
from outlast.checkpoint.occupancy import occupy
held = occupy(sys.argv[1], sys.argv[2], wait_s=0.0)
print("in", flush=True)
threading.Event().wait()
"""


class Runs:
    """Processes that hold a directory until they are killed."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(self, place: pathlib.Path, run: str) -> subprocess.Popen[str]:
        one = subprocess.Popen([sys.executable, "-c", LIVES, str(place), run], stdout=subprocess.PIPE, text=True)
        self.started.append(one)
        assert one.stdout is not None
        assert one.stdout.readline() == "in\n"
        return one

    def kill(self, one: subprocess.Popen[str]) -> None:
        os.kill(one.pid, signal.SIGKILL)
        one.communicate(timeout=20)


@pytest.fixture
def runs() -> Iterator[Runs]:
    runs = Runs()
    yield runs
    for one in runs.started:
        if one.poll() is None:
            runs.kill(one)


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((5000,), value), "same": torch.arange(3000.0)}


def save(place: pathlib.Path, *steps: int) -> None:
    engine = CheckpointEngine(str(place))
    for step in steps:
        handle = engine.save(step, state(float(step)))
        assert handle is not None
        engine.commit(handle)
    engine.close()


@pytest.mark.process
def test_a_second_live_run_is_refused_and_one_that_was_killed_is_not_in_the_way(
    tmp_path: pathlib.Path, runs: Runs
) -> None:
    first = runs.start(tmp_path, "one")
    (tmp_path / ".live" / "notes").write_text("a stranger's")
    with pytest.raises(ConfigError, match=rf"run one, process {first.pid} on") as caught:
        occupy(str(tmp_path), "two", wait_s=0.0)
    assert "its own --checkpoint-dir" in caught.value.remedy
    with pytest.raises(ConfigError):
        occupy(f"file://{tmp_path}", "two", wait_s=0.0)
    runs.start(tmp_path, "one")  # another process of the same run
    assert {o.run for o in occupants(str(tmp_path))} == {"one"}
    for one in runs.started:
        runs.kill(one)
    held = occupy(str(tmp_path), "two", wait_s=0.0)
    assert [(o.run, o.pid) for o in occupants(str(tmp_path))] == [("two", os.getpid())]
    assert len(list((tmp_path / ".live").glob("run-*"))) == 1, "dead processes leave nothing"
    assert (tmp_path / ".live" / "notes").exists(), "what is not ours is not touched"
    ended = os.fork()
    if not ended:  # a worker, say
        held.leave()  # as its exit does
        os._exit(0)
    os.waitpid(ended, 0)
    assert [o.run for o in occupants(str(tmp_path))] == ["two"], "a fork does not end what its parent holds"
    held.leave()
    runs.start(tmp_path, "three")


@pytest.mark.process
def test_a_run_that_is_just_ending_is_waited_for(tmp_path: pathlib.Path, runs: Runs) -> None:
    first = runs.start(tmp_path, "one")
    signal.signal(signal.SIGALRM, lambda *_: os.kill(first.pid, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    occupy(str(tmp_path), "two", wait_s=30.0).leave()
    assert first.wait(10.0) == -signal.SIGKILL, "it was let in when the other had ended, not before"


@pytest.mark.process
def test_training_where_another_run_saves_is_refused_before_it_begins(
    tmp_path: pathlib.Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outlast.checkpoint.occupancy._WAIT_S", 0.0)
    first = runs.start(tmp_path, "one")
    for mode in ("on", "off"):
        monkeypatch.setenv("OUTLAST", mode)
        model = torch.nn.Linear(2, 2)
        with pytest.raises(ConfigError, match="another run saves at"):
            outlast.join().protect(
                model, torch.optim.SGD(model.parameters(), lr=0.1), list(torch.ones(8, 2)), global_batch_size=4,
                microbatches=2, seed=0, checkpoint=outlast.Checkpoint(dir=str(tmp_path)),
            )  # fmt: skip
    assert first.poll() is None


@pytest.mark.process
def test_readers_and_pruning_are_let_in_and_pruning_leaves_what_a_live_run_may_refer_to(
    tmp_path: pathlib.Path, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = CheckpointEngine(str(tmp_path), retention=outlast.checkpoint.Retention(keep_last=50))
    for step in range(12):
        handle = engine.save(step, state(float(step)))
        assert handle is not None
        engine.commit(handle)
    live = runs.start(tmp_path, "one")
    under_way = engine.save(20, state(3.0))  # refers to what the newest generation holds
    assert under_way is not None
    for args in (["ls"], ["verify"], ["show"]):
        assert main(["ckpt", *args, str(tmp_path)]) == 0
    assert main(["ckpt", "export", str(tmp_path), str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert main(["ckpt", "prune", str(tmp_path), "--keep-last", "1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["generations"] == [0, 1, 2, 3]
    assert "run one saves here" in said["note"]
    assert engine.commit(under_way) == 12
    assert verify(LocalStore(str(tmp_path)), 12).problems == []
    engine.close()
    runs.kill(live)
    assert main(["ckpt", "prune", str(tmp_path), "--keep-last", "1"]) == 0
    assert LocalStore(str(tmp_path)).generations() == [12]


def test_places_without_locks_refuse_nobody(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    occupy("memory://x", "one").leave()
    (tmp_path / "file").write_text("")
    occupy(str(tmp_path / "file" / "below"), "one", wait_s=0.0).leave()

    def none(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", none)
    occupy(str(tmp_path), "one", wait_s=0.0).leave()
    assert occupants(str(tmp_path)) == []
