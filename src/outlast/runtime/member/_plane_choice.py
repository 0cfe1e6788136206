"""Which plane a view's gradients travel on: shared memory or c10d, for a mean or for a robust rule; and who lies on it.

c10d's modules are imported by who uses them alone. Not here: what a plane does.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from outlast.core.phases import Phase
from outlast.runtime.exchange.plane import Plane, SharedPlane
from outlast.runtime.exchange.row_plane import SharedRowPlane
from outlast.runtime.transport.mesh import Mesh

if TYPE_CHECKING:
    from outlast.runtime.member.driver import Replica

__all__ = ["make_plane"]


def make_plane(replica: Replica, mesh: Mesh) -> Plane:
    """The plane of a view whose roll was called. Raises ViewAbandoned if its group does not form."""
    plane = _shared(replica, mesh) if replica.env.exchange == "shm" else _network(replica, mesh)
    if not replica.env.lies:
        return plane
    from outlast.runtime.faults.liars import lying

    return lying(replica.env.lies, replica.env.me, plane, replica.engine)


def _shared(replica: Replica, mesh: Mesh) -> Plane:
    engine = replica.engine

    def enter(phase: Phase, bucket: int) -> None:
        replica.enter(phase, bucket=bucket)

    if engine.robust is None:
        return SharedPlane(mesh, engine.layout, engine.memory, replica.memories, engine.out, enter)
    draw = random.SystemRandom()  # which slices this member checks is known to no other
    return SharedRowPlane(mesh, engine.layout, engine.memory, replica.memories, engine.out, enter, engine.robust, draw)


def _network(replica: Replica, mesh: Mesh) -> Plane:
    from outlast.runtime.exchange.c10d_plane import NetworkPlane
    from outlast.runtime.exchange.c10d_row_plane import NetworkRowPlane

    engine, env = replica.engine, replica.env

    def enter(phase: Phase, bucket: int) -> None:
        replica.enter(phase, bucket=bucket)

    store, address = replica._store, replica.member.store
    if engine.robust is None:
        return NetworkPlane(mesh, engine.layout, engine.memory, engine.out, enter, env, store, address)
    return NetworkRowPlane(engine.robust, mesh, engine.layout, engine.memory, engine.out, enter, env, store, address)
