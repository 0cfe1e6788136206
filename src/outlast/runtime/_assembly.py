"""From what a script gave `protect` and what the run was told to one replica, ready to train."""

from __future__ import annotations

from typing import Any

import msgspec

from outlast.core.policy import Guards
from outlast.runtime._corruption import ordered
from outlast.runtime._data import Samples
from outlast.runtime._engine import Engine
from outlast.runtime._environment import Environment
from outlast.runtime._gradients import Memory
from outlast.runtime._replica import Replica
from outlast.runtime._robust import layout_for, robust_for
from outlast.runtime._row_settings import row_settings
from outlast.runtime._saves import attach
from outlast.runtime._settings import SaveSettings
from outlast.runtime._state import State

__all__ = ["assemble"]


def assemble(
    env: Environment,
    parts: State,
    samples: Samples,
    facts: dict[str, str],
    *,
    seed: int,
    clip_norm: float | None,
    bucket_mb: float,
    guards: Guards | str | None,
    keep: SaveSettings | None,
    robust: dict[str, Any],
) -> Replica:
    """`facts`: what all members must share, so far; `keep`: how to save, if at all; `robust`: `row_settings`' own."""
    microbatches = samples.num_leaves
    settings = row_settings(env.config, parts.names, microbatches, **robust)
    layout = layout_for(settings, parts.params, int(bucket_mb * (1 << 20)))
    shared = env.exchange == "shm" and layout.device.type == "cpu"
    policy = Guards.of(env.config.guards if guards is None else guards)
    engine = Engine(
        parts, samples, layout, Memory(layout, microbatches + 2, shared=shared), clip_norm, seed,
        robust_for(settings, layout, samples, parts, seed), policy,
    )  # fmt: skip
    engine.corruption = ordered(env.me, engine)
    facts = facts | {"aggregation": settings.describe() if settings else "mean", "guards": str(policy)}
    facts |= {"checkpoints": msgspec.json.encode(keep).decode()} if keep is not None else {}
    replica = Replica(env, engine, facts)
    if keep is not None:
        attach(replica, keep)
    return replica
