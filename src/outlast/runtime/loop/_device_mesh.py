"""The `DeviceMesh` of one replica: its ranks are a torch world of their own, and nothing of another hangs on it."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

from outlast.errors import ConfigError
from outlast.runtime.host.environment import Environment
from outlast.runtime.transport.rank_words import OpenWorld

__all__ = ["mesh_of"]


def mesh_of(env: Environment, shard: int | None) -> Any:
    """See `Run.mesh`."""
    from torch import distributed as dist  # loaded with what needs it
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.device_mesh import init_device_mesh

    width = env.width
    if shard is not None and shard != width:
        raise ConfigError(
            f"run.mesh(shard={shard}) in a replica of {width} rank{'s' * (width > 1)}",
            remedy=f"outlast run --ranks {shard}, or run.mesh() without a number: the bits do not depend on it",
        )
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
    return init_device_mesh("cpu", (width,), mesh_dim_names=("shard",))


def _meeting_place(env: Environment, width: int) -> Any:
    """The store in which the replica's ranks find each other; the lead listens, on loopback alone."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

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
