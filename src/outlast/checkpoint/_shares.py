"""Which part of a state is this writer's: the state is taken apart, and its share planned once for each layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outlast.checkpoint._plan import PartLayout, plan
from outlast.checkpoint.manifest import FORMAT, Part
from outlast.checkpoint.state_tensors import FlatState, Schema, flatten
from outlast.core.protocol.saves.commit import SaveId

__all__ = ["WriterShares"]


class WriterShares:
    """Plans what one of `num_replicas` writers keeps. `writer_of`: as of `flatten`; `schema`: of the newest state seen,
    which the next one is compared with first."""

    def __init__(
        self, replica: int, num_replicas: int, writer_of: Callable[[int], int | Sequence[int]] | None = None
    ) -> None:
        self.replica, self.num_replicas, self.writer_of = replica, num_replicas, writer_of
        self.schema: Schema | None = None
        self._plans: dict[tuple[str, int], list[PartLayout]] = {}

    def planned(self, tree: Any) -> tuple[FlatState, PartLayout]:
        """The state, and this writer's share of it. Raises `ConfigError` if the tree holds what cannot be kept."""
        state = flatten(tree, writer_of=self.writer_of, like=self.schema)
        self.schema = state.schema
        sharded = [shards for shards in state.shards if shards is not None]
        key = (f"{state.schema.digest} {sharded}", self.num_replicas)
        if key not in self._plans:
            self._plans = {key: plan(state.specs, state.shards, self.num_replicas)}
        return state, self._plans[key][self.replica]

    def part(self, save: SaveId, state: FlatState, layout: PartLayout) -> Part:
        """What the share is, before anything of it is written; the first writer's tells of all tensors."""
        first = self.replica == 0
        return Part(
            format=FORMAT, save=save.token, writer=self.replica, num_writers=self.num_replicas,
            schema=state.schema.digest, stream_bytes=layout.stream_bytes, files=[], chunks=[],
            pieces=list(layout.pieces), tensors=state.specs if first else None, tree=state.tree if first else None,
        )  # fmt: skip
