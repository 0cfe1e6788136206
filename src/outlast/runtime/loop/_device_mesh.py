"""The `DeviceMesh` of one replica: its ranks are a torch world of their own, and nothing of another hangs on it."""

from __future__ import annotations

from typing import Any

from outlast.errors import ConfigError
from outlast.runtime.host.environment import Environment

__all__ = ["mesh_of"]


def mesh_of(env: Environment, shard: int | None) -> Any:
    """See `Run.mesh`."""
    from torch import distributed as dist  # loaded with what needs it
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.device_mesh import init_device_mesh

    width = 1
    if shard is not None and shard != width:
        raise ConfigError(
            f"run.mesh(shard={shard}) in a replica of {width} rank{'s' * (width > 1)}",
            remedy=f"outlast run --ranks {shard}, or run.mesh() without a number: the bits do not depend on it",
        )
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    if dist.get_world_size() != width:
        raise ConfigError(
            f"the script made a process group of {dist.get_world_size()} processes, and the replica has {width}",
            remedy="leave init_process_group() out: run.mesh() makes the replica's own",
        )
    return init_device_mesh("cpu", (width,), mesh_dim_names=("shard",))
