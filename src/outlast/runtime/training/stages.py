"""A pipeline inside a replica: which rank has which part of the model, and what is made of all parts together.

Each rank holds one stage: its own parameters, with their optimizer's state, and nothing of the others'. What follows
from the whole model (numbers of parameters and blocks, the parts of a checkpoint, the fingerprint) follows here from
what the ranks told each other once, when `protect` was called. Invariant: every rank has the same list, in the order of
stages. Moves bytes between the ranks of one replica; does not know views, schedules or other replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from outlast.checkpoint.state_tensors import OnRank, dtype_named
from outlast.errors import ConfigError
from outlast.tensors import Grid, grid_of

__all__ = ["Key", "StageParts", "StageTensor", "Stages", "meet_stages"]

Key = tuple[int, str, str]
"""Where a tensor stands in a fingerprint of the state: 0 for the model or 1 + the optimizer's number, the parameter,
and the optimizer's key."""


class StageTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of one stage. `trains`: (optimizer, group), of a parameter that an optimizer trains."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    buffer: bool
    trains: tuple[int, int] | None


class StageParts(msgspec.Struct, frozen=True):
    """What one rank has. `trained`: names of the parameters that optimizers train, in their order; `groups`: of each
    optimizer, how many; `names`: what an export must know besides (`outlast.runtime.saving.restore`)."""

    held: tuple[StageTensor, ...]
    trained: tuple[str, ...]
    groups: tuple[int, ...]
    registered: str
    names: dict[str, Any]


