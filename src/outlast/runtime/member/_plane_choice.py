"""Which plane a view's gradients travel on: shared memory or c10d, for a mean or for a robust rule.

c10d's modules are imported by who uses them alone. Not here: what a plane does.
"""

from __future__ import annotations

import random
from typing import Any

from outlast.core.phases import Phase
from outlast.runtime.exchange.plane import Plane, SharedPlane
from outlast.runtime.exchange.row_plane import SharedRowPlane
from outlast.runtime.exchange.slots import Memory
from outlast.runtime.training.engine import Engine
from outlast.runtime.transport.mesh import Mesh
from outlast.runtime.view.port import ViewPort

__all__ = ["make_plane"]


def make_plane(port: ViewPort, engine: Engine, mesh: Mesh, memories: dict[str, Memory], store: Any) -> Plane:
    """The plane of a view whose roll was called. `store`: this member's own, for c10d on GPUs. Raises ViewAbandoned if
    its group does not form."""
    return _shared(port, engine, mesh, memories) if port.env.exchange == "shm" else _network(port, engine, mesh, store)


def _shared(port: ViewPort, engine: Engine, mesh: Mesh, memories: dict[str, Memory]) -> Plane:
    def enter(phase: Phase, bucket: int) -> None:
        port.enter(phase, bucket=bucket)

    if engine.robust is None:
        return SharedPlane(mesh, engine.layout, engine.memory, memories, engine.out, enter)
    draw = random.SystemRandom()  # which slices this member checks is known to no other
    return SharedRowPlane(mesh, engine.layout, engine.memory, memories, engine.out, enter, engine.robust, draw)


def _network(port: ViewPort, engine: Engine, mesh: Mesh, store: Any) -> Plane:
    from outlast.runtime.exchange.c10d_plane import NetworkPlane
    from outlast.runtime.exchange.c10d_row_plane import NetworkRowPlane

    def enter(phase: Phase, bucket: int) -> None:
        port.enter(phase, bucket=bucket)

    env, address = port.env, port.member.store
    if engine.robust is None:
        return NetworkPlane(mesh, engine.layout, engine.memory, engine.out, enter, env, store, address)
    return NetworkRowPlane(engine.robust, mesh, engine.layout, engine.memory, engine.out, enter, env, store, address)
