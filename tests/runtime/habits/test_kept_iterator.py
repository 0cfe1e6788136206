"""The loop is left early while somebody still holds its iterator: nothing is lost, and nothing is printed that no user
could make sense of. Alone, as the plain loop and in a fleet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.core import events as ev
from outlast.journal import Journal

pytestmark = pytest.mark.process

SCRIPT = """
import sys, torch, outlast
how, then, folder = sys.argv[1:]
run = outlast.join()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
training = run.protect(
    model, optimizer, list(torch.ones(64, 4)), global_batch_size=8, microbatches=2,
    checkpoint=outlast.Checkpoint(dir=folder, every=100),
)

def bar(steps):
    for step in steps:
        yield step

steps = training.steps(until=50)
if how == "bar":
    steps = bar(steps)
for step in steps:
    for batch in step:
        step.backward(model(batch).pow(2).mean())
    if step.number == 3:
        break
if then == "changed":
    torch.nn.init.zeros_(model.weight)
if then == "raises":
    raise LookupError("a bug of mine")
"""


def run(tmp_path: Path, how: str, then: str, *launch: str, **environ: str) -> tuple[int, str, list[str]]:
    """(exit code, errors, published generations)."""
    script, folder = tmp_path / "train.py", tmp_path / "kept"
    script.write_text(SCRIPT)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OUTLAST")}
    command = [sys.executable, *launch, str(script), how, then, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=clean | environ)
    return done.returncode, done.stderr, sorted(path.name for path in folder.glob("manifests/*"))


@pytest.mark.parametrize("how", ["variable", pytest.param("bar", marks=pytest.mark.campaign)])
@pytest.mark.parametrize("outlast", ["on", "off"])
def test_an_early_stop_is_saved(how: str, outlast: str, tmp_path: Path) -> None:
    code, err, saved = run(tmp_path, how, "ends", OUTLAST=outlast)
    assert (code, err) == (0, "")
    assert saved


@pytest.mark.campaign
@pytest.mark.parametrize("outlast", ["on", "off"])
def test_what_the_script_made_of_the_model_since_is_not_saved_as_the_step(outlast: str, tmp_path: Path) -> None:
    code, err, saved = run(tmp_path, "variable", "changed", OUTLAST=outlast)
    assert code == 10, "its newest steps are in no checkpoint"
    assert "changed after step 3" in err
    assert "Exception ignored" not in err
    assert saved == []


@pytest.mark.campaign
def test_an_error_after_it_is_an_error(tmp_path: Path) -> None:
    code, err, saved = run(tmp_path, "variable", "raises")
    assert (code, saved) == (1, [])
    assert err.rstrip().endswith("LookupError: a bug of mine")
    assert "Exception ignored" not in err


@pytest.mark.campaign
@pytest.mark.parametrize("how", ["variable", "bar"])
def test_all_of_a_fleet_stop_early_after_the_same_step(how: str, tmp_path: Path) -> None:
    launch = ["-m", "outlast", "run", "--replicas", "2", "--run-dir", str(tmp_path / "run")]
    code, err, saved = run(tmp_path, how, "ends", *launch)
    assert code == 0, err
    assert saved
    with Journal.open_reader(tmp_path / "run") as journal:
        events = [entry.event for entry in journal.events()]
    [end] = [event for event in events if isinstance(event, ev.RunFinished)]
    assert (end.outcome, end.steps) == ("finished", 4)
    assert not [event for event in events if isinstance(event, ev.Recovery)]