class Stages:
    """The stages of one replica, as rank `place` knows them. Raises ConfigError for stages that make no model."""

    def __init__(self, place: int, stages: Sequence[StageParts]) -> None:
        self.place, self._stages = place, tuple(stages)
        self._rank: dict[str, int] = {}
        self._rows: dict[str, StageTensor] = {}
        for rank, stage in enumerate(stages):
            self._check(rank, stage)
            for row in stage.held:
                self._rank.setdefault(row.name, rank)
                self._rows.setdefault(row.name, row)
        trained = [len(stage.trained) for stage in stages]
        self.first, self.num_trained = sum(trained[:place]), sum(trained)
        mine = {row.name for row in stages[place].held}
        self.last = len(stages) - 1
        self.elsewhere = frozenset(self._rows.keys() - mine)

    def _check(self, rank: int, stage: StageParts) -> None:
        for row in stage.held:
            other = self._rows.get(row.name)
            if other is not None and not (row.buffer and other == row):
                raise ConfigError(
                    f"two stages of the pipeline have a tensor {row.name}: ranks {self._rank[row.name]} and {rank}",
                    did="nothing was trained",
                    remedy="give each stage the names that its layers have in the whole model (make the whole, then "
                    "delete the layers of others); weights that stages share cannot be had",
                )
        first = self._stages[0]
        where = {row.trains for row in stage.held if row.trains}
        if stage.groups != first.groups or where != {row.trains for row in first.held if row.trains}:
            raise ConfigError(
                f"the optimizers' groups on rank {rank} are not those of rank 0",
                did="nothing was trained",
                remedy="the same optimizers with the same groups on every rank, a parameter that trains in each",
            )
        if not set(stage.trained) <= {row.name for row in stage.held}:
            raise ConfigError(
                "an optimizer trains a parameter that is not in the model of its stage",
                did="nothing was trained",
                remedy="protect(model, …) with the module of this rank's stage, and an optimizer over its parameters",
            )
        if stage.registered != first.registered:
            raise ConfigError(
                "what is registered with state= has not the same shape on every stage",
                did="nothing was trained",
                remedy="register what is equal on all ranks; an average of a stage's weights cannot be had yet",
            )

    # --- numbers -------------------------------------------------------------------------------------------------
    @property
    def schema(self) -> tuple[str, int]:
        """The parameters of the whole model that train, and their number, for the facts that members must share."""
        rows = (self._rows[name] for stage in self._stages for name in stage.trained)
        return "|".join(f"{row.name}:{row.shape}:torch.{row.dtype}" for row in rows), self.num_trained

    def grid(self, block: int) -> Grid:
        """Where the blocks of this stage are among those of the whole model: numbered as if one rank had all of it."""
        shapes = [self._rows[name].shape or (1,) for stage in self._stages for name in stage.trained]
        grid = grid_of(shapes, 0, 1, block)
        mine = len(self._stages[self.place].trained)
        return Grid(grid.cells[self.first : self.first + mine], grid.num_blocks)

    @property
    def names(self) -> dict[str, Any]:
        """What an export must know of the whole model's names."""
        found = [stage.names for stage in self._stages]
        tied = {name: of for each in found for name, of in each["tied"].items()}
        return {"tied": tied, "transient": list(dict.fromkeys(name for each in found for name in each["transient"]))}

    # --- the whole -----------------------------------------------------------------------------------------------
    def spread(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's tree, with what lies on other ranks at its place in it. Raises ConfigError for an optimizer whose
        state has other shapes than the parameter's and single numbers."""
        model = {name: self._on(name, row.shape, row.dtype, tree["model"]) for name, row in self._rows.items()}
        numbered = enumerate(tree["optimizers"])
        return {**tree, "model": model, "optimizers": [self._optimizer(number, each) for number, each in numbered]}

    def _on(self, name: str, shape: Sequence[int], dtype: str, held: Mapping[str, Tensor], key: str = "") -> OnRank:
        rank = self._rank[name]
        return OnRank(rank, tuple(shape), dtype_named(dtype), held[key or name] if rank == self.place else None)

    def _optimizer(self, number: int, mine: Mapping[str, Any]) -> dict[str, Any]:
        """With the state of every stage's parameters: an optimizer keeps for each parameter of a group the same."""
        state: dict[str, Any] = {}
        for name in sorted(name for stage in self._stages for name in stage.trained):
            row = self._rows[name]
            if row.trains is None or row.trains[0] != number:
                continue
            like = name if name in mine["state"] else self._like(row.trains, mine["state"])
            if like:
                state[name] = {k: self._kept(row, k, v, like, mine) for k, v in mine["state"][like].items()}
        return {"state": state, "groups": mine["groups"]}

    def _like(self, trains: tuple[int, int], state: Mapping[str, Any]) -> str:
        """A parameter of mine in the same group, for which the optimizer keeps something; "" if there is none yet."""
        names = (row.name for row in self._stages[self.place].held if row.trains == trains and row.name in state)
        return next(names, "")

    def _kept(self, row: StageTensor, key: str, value: Any, like: str, mine: Mapping[str, Any]) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.ndim and tuple(value.shape) != self._rows[like].shape:
            raise ConfigError(
                f"the optimizer keeps {key} of {like} in another shape than the parameter",
                remedy="in a pipeline an optimizer that keeps tensors of the parameter's shape, such as AdamW or SGD",
            )
        shape, dtype = row.shape if value.ndim else (), str(value.dtype).removeprefix("torch.")
        return self._on(row.name, shape, dtype, mine["state"].get(row.name, {}), key)

    def all_of(self, rows: Sequence[tuple[Key, Tensor]]) -> Iterator[tuple[Key, Tensor]]:
        """What all stages have, each giving its rows, in the order of their keys. Every rank must ask."""
        mine = dict(rows)
        facts = [(key, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for key, t in rows]
        told = _gathered(msgspec.msgpack.encode(facts), len(self._stages))
        kind = list[tuple[Key, str, tuple[int, ...]]]
        whole = [(row, rank) for rank, data in enumerate(told) for row in msgspec.msgpack.decode(data, type=kind)]
        for (key, dtype, shape), rank in sorted(whole):
            if self._rank.get(key[1], rank) != rank:
                continue  # a constant that several stages have
            value = mine[key].detach().cpu().contiguous() if rank == self.place else None
            yield key, _broadcast(value, dtype, shape, rank)


def meet_stages(place: int, width: int, mine: StageParts) -> Stages:
    """What all ranks have. Every rank must call it. Raises ConfigError on all of them for stages that do not fit."""
    told = _gathered(msgspec.msgpack.encode(mine), width)
    return Stages(place, [msgspec.msgpack.decode(data, type=StageParts) for data in told])


def _gathered(data: bytes, width: int) -> list[bytes]:
    """What each rank of the replica gives, in their order."""
    from torch import distributed as dist

    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(width)]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    longest = max(int(size) for size in sizes)
    mine = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
    all_of_it = [torch.empty(longest, dtype=torch.uint8) for _ in range(width)]
    dist.all_gather(all_of_it, mine)
    return [t.numpy().tobytes()[: int(size)] for t, size in zip(all_of_it, sizes, strict=True)]


def _broadcast(value: Tensor | None, dtype: str, shape: tuple[int, ...], rank: int) -> Tensor:
    """A tensor that one rank has, on all of them."""
    from torch import distributed as dist

    made = value if value is not None else torch.empty(shape, dtype=dtype_named(dtype))
    if made.numel():
        dist.broadcast(made.reshape(-1).view(torch.uint8), rank)
    return made
