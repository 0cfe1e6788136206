"""What happens around a script before it trains: other launchers, other directories, other versions of itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outlast.core import events as ev
from outlast.prove._drive import Driven

from .conftest import SCRIPT as SCENARIO
from .conftest import Fleet

pytestmark = pytest.mark.process

SCRIPT = """
import json, os, pathlib, sys
import torch
import outlast
{first}
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
data = [torch.randn(4) for _ in range(64)]
run = outlast.join()
{then}
training = run.protect(
    model, torch.optim.SGD(model.parameters(), lr=0.01), data, global_batch_size=8, microbatches=4
)
out = pathlib.Path(sys.argv[1])
for step in training.steps(until=int(sys.argv[2])):
    for batch in step:
        step.backward(model(batch).square().mean())
    (out / f"{{run.name}}.at").write_text(str(step.number))
    while (out / f"hold{{step.number}}").exists():
        outlast.pause(60.0)
(out / f"{{run.name}}.end").write_text(training.fingerprint())
"""


def _write(path: Path, first: str = "", then: str = "") -> Path:
    path.write_text(SCRIPT.format(first=first, then=then))
    return path


def _at(out: Path, replica: str, step: int) -> Callable[[], bool]:
    def reached() -> bool:
        file = out / f"{replica}.at"
        return file.exists() and file.read_text() == str(step)

    return reached


def _run(cwd: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("OUTLAST_")}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=cwd, env=inherited | environ, capture_output=True, text=True, timeout=100)


def test_a_relative_directory_is_where_the_run_was_started_whatever_the_script_does(tmp_path: Path) -> None:
    """A script that changes its directory, to another one each time, saves and resumes in one place."""
    script = _write(
        tmp_path / "train.py",
        first="import tempfile; os.chdir(tempfile.mkdtemp(dir=os.path.dirname(os.path.abspath(__file__))))",
    )
    for steps in ("3", "6"):
        words = ["-m", "outlast", "run", "--json", "--checkpoint-dir", "ck", str(script), str(tmp_path), steps]
        done = _run(tmp_path, *words)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "ck").is_dir()
    assert "begins with step 3" in _run(tmp_path, "-m", "outlast", "why", "outlast-runs").stdout


def test_directories_that_differ_from_replica_to_replica_are_refused(tmp_path: Path) -> None:
    script = _write(
        tmp_path / "train.py", first="os.makedirs('at' + str(os.getpid())); os.chdir('at' + str(os.getpid()))"
    )
    text = script.read_text().replace("microbatches=4", "microbatches=4, checkpoint=outlast.Checkpoint(dir='ck')")
    script.write_text(text)
    done = _run(tmp_path, "-m", "outlast", "run", "--replicas", "2", str(script), str(tmp_path), "3")
    assert done.returncode != 0
    assert "checkpoints: " in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("environ", "outlast"),
    [({"WORLD_SIZE": "2", "RANK": "1"}, "on"), ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "off")],
    ids=["torchrun", "srun"],
)
def test_processes_that_another_launcher_started_do_not_each_train_everything(
    tmp_path: Path, environ: dict[str, str], outlast: str
) -> None:
    done = _run(tmp_path, str(_write(tmp_path / "train.py")), str(tmp_path), "3", OUTLAST=outlast, **environ)
    assert done.returncode == 2
    assert "each would train the whole run" in done.stderr
    assert "outlast run --replicas 2" in done.stderr
    assert not list(tmp_path.glob("*.at"))


def test_one_process_of_another_launcher_trains(tmp_path: Path) -> None:
    done = _run(tmp_path, str(_write(tmp_path / "train.py")), str(tmp_path), "3", WORLD_SIZE="1", RANK="0")
    assert done.returncode == 0, done.stderr


def _held(tmp_path: Path, script: Path, **settings: object) -> Driven:
    config = tmp_path / "run.toml"
    config.write_text(
        "[run]\nrestart_backoff_s = 0.0\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in settings.items())
    )
    (tmp_path / "hold2").touch()
    return Driven(tmp_path / "run", ["--config", str(config), "--replicas", "2"], [str(script), str(tmp_path), "5"])


def _kill(driven: Driven, replica: str) -> None:
    pids = [e.pid for e in driven.events if isinstance(e, ev.ReplicaStarted) and e.replica == replica]
    os.kill(pids[-1], signal.SIGKILL)


def test_a_script_that_is_edited_while_it_runs_is_not_what_a_replacement_runs(
    tmp_path: Path, fleet: Callable[..., Fleet]
) -> None:
    """The replacement runs the script as it was, to its end, and its bits are those of the script as it was."""
    script = tmp_path / "train.py"
    script.write_text(SCENARIO.read_text())
    run = fleet(replicas=2, steps=20, gates=(4, 9, 14), script=[script])
    run.until("both run it", lambda: len(run.driven.members) == 2 and run.members_wait())
    script.write_text("raise SystemExit('edited')\n")
    successor = run.replace("r1.1", 9, 14)  # training waits until it has come through its script, and is a member
    run.assert_unchanged(survivors={"r0.1", successor}, recoveries=1)


def test_a_module_that_is_edited_while_it_runs_is_named(tmp_path: Path) -> None:
    """A replacement that would compute something else is refused before it has part in anything."""
    (tmp_path / "parts.py").write_text("SCALE = 1.0\n")
    script = _write(tmp_path / "train.py", first="import parts")
    with _held(tmp_path, script, max_restarts=1) as driven:
        driven.until("both hold", lambda: _at(tmp_path, "r0.1", 2)() and _at(tmp_path, "r1.1", 2)(), 85.0, lambda: None)
        (tmp_path / "parts.py").write_text("SCALE = 2.0\n")
        _kill(driven, "r1.1")

        def refused() -> bool:
            return any(isinstance(e, ev.Notice) and "parts.py was changed" in e.text for e in driven.events)

        driven.until("the replacement is refused", refused, 85.0, lambda: None)
        (tmp_path / "hold2").unlink()
        assert driven.finish(85.0, lambda: None) == 0


def test_a_script_that_never_joins_is_told_so_while_it_runs(tmp_path: Path) -> None:
    """A trainer's own loop, started once a replica: the first sentence about it does not wait for its end."""
    script = tmp_path / "trainer.py"
    script.write_text("import pathlib, signal\nsignal.pause()\n")
    with Driven(tmp_path / "run", ["--config", str(_settings(tmp_path))], [str(script)]) as driven:

        def told() -> bool:
            return any(isinstance(e, ev.Notice) and "without outlast.join()" in e.text for e in driven.events)

        driven.until("it is told", told, 85.0, lambda: None)


def _settings(tmp_path: Path) -> Path:
    config = tmp_path / "run.toml"
    config.write_text("[run]\nformation_s = 1.0\n")
    return config
