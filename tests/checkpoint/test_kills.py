"""A process that saves without a pause is killed at any moment, again and again, in one directory: nothing that it had
published is lost, nothing wrong is ever loaded, and what is left behind does not grow."""

from __future__ import annotations

import pathlib
import random
import subprocess
import sys

import pytest
import torch

from outlast.checkpoint import CheckpointEngine, LocalStore, Retention, verify

KILLS = 80
KEPT = 3


def state(step: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn(400_000, generator=generator), "frozen": torch.arange(50_000), "step": step}


def save_for_ever(where: str) -> None:
    """Each step is said once it is published."""
    engine = CheckpointEngine(where, retention=Retention(keep_last=KEPT))
    loaded = engine.load()
    step = loaded.step if loaded is not None else 0
    while True:
        step += 1
        handle = engine.save(step, state(step))
        assert handle is not None
        engine.commit(handle)
        print(step, flush=True)


@pytest.mark.process
@pytest.mark.campaign
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_killed_while_it_saves(tmp_path: pathlib.Path) -> None:
    draw, newest, sizes = random.Random(3), 0, list[int]()
    for kill in range(KILLS):
        child = subprocess.Popen([sys.executable, __file__, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(draw.randint(1, 4)):  # it has published so many, and is somewhere in the next ones
            newest = int(child.stdout.readline())
        try:
            child.wait(draw.random() * 0.05)
        except subprocess.TimeoutExpired:
            child.kill()
        rest, _ = child.communicate()
        newest = max([newest, *(int(line) for line in rest.split("\n")[:-1])])
        engine = CheckpointEngine(str(tmp_path))
        loaded = engine.load()
        engine.close()
        assert loaded is not None
        assert loaded.skipped == [], f"kill {kill}"
        assert loaded.step >= newest, f"kill {kill}: step {newest} was published"
        want = state(loaded.step)
        assert all(torch.equal(loaded.tree[key], want[key]) for key in ("w", "frozen"))  # type: ignore[arg-type]
        store = LocalStore(str(tmp_path))
        assert [problem for g in store.generations() for problem in verify(store, g).problems] == []
        newest = loaded.step
        sizes.append(sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()))
    assert max(sizes) < 2 * (KEPT + 2) * 2_000_000


if __name__ == "__main__":
    save_for_ever(sys.argv[1])
