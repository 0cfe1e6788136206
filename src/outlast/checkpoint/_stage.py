"""From a plan to copies: which bytes of which tensor go where in a slot. torch.

Role: the seam between the pure plan and the snapshot. Invariant: the copies of one writer and the zeroed gaps between
them cover its stream exactly, so that nothing of an earlier snapshot is left in it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch

from outlast.checkpoint._arena import Slot
from outlast.checkpoint._plan import PartLayout
from outlast.checkpoint.boxes import Box, intersect
from outlast.checkpoint.manifest import DTYPE_BYTES, Piece
from outlast.checkpoint.snapshot import Copy
from outlast.checkpoint.state_tensors import FlatState, Local
from outlast.errors import ProtocolViolation

__all__ = ["copies_of"]


def copies_of(state: FlatState, layout: PartLayout, slot: Slot) -> list[Copy]:
    """One copy for each piece of the layout, with the gap before it; the gap after the last is zeroed now."""
    copies, end = [], 0
    base = ctypes.addressof(ctypes.c_char.from_buffer(slot.area, slot.start))
    for piece in layout.pieces:
        spec = state.specs[piece.tensor]
        size = math.prod(piece.shape) * DTYPE_BYTES[spec.dtype]
        source = _source(state.local[piece.tensor], piece, spec.name)
        copies.append(Copy(spec.name, source, piece.shape, slot.view, base + piece.at, piece.at, size, piece.at - end))
        end = piece.at + size
    ctypes.memset(base + end, 0, layout.stream_bytes - end)
    return copies


def _source(local: Sequence[Local], piece: Piece, name: str) -> torch.Tensor:
    """The values of a piece, out of the box that holds them."""
    if local and local[0].box.shape == piece.shape and local[0].box.offset == piece.offset:
        return local[0].values.data  # the memory it has now, should the caller give the tensor other memory
    wanted = Box(piece.offset, piece.shape)
    for box, values in local:
        if intersect(box, wanted) == wanted:
            values = values.detach()
            for dim, (start, have, length) in enumerate(zip(wanted.offset, box.offset, wanted.shape, strict=True)):
                values = values.narrow(dim, start - have, length)
            return values
    raise ProtocolViolation(f"the plan gave this writer a piece of {name!r} that it does not hold")
