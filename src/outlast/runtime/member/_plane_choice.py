"""Which plane a view's gradients travel on: shared memory, c10d or both in two levels, for a mean or a robust rule.

c10d's modules are imported by who uses them alone. Not here: what a plane does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from outlast.core.phases import Phase
from outlast.runtime.exchange.plane import Plane, SharedPlane
from outlast.runtime.exchange.row_plane import SharedRowPlane
from outlast.runtime.exchange.slots import Memory
from outlast.runtime.host.environment import Environment
from outlast.runtime.training.engine import Engine
from outlast.runtime.transport.endpoints import lane_address, place_in
from outlast.runtime.transport.mesh import Mesh
from outlast.runtime.view.port import ViewPort

__all__ = ["lane_plane", "make_plane"]


def make_plane(port: ViewPort, engine: Engine, mesh: Mesh, memories: dict[str, Memory], store: Any) -> Plane:
    """The plane of a view whose roll was called. `store`: this member's own, for c10d on GPUs. Raises ViewAbandoned if
    its group does not form."""
    if port.env.exchange == "shm":
        return _shared(engine, mesh, memories, _enter(port))
    places = [place_of(port, name) for name in mesh.view.members]
    if engine.memory.region is None or 1 < len(set(places)) == len(places):
        return _network(engine, mesh, port.env, store, port.member.store, _enter(port))
    if len(set(places)) == 1:
        return _shared(engine, mesh, memories, _enter(port))
    return _in_two_levels(port, engine, mesh, memories, places)


def place_of(port: ViewPort, name: str) -> str:
    """The host of a member: whoever is there reads the same memory. On one machine agents stand for hosts."""
    return place_in(lane_address(port.member.contacts.get(name, ""), 0)) or port.member.hosts.get(name, "")


def lane_plane(
    env: Environment, engine: Engine, mesh: Mesh, memories: dict[str, Memory], enter: Callable[[Phase, int], None]
) -> Plane:
    """The plane of a rank that is not its replica's lead, of the lead's kind. Raises as `make_plane` does."""
    if env.exchange == "shm":
        return _shared(engine, mesh, memories, enter)
    return _network(engine, mesh, env, None, "", enter)


def _in_two_levels(
    port: ViewPort, engine: Engine, mesh: Mesh, memories: dict[str, Memory], places: Sequence[str]
) -> Plane:
    from outlast.runtime.exchange.host_plane import HostPlane

    return HostPlane(mesh, engine.layout, engine.memory, memories, engine.out, _enter(port), port.env, places)


def _enter(port: ViewPort) -> Callable[[Phase, int], None]:
    return lambda phase, bucket: port.enter(phase, bucket=bucket)


def _shared(engine: Engine, mesh: Mesh, memories: dict[str, Memory], enter: Callable[[Phase, int], None]) -> Plane:
    onward = engine.staging.straight if engine.staging is not None else None
    if engine.robust is None:
        return SharedPlane(mesh, engine.layout, engine.memory, memories, engine.out, enter, onward)
    draw = random.SystemRandom()  # which slices this member checks is known to no other
    return SharedRowPlane(mesh, engine.layout, engine.memory, memories, engine.out, enter, engine.robust, draw, onward)


def _network(
    engine: Engine, mesh: Mesh, env: Environment, store: Any, address: str, enter: Callable[[Phase, int], None]
) -> Plane:
    from outlast.runtime.exchange.c10d_plane import NetworkPlane
    from outlast.runtime.exchange.c10d_row_plane import NetworkRowPlane

    if engine.robust is None:
        return NetworkPlane(mesh, engine.layout, engine.memory, engine.out, enter, env, store, address)
    return NetworkRowPlane(engine.robust, mesh, engine.layout, engine.memory, engine.out, enter, env, store, address)
