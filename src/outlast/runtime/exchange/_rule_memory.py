"""What robust rules remember from step to step: the last result (centered clipping) and each row's momentum.

Both are whole on every replica, so that no death loses them and a survivor's next step has the bits of the undisturbed
run: a memory of one gradient for the last result, and of two gradients a row for momentum (now, and the step in
progress). They are part of the training state (snapshots, checkpoints, fingerprints) through `state_dict`, and the
rows' momentum is part of a step's outcome, beside the gradient. Momentum of row r: m <- b m + (1 - b) g, from 0
(Karimireddy et al. 2021, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outlast.errors import CheckpointError
from outlast.tensors import Layout, like, local, part_of

__all__ = ["RowMemory"]


class RowMemory:
    """`remembers`: for each bucket, whether its rule has a memory. `shards`: the parameters, if they are spread."""

    def __init__(
        self,
        layout: Layout,
        num_rows: int,
        momentum: float,
        remembers: Sequence[bool],
        shards: Sequence[Tensor] = (),
    ) -> None:
        self.momentum, self.num_rows, self._layout, self._shards = momentum, num_rows, layout, shards
        self._remembers = list(remembers) if any(remembers) else []
        self._last = _zeros(layout) if self._remembers else []
        self._have_last = False
        rows = num_rows if momentum else 0
        self.now = [_zeros(layout) for _ in range(rows)]
        self.next = [_zeros(layout) for _ in range(rows)]

    def __bool__(self) -> bool:
        return bool(self._remembers) or bool(self.momentum)

    def last(self, bucket: int, lo: int, hi: int) -> Tensor | None:
        """The last result of a bucket whose rule wants it; None for the others, and before the first."""
        if not self._have_last or not self._remembers[bucket]:
            return None
        return self._last[bucket][lo:hi]

    def move(self, bucket: int, means: Sequence[Tensor]) -> None:
        """Momentum of the step in progress, of a whole bucket, from the rows' means."""
        for now, then, mean in zip(self.now, self.next, means, strict=True):
            torch.mul(now[bucket], self.momentum, out=then[bucket]).add_(mean, alpha=1.0 - self.momentum)

    def rows(self, bucket: int, lo: int, hi: int) -> list[Tensor]:
        """Slices of the rows' momentum in the step in progress."""
        return [row[bucket][lo:hi] for row in self.next]

    def applied(self, out: Sequence[Tensor]) -> None:
        """The step is committed here. `out`: its gradient, clipped if it was."""
        for now, then in zip(self.now, self.next, strict=True):
            for old, new in zip(now, then, strict=True):
                if not bool(torch.isfinite(new.sum())):  # one NaN must not count against a row for ever
                    torch.where(torch.isfinite(new), new, old, out=new)
        self.now, self.next = self.next, self.now
        if self._remembers:
            self._have_last = True
            for last, flat in zip(self._last, out, strict=True):
                last.copy_(flat)

    # --- beside the gradient, in an outcome ------------------------------------------------------------------------
    def committed(self) -> list[Tensor]:
        """Momentum after the last committed step: one flat tensor a bucket, row after row."""
        return [flat for row in self.now for flat in row]

    def incoming(self) -> list[Tensor]:
        """Where that of the step in progress lies, and is written by who receives it whole."""
        return [flat for row in self.next for flat in row]

    def beside(self, slices: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Slices (bucket, lo, hi) of the gradient, and the same ones of each row: numbered on after the buckets."""
        rows = range(len(self.now))
        size = len(self.now[0]) if self.now else 0
        return [*slices, *((size * (1 + row) + bucket, lo, hi) for row in rows for bucket, lo, hi in slices)]

    # --- state -----------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        last = self._told(self._last) if self._have_last else []
        return {"last": last, "momentum": [self._told(row) for row in self.now]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._have_last = bool(state["last"])
        if self._have_last:
            self._take(self._last, state["last"])
        for row, saved in zip(self.now, state["momentum"], strict=True):
            self._take(row, saved)

    def _told(self, flats: Sequence[Tensor]) -> list[Tensor]:
        if not self._shards:
            return list(flats)
        views = self._layout.views(flats)
        return [like(view, param) for view, param in zip(views, self._shards, strict=True)]

    def _take(self, flats: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
        mine = self._layout.views(flats) if self._shards else list(flats)
        told = [local(part_of(t, p)) for t, p in zip(saved, self._shards, strict=False)] if self._shards else saved
        if [row.shape for row in mine] != [row.shape for row in told]:
            raise CheckpointError(
                "what the robust rule remembers was kept by replicas that hold their model in another way",
                did="nothing was loaded of it",
                remedy="go on with fully_shard, or without it, as the run that saved it did, and with its bucket_mb",
            )
        for row, values in zip(mine, told, strict=True):
            row.copy_(values)


def _zeros(layout: Layout) -> list[Tensor]:
    return layout.flats(torch.zeros(layout.total_bytes, dtype=torch.uint8, device=layout.device))
