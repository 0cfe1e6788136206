"""Where the blocks of a rule's Gram matrix are: numbered for each group of parameters by itself, over all ranks.

Of shards the numbers are those of the finest grid that any number of ranks makes (`tensors/_shards.py`), so that the
tree over blocks, and with it every bit of the matrix, does not show how many ranks there are. What is in a block is
`robust_rows.py`'s matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outlast.tensors import BLOCK, Layout, grid_of_params, partial_grams

__all__ = ["GramBlocks", "SpreadParams", "gram_blocks_of"]


@dataclass(frozen=True, slots=True)
class SpreadParams:
    """How parameters are spread over the ranks of a replica, by rows. `params`: as tensors that know of what they are a
    part; `place`: which of `width` ranks this process is."""

    params: Sequence[Tensor]
    place: int
    width: int


@dataclass(slots=True)
class GramBlocks:
    """The blocks of one group that lie here. `numbers`: of each, by its number in the layout; `num_blocks`: of the
    group, over all ranks."""

    numbers: dict[int, int]
    num_blocks: int
    _kept: list[tuple[int, Tensor]] = field(default_factory=list)

    def clear(self) -> None:
        """A new step."""
        self._kept = []

    def keep(self, first: int, matrices: Tensor) -> None:
        """Matrices (blocks, n, n) of blocks that follow each other from block `first` of the layout on."""
        self._kept.append((self.numbers[first], matrices))

    def partial(self) -> dict[tuple[int, int], Tensor]:
        """Their sums, as far as the tree allows: at most two a level for each run of blocks."""
        nodes: dict[tuple[int, int], Tensor] = {}
        run: list[Tensor] = []
        start = end = 0
        for first, matrices in sorted(self._kept, key=lambda row: row[0]):
            if run and first != end:
                nodes |= partial_grams(torch.cat(run), start, self.num_blocks)
                run = []
            start, end = (start, end) if run else (first, first)
            run.append(matrices)
            end += len(matrices)
        return nodes | (partial_grams(torch.cat(run), start, self.num_blocks) if run else {})


def gram_blocks_of(
    layout: Layout, params: Sequence[int], buckets: Sequence[int], spread: SpreadParams | None
) -> GramBlocks:
    """The blocks of a group with these parameters, which fill these buckets."""
    if spread is None:
        every = [b for at in buckets for b in range(layout.buckets[at].num_blocks)]
        firsts = [layout.buckets[at].first_block for at in buckets for _ in range(layout.buckets[at].num_blocks)]
        return GramBlocks({first + b: n for n, (first, b) in enumerate(zip(firsts, every, strict=True))}, len(every))
    own = grid_of_params([spread.params[index] for index in params], spread.place, spread.width, BLOCK)
    whole = grid_of_params(spread.params, spread.place, spread.width, BLOCK)
    numbers: dict[int, int] = {}
    for index, cells in zip(params, own.cells, strict=True):
        for (elements, mine), (_, among_all) in zip(cells, whole.cells[index], strict=True):
            numbers |= {among_all + b: mine + b for b in range(-(-elements // BLOCK))}
    return GramBlocks(numbers, own.num_blocks)
