"""Checkpoints: arena, chunks, tiers, resharding, interchange. Manifest, verify and the stores never import torch.

The room writes a training state so that a torn one is never seen, reads it back verified into any number of replicas,
and keeps what the retention policy says. It must never decide *when* to save (`core.policy`), never publish what the
commit rules (`core.protocol.saves.commit`) have not released, never use pickle, and never raise into a training step
because a disk failed. Read `_engine.py` first, then `_manifest.py` (the format) and `_local.py` (the order of fsyncs).

How a runtime drives it. Each replica has an `Engine`; whoever coordinates has a `CommitState`:

    engine = Engine(target, replica=i, num_replicas=n, drain_to=url, hold=Hold.parse(os.environ[...]))
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
    from outlast.checkpoint._drain import Drain, drain
    from outlast.checkpoint._engine import Engine, Handle, LoadedState
    from outlast.checkpoint._events import CheckpointEvent
    from outlast.checkpoint._local import LocalStore
    from outlast.checkpoint._manifest import Head
    from outlast.checkpoint._memory import Hold, MemoryStore
    from outlast.checkpoint._objects import ObjectStore
    from outlast.checkpoint._open import open_store
    from outlast.checkpoint._publish import certify, heads, publish
    from outlast.checkpoint._reader import Reader, Skip
    from outlast.checkpoint._retention import Retention, prune
    from outlast.checkpoint._store import Store
    from outlast.checkpoint._verify import Problem, Verified, verify

_HOMES = {
    "CheckpointEvent": "_events", "Drain": "_drain", "Engine": "_engine", "Handle": "_engine",
    "Head": "_manifest", "Hold": "_memory", "LoadedState": "_engine", "LocalStore": "_local",
    "MemoryStore": "_memory", "ObjectStore": "_objects", "Problem": "_verify", "Reader": "_reader",
    "Retention": "_retention", "Skip": "_reader", "Store": "_store", "Verified": "_verify", "certify": "_publish",
    "drain": "_drain", "heads": "_publish", "open_store": "_open", "prune": "_retention", "publish": "_publish",
    "verify": "_verify",
}  # fmt: skip

__all__ = [
    "CheckpointEvent", "Drain", "Engine", "Handle", "Head", "Hold", "LoadedState", "LocalStore",
    "MemoryStore", "ObjectStore", "Problem", "Reader", "Retention", "Skip", "Store", "Verified", "certify", "drain",
    "heads", "open_store", "prune", "publish", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Loaded when first used: only `Engine` and its company need torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"outlast.checkpoint.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'outlast.checkpoint' has no attribute {name!r}")
