"""Trainers that people have: killed in the middle, their training ends with the bits of an undisturbed one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.errors import ConfigError

pytest.importorskip("transformers", reason="Hugging Face's trainer is not there: make trainers-env installs it")
SCRIPT = Path(__file__).with_name("llama_trainer.py")
STEPS = 18
LONG = pytest.mark.soak, pytest.mark.timeout(600)


def alone(out: Path, *more: str, **environ: str) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    command = [sys.executable, str(SCRIPT), *more, "--steps", str(STEPS), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, **environ})
    assert done.returncode == 0, done.stderr
    found = [dict(json.loads(path.read_text())) for path in out.glob("*.json")]
    return found[0] if found else {}


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("struck", "more", "replicas"),
    [
        ("r0.1", ("--bf16",), 2),
        pytest.param("r0.1", (), 2, marks=LONG),
        pytest.param("r1.1", (), 3, marks=LONG),
    ],
)
def test_a_llama_of_the_trainer_outlasts_its_replicas(
    fleet: Callable[..., Any], tmp_path: Path, struck: str, more: tuple[str, ...], replicas: int
) -> None:
    """The writer or the other is killed; who replaces it joins; the model that is saved at the end can be loaded."""
    want = alone(tmp_path / "alone", *more)
    run = fleet(script=(SCRIPT, *more), replicas=replicas, steps=STEPS, gates=(4, 7, 8), max_restarts=1)
    successor = run.replace(struck, 7, 8, replicas=replicas)
    assert run.finish() == 0, run.logs()
    assert run.results() == dict.fromkeys(run.results(), want), run.logs()
    assert successor in run.results()
    assert (run.out / "final" / "model.safetensors").is_file()
    saved = {path.name for path in (run.out / "model").glob("checkpoint-*")}
    assert saved == {f"checkpoint-{step}" for step in range(6, want["steps"] + 1, 6)}
    assert want["steps"] < STEPS  # a callback ended it, on both after the same step


@pytest.mark.process
@pytest.mark.campaign
def test_a_llama_of_the_trainer_goes_on_where_it_was(tmp_path: Path) -> None:
    """Stopped between two evaluations; best metric and patience of the early stop are those of one training."""
    want = alone(tmp_path / "alone")
    keep = {"OUTLAST_CHECKPOINT_DIR": str(tmp_path / "ck")}
    assert alone(tmp_path / "again", **keep, OUTLAST_UNTIL="8") == {}
    assert alone(tmp_path / "again", **keep) == want


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"fp16": True}, "needs a gradient scaler"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
    ],
)
def test_what_this_loop_does_not_do_is_refused(given: dict[str, Any], told: str, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from outlast.adapters.huggingface import _refuse

    plain = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    _refuse(plain, None, None)
    for key, value in given.items():
        setattr(plain, key, value)
    with pytest.raises(ConfigError, match=told):
        _refuse(plain, None, None)
    with pytest.raises(ConfigError, match="resume_from_checkpoint"):
        _refuse(TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True), "somewhere", None)
