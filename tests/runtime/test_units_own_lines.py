"""What the loop's own lines draw between two steps: by position, or from generators that are registered."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import outlast
from outlast.errors import ConfigError
from outlast.runtime.training.own_generators import OwnGenerator
from outlast.runtime.training.state import decoded_tree, encoded_tree

pytestmark = pytest.mark.usefixtures("training_here")


@pytest.fixture(params=["on", "off"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST", request.param)


def own() -> dict[str, Any]:
    """One of each kind, each seeded as a script would."""
    numbers = np.random.PCG64(3), np.random.MT19937(4), np.random.Philox(5), np.random.SFC64(6)
    kinds = {type(bits).__name__: np.random.Generator(bits) for bits in numbers}
    older = np.random.RandomState(7)
    return {"torch": torch.Generator().manual_seed(1), "python": random.Random(2), "numpy": older, **kinds}


def drawn(generator: Any) -> list[float]:
    """Draws of which a generator may keep a part for the next one."""
    if isinstance(generator, torch.Generator):
        return [*torch.rand(3, generator=generator).tolist(), *torch.randn(3, generator=generator).tolist()]
    if isinstance(generator, random.Random):
        return [generator.random(), generator.gauss(0.0, 1.0)]
    return [float(generator.normal()), float(generator.uniform())]


def of_all() -> list[float]:
    """From the generators that belong to nobody."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class Script:
    """A loop that draws before and after its batches. `registered`: with what generators as parts of the state."""

    def __init__(self, microbatches: int, place: Path | None = None, registered: Any = None) -> None:
        torch.manual_seed(4)
        self.model, self.own = torch.nn.Sequential(torch.nn.Linear(6, 1), torch.nn.Dropout(0.3)), registered or {}
        self.seen: dict[str, Any] = {}
        self.training: Any = outlast.join().protect(
            self.model, torch.optim.AdamW(self.model.parameters(), lr=0.01),
            list(torch.randn(16, 6, generator=torch.Generator().manual_seed(1))), global_batch_size=8,
            microbatches=microbatches, seed=2, state=self.own,
            checkpoint="off" if place is None else outlast.Checkpoint(dir=str(place), every=1),
        )  # fmt: skip

    def run(self, until: int) -> dict[str, Any]:
        for step in self.training.steps(until):
            strength = self._draw(f"before {step.number}")
            for batch in step:
                step.backward(self.model(batch).pow(2).mean() * strength)
            self._draw(f"after {step.number}")
        return self.seen | {"end": self.training.fingerprint()}

    def _draw(self, where: str) -> float:
        self.seen[where] = of_all(), {name: drawn(generator) for name, generator in self.own.items()}
        return float(sum(self.seen[where][0]))


def test_lines_between_two_steps_draw_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was computed here last, and whether a microbatch was computed more often."""
    found = []
    for how, microbatches in (("on", 4), ("on", 2), ("off", 4)):
        monkeypatch.setenv("OUTLAST", how)
        seen = Script(microbatches).run(4)
        seen.pop("end")
        found.append(seen)
    assert found[0] == found[1] == found[2]
    draws = [tuple(first) for first, _ in found[0].values()]
    assert len(draws) == len(set(draws)) == 8


@pytest.mark.usefixtures("mode")
def test_a_run_that_goes_on_draws_what_one_that_never_stopped_does(tmp_path: Path) -> None:
    whole = Script(2, registered=own()).run(6)
    first = Script(2, tmp_path, own()).run(3)
    again = Script(2, tmp_path, own()).run(6)
    assert next(iter(again)) == "before 3"
    assert {**first, **again} == whole


@pytest.mark.parametrize("name", own())
def test_a_generator_goes_on_from_its_state(name: str) -> None:
    """Through the encoding that joiners and checkpoints get, also amid a pair of normal numbers."""
    mine, theirs = own()[name], own()[name]
    drawn(mine)
    plain, tensors = encoded_tree(OwnGenerator(mine).state_dict())
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    tree = decoded_tree(plain, torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8))
    want = [drawn(mine) for _ in range(3)]
    OwnGenerator(theirs).load_state_dict(tree)
    assert [drawn(theirs) for _ in range(3)] == want


@pytest.mark.usefixtures("mode")
def test_a_generator_without_a_state_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"state\['rng'\] is a SystemRandom, which cannot be saved"):
        Script(2, registered={"rng": random.SystemRandom()})
