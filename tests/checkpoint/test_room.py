"""What is given back where there is no room."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outlast.checkpoint import CheckpointEngine, LocalStore
from outlast.checkpoint.room import give_back


@pytest.mark.parametrize("published", [False, True])
def test_a_save_that_will_never_be_a_generation_leaves_nothing(tmp_path: Path, published: bool) -> None:
    store = LocalStore(str(tmp_path / "c"))
    engine = CheckpointEngine(store)
    before = engine.save(1, {"w": torch.zeros(5000)})
    assert before is not None
    engine.commit(before)
    kept = set(store.names())
    handle = engine.save(2, {"w": torch.ones(5000)})
    assert handle is not None
    handle.durable.result(20)
    if published:
        engine.commit(handle)
    assert set(store.names()) > kept
    give_back(store, handle.save)
    assert (set(store.names()) == kept) is not published
    engine.close()
