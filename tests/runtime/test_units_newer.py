"""What a replica with a state of its own makes of a checkpoint that is said to be newer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outlast.config import RunConfig
from outlast.errors import CheckpointError
from outlast.runtime.saving.resume import newer

FACTS = {"seed": "11", "microbatches": "4"}


def saves(load: Any) -> Any:
    """Of a run that goes on from its own checkpoints. `load`: what reading the newest of them comes to."""
    archive = SimpleNamespace(load=load, store=SimpleNamespace(url="/c"))
    return SimpleNamespace(env=SimpleNamespace(config=RunConfig()), archive=archive, facts=FACTS)


def generation(step: int, **facts: str) -> Any:
    tree = {"model": {}, "optimizers": [], "schedulers": [], "extra": {}, "run": {"step": step, "facts": FACTS | facts}}
    return SimpleNamespace(step=step, generation=3, tree=tree)


@pytest.mark.parametrize(("step", "taken"), [(48, True), (40, False), (39, False)])
def test_only_what_is_newer_is_taken(step: int, taken: bool) -> None:
    found = newer(saves(lambda: generation(step)), 40)
    assert (found is not None and found.step == step) is taken


def test_there_may_be_none() -> None:
    assert newer(saves(lambda: None), 40) is None


@pytest.mark.parametrize("error", [CheckpointError("the parts are not whole"), OSError("the store is away")])
def test_what_cannot_be_read_is_told_and_costs_no_state(error: Exception, capfd: pytest.CaptureFixture[str]) -> None:
    def load() -> Any:
        raise error

    assert newer(saves(load), 40) is None
    told = capfd.readouterr().err
    assert "goes on from its own step 40" in told
    assert str(error).partition("\n")[0] in told


def test_what_is_of_another_run_is_not_taken(capfd: pytest.CaptureFixture[str]) -> None:
    assert newer(saves(lambda: generation(48, seed="12")), 40) is None
    assert "seed: 12 there, 11 here" in capfd.readouterr().err
