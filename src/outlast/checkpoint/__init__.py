"""Checkpoints: arena, chunks, tiers, resharding, interchange. Manifest, verify and the stores never import torch.

The room writes a training state so that a torn one is never seen, reads it back verified into any number of replicas,
and keeps what the retention policy says. It must never decide *when* to save (`core.policy`), never publish what the
commit rules (`core.protocol.saves.commit`) have not released, never use pickle, and never raise into a training step
because a disk failed. Read `_engine.py` first, then `manifest.py` (the format) and `_local.py` (the order of fsyncs).

How a runtime drives it. Each replica has a `CheckpointEngine`; whoever coordinates has a `CommitState`:

    engine = CheckpointEngine(target, replica=i, num_replicas=n, drain_to=url, hold=Hold.parse(os.environ[...]))
    engine.prepare(state_tree)                      # slots allocated and touched before the first save
    loaded = engine.load(into=state_tree)           # None: nothing to resume from

    # coordinator: commit_step(state, SaveWanted(step=s)) -> OrderSave: tell every member
    handle = engine.save(s, state_tree, view=(epoch, n), changing=("buffers.*",))   # None: delayed, go on training
    handle.wait_copied()                            # just before the optimizer step writes
    handle.durable.add_done_callback(...)           # its PartReport, or the failure -> WriterDurable / WriterFailed
    # coordinator: commit_step(..., StepStable / WriterDurable) -> Publish: carried out by one process, torch or not
    generation = publish(store, save, reports, created_s=now, run=run)              # or engine.publish(...)
    # coordinator: commit_step(..., Published) -> Announce: tell every member; Abandon likewise with None
    engine.settle(save, generation)
    engine.prune(protected=commit_state.protected)  # the publishing process only
    engine.drain(generation)                        # likewise

A fleet of one says `engine.commit(handle)` instead of the coordinator's part.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.checkpoint._engine import CheckpointEngine, Handle, LoadedState
    from outlast.checkpoint._local import LocalStore
    from outlast.checkpoint._memory import Hold, MemoryStore
    from outlast.checkpoint._objects import ObjectStore
    from outlast.checkpoint._open import open_store
    from outlast.checkpoint._publish import certify, heads, publish
    from outlast.checkpoint._verify import Problem, Verified, verify
    from outlast.checkpoint.draining import Drain, drain
    from outlast.checkpoint.manifest import Head
    from outlast.checkpoint.reader import Reader, Skip
    from outlast.checkpoint.retention import Retention, prune
    from outlast.checkpoint.save_events import CheckpointEvent
    from outlast.checkpoint.store import Store

_HOMES = {
    "CheckpointEvent": "save_events", "Drain": "draining", "CheckpointEngine": "_engine", "Handle": "_engine",
    "Head": "manifest", "Hold": "_memory", "LoadedState": "_engine", "LocalStore": "_local",
    "MemoryStore": "_memory", "ObjectStore": "_objects", "Problem": "_verify", "Reader": "reader",
    "Retention": "retention", "Skip": "reader", "Store": "store", "Verified": "_verify", "certify": "_publish",
    "drain": "draining", "heads": "_publish", "open_store": "_open", "prune": "retention", "publish": "_publish",
    "verify": "_verify",
}  # fmt: skip

__all__ = [
    "CheckpointEvent", "Drain", "CheckpointEngine", "Handle", "Head", "Hold", "LoadedState", "LocalStore",
    "MemoryStore", "ObjectStore", "Problem", "Reader", "Retention", "Skip", "Store", "Verified", "certify", "drain",
    "heads", "open_store", "prune", "publish", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Loaded when first used: only `CheckpointEngine` and its company need torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"outlast.checkpoint.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'outlast.checkpoint' has no attribute {name!r}")
