"""Parameters that tensor parallelism has cut, and FSDP after it: what lies here, and the grid of their blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outlast.errors import ConfigError
from outlast.runtime.exchange import shard_sums
from outlast.tensors import BLOCK, _shards, grid_of, grid_of_params, part_of


class Cut:
    """A placement as torch has them. `after`: FSDP's cut of what tensor parallelism has left of the same dimension."""

    def __init__(self, dim: int | None, after: bool = False) -> None:
        if dim is not None:
            self.dim = dim
        if after:
            self.split_factor = 2

    def is_replicate(self) -> bool:
        return not hasattr(self, "dim")


def spread(shape: tuple[int, ...], where: dict[str, tuple[int, int, Cut]]) -> Any:
    """`where`: (ranks, my place, placement) of each dimension of the mesh."""
    mesh = SimpleNamespace(
        mesh_dim_names=tuple(where), shape=tuple(size for size, _, _ in where.values()), ndim=len(where),
        get_coordinate=lambda: [place for _, place, _ in where.values()],
    )  # fmt: skip
    return SimpleNamespace(shape=torch.Size(shape), device_mesh=mesh, placements=[cut for _, _, cut in where.values()])


@pytest.fixture(autouse=True)
def are_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (_shards, shard_sums):
        monkeypatch.setattr(module, "is_shard", lambda tensor: hasattr(tensor, "device_mesh"))


def test_what_lies_here_is_cut_by_tensor_parallelism_first() -> None:
    whole = torch.arange(24.0).view(12, 2)
    both = spread((12, 2), {"shard": (2, 1, Cut(0, after=True)), "tp": (3, 2, Cut(0))})
    assert part_of(whole, both).tolist() == whole[10:12].tolist()
    columns = spread((12, 2), {"shard": (2, 1, Cut(0)), "tp": (2, 0, Cut(1))})
    assert part_of(whole, columns).tolist() == whole[6:, :1].tolist()
    alike = spread((12, 2), {"shard": (8, 6, Cut(0)), "tp": (2, 1, Cut(None))})
    assert part_of(whole, alike).shape == (0, 2)
    assert part_of(whole[:1], both).shape == (1, 2), "a part already"


def test_blocks_of_parts_follow_each_other_and_those_of_what_is_alike_are_the_same() -> None:
    """A parameter cut along its rows, one along its columns, and one that all ranks hold."""

    def lane(place: int, shard: tuple[int, int] = (1, 0)) -> Any:
        return grid_of_params(
            [
                spread((400, 300), {"shard": (*shard, Cut(0, after=True)), "tp": (2, place, Cut(0))}),
                spread((300, 400), {"shard": (*shard, Cut(0)), "tp": (2, place, Cut(1))}),
                spread((9,), {"shard": (*shard, Cut(0)), "tp": (2, place, Cut(None))}),
            ],
            shard[1], shard[0], BLOCK,
        )  # fmt: skip

    def blocks(grid: Any, index: int) -> set[int]:
        return {first + at for elements, first in grid.cells[index] for at in range(-(-elements // BLOCK))}

    grids = [lane(0), lane(1)]
    assert grids[0].num_blocks == grids[1].num_blocks
    for cut in (0, 1):
        assert not blocks(grids[0], cut) & blocks(grids[1], cut)
        assert sum(elements for grid in grids for elements, _ in grid.cells[cut]) == 120_000
    assert grids[0].cells[2] == grids[1].cells[2]
    every = {block for grid in grids for index in range(3) for block in blocks(grid, index)}
    assert every == set(range(grids[0].num_blocks))
    for place, grid in enumerate(grids):  # the rows of each part shared by two ranks: the same blocks
        halves = [lane(place, (2, half)) for half in range(2)]
        for index in range(3):
            assert [*halves[0].cells[index], *halves[1].cells[index]] == list(grid.cells[index])
            assert halves[0].num_blocks == grid.num_blocks


def test_without_it_the_grid_is_that_of_rows() -> None:
    shapes = [(333, 24), (5,), (1000, 300)]
    params = [spread(shape, {"shard": (4, 2, Cut(0))}) for shape in shapes]
    assert grid_of_params(params, 2, 4, BLOCK) == grid_of(shapes, 2, 4, BLOCK)


def test_what_is_not_spread_as_it_must_be_is_refused_by_name() -> None:
    cut: Any = spread((12, 2), {"tp": (2, 0, Cut(0))})
    both = spread((12, 2), {"shard": (2, 1, Cut(0, after=True)), "tp": (2, 1, Cut(0))})
    alike: Any = torch.zeros(3)
    assert shard_sums.sharded([("cut", cut), ("alike", alike)], 1, 2)
    assert shard_sums.sharded([("both", both)], 2, 2)
    assert not shard_sums.sharded([("alike", alike)], 1, 1)
    wrong: list[tuple[Any, int, int, str]] = [
        (alike, 2, 2, "not sharded by rows over the 2 ranks"),
        (cut, 2, 2, "not sharded by rows over the 2 ranks"),
        (spread((12, 3), {"tp": (2, 0, Cut(1))}), 1, 2, "not cut into equal parts by the 2 ranks"),
        (spread((12, 2), {"tp": (4, 0, Cut(0))}), 1, 2, "not cut into equal parts"),
        (spread((12, 2), {"shard": (2, 0, Cut(1))}), 2, 1, "not sharded by rows"),
    ]
    for param, width, together, says in wrong:
        with pytest.raises(ConfigError, match=f"w is {says}"):
            shard_sums.sharded([("w", param)], width, together)
