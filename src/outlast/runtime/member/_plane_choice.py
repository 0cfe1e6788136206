"""Which plane a view's gradients travel on: shared memory, c10d or both in two levels, for a mean or a robust rule.

c10d's modules are imported by who uses them alone. Not here: what a plane does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from outlast.core.phases import Phase
from outlast.runtime.exchange.plane import Plane, SharedPlane
from outlast.runtime.exchange.row_plane import SharedRowPlane
from outlast.runtime.exchange.slots import Memory
from outlast.runtime.joining.donor import lane_address
from outlast.runtime.training.engine import Engine
from outlast.runtime.transport.endpoints import place_in
from outlast.runtime.transport.mesh import Mesh
from outlast.runtime.view.port import ViewPort

__all__ = ["make_plane"]


def make_plane(port: ViewPort, engine: Engine, mesh: Mesh, memories: dict[str, Memory], store: Any) -> Plane:
    """The plane of a view whose roll was called. `store`: this member's own, for c10d on GPUs. Raises ViewAbandoned if
    its group does not form."""
    if port.env.exchange == "shm":
        return _shared(port, engine, mesh, memories)
    places = [place_of(port, name) for name in mesh.view.members]
    if engine.memory.region is None or 1 < len(set(places)) == len(places):
        return _network(port, engine, mesh, store)
    if len(set(places)) == 1:
        return _shared(port, engine, mesh, memories)
    return _in_two_levels(port, engine, mesh, memories, places)


def place_of(port: ViewPort, name: str) -> str:
    """The host of a member: whoever is there reads the same memory. On one machine agents stand for hosts."""
    return place_in(lane_address(port.member.contacts.get(name, ""), 0)) or port.member.hosts.get(name, "")


def _in_two_levels(
    port: ViewPort, engine: Engine, mesh: Mesh, memories: dict[str, Memory], places: Sequence[str]
) -> Plane:
    from outlast.runtime.exchange.host_plane import HostPlane

    def enter(phase: Phase, bucket: int) -> None:
        port.enter(phase, bucket=bucket)

    return HostPlane(mesh, engine.layout, engine.memory, memories, engine.out, enter, port.env, places)


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
