"""What Accelerate or Fabric prepared, and streams that libraries read: killed, training ends with the same bits."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.sources import LIBRARIES

from outlast.adapters.prepared import protect_prepared
from outlast.errors import ConfigError

HERE = Path(__file__).parent
WAYS = {
    "accelerate": (HERE / "prepared_training.py", "accelerate"),
    "lightning": (HERE / "prepared_training.py", "fabric"),
    "torchdata": (HERE / "streamed.py",),
    **{library: (HERE / "streamed.py", "--source", source) for library, source in LIBRARIES.items()},
}
STEPS = 20
LONG = pytest.mark.soak, pytest.mark.timeout(600)


def trained(library: str, out: Path, **environ: str) -> dict[str, Any]:
    """By a process of its own; nothing where it was stopped before the end."""
    out.mkdir(exist_ok=True)
    command = [sys.executable, *map(str, WAYS[library]), "--steps", str(STEPS), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, **environ})
    assert done.returncode == 0, done.stderr
    return next((json.loads(path.read_text()) for path in out.glob("*.json")), {})


@functools.cache
def undisturbed(library: str) -> dict[str, Any]:
    """What the training gives when nothing happens."""
    with tempfile.TemporaryDirectory() as out:
        return trained(library, Path(out))


@pytest.mark.process
@pytest.mark.campaign
@pytest.mark.parametrize(
    ("library", "struck", "replicas"),
    [
        ("accelerate", "r0.1", 2),
        ("lightning", "r1.1", 2),
        ("torchdata", "r0.1", 2),
        *((library, "r1.1", 2) for library in LIBRARIES),
        pytest.param("torchdata", "r1.1", 2, marks=LONG),
        *(pytest.param(library, "r1.1", 3, marks=LONG) for library in ("accelerate", "lightning", "torchdata")),
    ],
)
def test_it_outlasts_a_death(
    fleet: Callable[..., Any], tmp_path: Path, library: str, struck: str, replicas: int
) -> None:
    pytest.importorskip(library, reason=f"{library} is not there: make trainers-env installs it")
    script = tuple(str(part) for part in WAYS[library])
    want = undisturbed(library)
    run = fleet(script=script, replicas=replicas, steps=STEPS, gates=(4, 9, 10), max_restarts=1)
    successor = run.replace(struck, 9, 10, replicas=replicas)
    assert run.finish() == 0, run.logs()
    results = run.results()
    assert set(results) == {*(f"r{slot}.1" for slot in range(replicas)), successor} - {struck}, run.logs()
    seen: dict[str, list[Any]] = {}
    for name, found in results.items():
        for step, batches in found.pop("seen", {}).items():
            seen.setdefault(step, []).extend(batches)
        for key in ("losses", "passes"):  # a successor has those of its own steps
            assert found.get(key, {}).items() <= want.get(key, {}).items(), f"{name}: {key}\n{run.logs()}"
            found[key] = want.get(key)
        assert {key: found[key] for key in want if key != "seen"} == {k: v for k, v in want.items() if k != "seen"}, (
            name
        )
    for step, batches in want.get("seen", {}).items():
        if int(step) > 4:  # who died told nobody; a joiner's trial may compute one twice, and applies it once
            assert set(seen[step]) == set(batches), f"step {step}\n{run.logs()}"


@pytest.mark.process
@pytest.mark.campaign
@pytest.mark.parametrize("library", ["accelerate", "lightning", "torchdata", *LIBRARIES])
def test_it_goes_on_where_it_was(tmp_path: Path, library: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not there: make trainers-env installs it")
    want = dict(undisturbed(library))
    keep = {"OUTLAST_CHECKPOINT_DIR": str(tmp_path / "ck")}
    assert trained(library, tmp_path / "again", **keep, OUTLAST_UNTIL="9") == {}
    found = trained(library, tmp_path / "again", **keep)
    for key in ("losses", "passes", "seen"):  # of its own steps
        assert found.pop(key, {}).items() <= want.pop(key, {}).items()
    assert found == want


def test_a_prepared_loader_is_refused() -> None:
    class Shard(torch.utils.data.DataLoader[Any]):
        base_dataloader: Any = None

    with pytest.raises(ConfigError, match=r"leave it out of accelerator\.prepare"):
        protect_prepared(None, None, None, Shard([1, 2]), microbatches=2)


class Protected:
    """Stands for a run: what `protect` is given."""

    def protect(self, model: Any, optimizers: Any, dataset: Any, **given: Any) -> Any:
        return model, optimizers, given


class Lookahead(torch.optim.SGD):
    """A script's own optimizer around another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"], lr=0.1)
        self.optimizer = inner


def test_wrappers_of_one_s_own_stay_and_the_libraries_go() -> None:
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.zeros(8, 2), batch_size=2)
    own = Lookahead(inner)
    theirs = type("AcceleratedOptimizer", (), {"optimizer": inner, "scaler": None})()
    type(theirs).__module__ = "accelerate.optimizer"
    for given, want in ((own, own), (theirs, inner), (inner, inner)):
        assert protect_prepared(Protected(), model, given, loader, microbatches=2)[1] == [want]


def test_a_scaler_that_was_prepared_is_refused() -> None:
    model = torch.nn.Linear(2, 1)
    loader = torch.utils.data.DataLoader(torch.zeros(8, 2), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaled = type("AcceleratedOptimizer", (), {"optimizer": optimizer, "scaler": object()})()
    with pytest.raises(ConfigError, match="has a gradient scaler"):
        protect_prepared(Protected(), model, scaled, loader, microbatches=2)
    fabric = torch.nn.Linear(2, 1)
    fabric._strategy = type("Strategy", (), {"precision": type("Mixed", (), {"scaler": object()})()})()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="has a gradient scaler"):
        protect_prepared(Protected(), fabric, optimizer, loader, microbatches=2)
