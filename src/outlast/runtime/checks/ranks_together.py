"""The ranks of one replica, asked whether all of them can do what one alone must not do.

Each asks at the same place of the same step, where nothing of a view is waited for: after the commit point, as the
optimizer's own collectives do. A rank that dies meanwhile ends its replica, as in any of these.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["AllRanks", "AloneRank", "is_of_ranks"]


class AloneRank:
    """Nobody else is asked."""

    width = 1

    def all(self, able: bool) -> bool:
        """Whether every rank is able. Every rank must ask, in the same order."""
        return able


class AllRanks(AloneRank):
    """The `width` ranks of the torch world that `run.mesh()` has made."""

    def __init__(self, width: int) -> None:
        self.width = width

    def all(self, able: bool) -> bool:
        """Do what is said there."""
        from torch import distributed as dist

        least = torch.tensor(int(able))
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return bool(least)


def is_of_ranks(value: Any) -> bool:
    """Whether it is how ranks reach each other: a mesh or a group, of which there are no copies."""
    mesh = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", ())
    group = getattr(sys.modules.get("torch.distributed"), "ProcessGroup", ())
    return isinstance(value, (mesh, group))
