"""The `DeviceMesh` of one replica: its ranks are a torch world of their own, and nothing of another hangs on it."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

from outlast.errors import ConfigError
from outlast.runtime.host.environment import Environment
from outlast.runtime.transport.rank_words import OpenWorld
from outlast.tensors import TENSOR_PARALLEL

__all__ = ["mesh_of"]


def mesh_of(env: Environment, shard: int | None, tp: int | None, pipeline: int | None) -> Any:
    """See `Run.mesh`."""
    from torch.distributed.device_mesh import init_device_mesh  # loaded with what needs it

    width = env.width
    tensor_parallel = env.tensor_parallel if tp is None else tp
    stages = env.stages if pipeline is None else pipeline
    together = tensor_parallel * stages
    wanted = (shard if shard is not None else max(1, width // max(1, together))) * together
    given = (("shard", shard), ("tp", tp), ("pipeline", pipeline))
    asked = ", ".join(f"{key}={n}" for key, n in given if n is not None)
    if wanted != width or tensor_parallel < 1 or stages < 1:
        raise ConfigError(
            f"run.mesh({asked}) in a replica of {width} rank{'s' * (width > 1)}",
            remedy=f"outlast run --ranks {max(1, wanted)}"
            + (", or run.mesh() without shard=: the bits do not depend on it" if pipeline is None else ""),
        )
    if stages > 1 and width > stages:
        raise ConfigError(
            f"run.mesh({asked}): a pipeline whose stages are spread over several ranks cannot be had yet",
            remedy=f"pipeline={width}, or leave it out and have shard= and tp=",
        )
    env.tensor_parallel, env.stages = tensor_parallel, stages
    _world(env, width)
    sizes = {"pipeline": stages, "shard": width // together, TENSOR_PARALLEL: tensor_parallel}
    named = {name: size for name, size in sizes.items() if size > 1 or (name == "pipeline" and pipeline)}
    return init_device_mesh("cpu", tuple((named or {"shard": 1}).values()), mesh_dim_names=tuple(named or ("shard",)))


def _world(env: Environment, width: int) -> None:
    """The replica's own process group. Raises ConfigError if the script made another one."""
    from torch import distributed as dist
    from torch.distributed import HashStore

    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks of a replica are on one machine
        store = HashStore() if width == 1 else _meeting_place(env, width)
        hook = sys.excepthook
        dist.init_process_group("gloo", store=store, rank=env.place, world_size=width)
        sys.excepthook = hook  # torch's own swallows what ours prints
    if dist.get_world_size() != width:
        raise ConfigError(
            f"the script made a process group of {dist.get_world_size()} processes, and the replica has {width}",
            remedy="leave init_process_group() out: run.mesh() makes the replica's own",
        )


def _meeting_place(env: Environment, width: int) -> Any:
    """The store in which the replica's ranks find each other; the lead listens, on loopback alone."""
    from torch.distributed import TCPStore

    from outlast.runtime.exchange.c10d_plane import open_store

    patience = timedelta(seconds=env.config.start_s)
    if env.lead is None:
        store, address = open_store()
        store.set_timeout(patience)
        for pipe in env.pipes:
            pipe.send(OpenWorld(address))
        return store
    told = env.lead.wait_for(OpenWorld)
    host, _, port = told.store.rpartition(":")
    return TCPStore(host, int(port), width, is_master=False, timeout=patience)
