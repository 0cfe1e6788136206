"""The memory that gradients and partial sums lie in: slots of one layout each, shared with a host's peers or private.

Slot 0 is the outcome slot. A region has one writer; peers only read it (protocol, 14). What is added to what is
`training/_partial_sums.py`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outlast.runtime.transport.regions import Region
from outlast.tensors import Layout

__all__ = ["Memory", "OUTCOME"]

OUTCOME = 0


class Memory:
    """Slots of one layout each: shared with the peers of the host (a region), or private on the layout's device.
    `alone`: there are no peers to pass a region to."""

    def __init__(
        self,
        layout: Layout,
        num_slots: int,
        region: Region | None = None,
        shared: bool = True,
        *,
        alone: bool = False,
    ) -> None:
        self.layout, self.num_slots = layout, num_slots
        made = shared and region is None
        self.region = Region(layout.total_bytes * num_slots, alone=alone) if made else region
        self._flats: dict[int, list[Tensor]] = {}
        self._views: dict[int, list[Tensor]] = {}

    def flats(self, slot: int) -> list[Tensor]:
        """The slot's buckets."""
        if slot not in self._flats:
            size = self.layout.total_bytes
            if self.region is None or size == 0:
                storage = torch.zeros(size, dtype=torch.uint8, device=self.layout.device)
            else:
                storage = torch.frombuffer(self.region.map, dtype=torch.uint8, count=size, offset=slot * size)
            self._flats[slot] = self.layout.flats(storage)
        return self._flats[slot]

    def views(self, slot: int) -> list[Tensor]:
        """The slot's gradients, one a parameter."""
        if slot not in self._views:
            self._views[slot] = self.layout.views(self.flats(slot))
        return self._views[slot]
