"""What fleets saved: whether each generation is whole and right, and what the journal says of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from tests.runtime.conftest import undisturbed

from outlast.checkpoint import CheckpointEngine, open_store, verify
from outlast.core import events as ev
from outlast.core.phases import Phase
from outlast.runtime.settings.fault_points import Fault


def strike(replica: str, phase: Phase, count: int = 1, action: Any = "SIGKILL") -> Fault:
    return Fault(replica=replica, phase=phase.name, count=count, action=action)


def assert_generations(place: Path | str) -> list[int]:
    """Each is whole and has the weights of the undisturbed run at its step; returns the steps."""
    engine, steps = CheckpointEngine(str(place)), []
    for generation in engine.store.generations():
        assert verify(open_store(str(place)), generation).problems == []
        loaded = engine.load(generation=generation)
        assert loaded is not None
        sha = hashlib.sha256()
        for name, tensor in sorted(loaded.tree["model"].items()):
            sha.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        assert sha.hexdigest() == undisturbed(loaded.step, 8, "float32")["model"], f"generation {generation}"
        steps.append(loaded.step)
    engine.close()
    return steps


def began(run: Any) -> list[int]:
    """Steps of the saves that were begun, in order."""
    return [e.step for e in run.driven.events if isinstance(e, ev.CheckpointBegan)]


def failed(run: Any) -> list[ev.CheckpointFailed]:
    return [e for e in run.driven.events if isinstance(e, ev.CheckpointFailed)]


def position(run: Any, kind: type[ev.Event], **fields: Any) -> int:
    """Where in the journal the first event of this kind and these fields stands."""
    for index, event in enumerate(run.driven.events):
        if isinstance(event, kind) and all(getattr(event, key) == value for key, value in fields.items()):
            return index
    raise AssertionError(f"no {kind.__name__} with {fields}\n{run.logs()}")
