"""A generation from tensors that come one after the other: what importing is made of. No torch.

Role: turn any source of (tensor, box) bytes into a published generation with bounded memory: boxes are packed into
groups, each group becomes one writer's part. Invariant: memory is one group (256 MiB, or the largest box); a build
that fails leaves nothing that is reachable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from outlast.checkpoint._arena import map_private
from outlast.checkpoint._publish import publish, report_of
from outlast.checkpoint._writer import write_part
from outlast.checkpoint.boxes import Box
from outlast.checkpoint.fs import ALIGN
from outlast.checkpoint.manifest import DTYPE_BYTES, FORMAT, Part, Piece, TensorSpec, schema_digest
from outlast.checkpoint.store import Store
from outlast.core.protocol.saves.commit import SaveId

__all__ = ["Item", "build"]

_GROUP_BYTES = 256 << 20
_SMALL_ALIGN = 64


class Item(NamedTuple):
    """A box of tensor number `tensor`."""

    tensor: int
    box: Box


class _Group(NamedTuple):
    pieces: list[Piece]
    items: list[int]
    stream_bytes: int


def build(
    store: Store,
    specs: Sequence[TensorSpec],
    tree: Any,
    items: Sequence[Item],
    fill: Callable[[int, memoryview], None],
    *,
    step: int,
    created_s: float,
    nonce: str,
    extra: dict[str, str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write and publish; returns the generation. `fill(k, buffer)` puts the row-major bytes of item k into `buffer`.

    Raises what `fill` raises, `Damage` if the items do not hold every element once, and `OSError`.
    """
    groups = _groups(specs, items)
    save = SaveId(epoch=0, n=0, step=step)
    reports = []
    area = memoryview(map_private(max(group.stream_bytes for group in groups)))
    for writer, group in enumerate(groups):
        stream = area[: group.stream_bytes]
        stream[:] = bytes(len(stream))  # no byte of the group before may show between the pieces
        for piece, item in zip(group.pieces, group.items, strict=True):
            size = Box(piece.offset, piece.shape).volume * DTYPE_BYTES[specs[piece.tensor].dtype]
            fill(item, stream[piece.at : piece.at + size])
            if progress is not None:
                progress(size)
        part = Part(
            format=FORMAT,
            save=save.token,
            writer=writer,
            num_writers=len(groups),
            schema=schema_digest(specs),
            stream_bytes=len(stream),
            files=[],
            chunks=[],
            pieces=group.pieces,
            tensors=list(specs) if writer == 0 else None,
            tree=tree if writer == 0 else None,
        )
        name = f"{save.token}-w{writer:04d}-{nonce}"
        written = write_part(store, stream, part, name=name, wait=lambda end: None, base={}, probe=lambda phase: None)
        reports.append(report_of(written.ref, part.schema))
    return publish(store, save, reports, created_s=created_s, run=f"import-{nonce}", extra=extra)


def _groups(specs: Sequence[TensorSpec], items: Sequence[Item]) -> list[_Group]:
    groups: list[_Group] = []
    pieces: list[Piece] = []
    numbers: list[int] = []
    at = 0
    for number, (tensor, box) in enumerate(items):
        size = box.volume * DTYPE_BYTES[specs[tensor].dtype]
        if size == 0:
            continue
        if pieces and at + size > _GROUP_BYTES:
            groups.append(_Group(pieces, numbers, -(-at // ALIGN) * ALIGN))
            pieces, numbers, at = [], [], 0
        pieces.append(Piece(tensor, box.offset, box.shape, at))
        numbers.append(number)
        at += -(-size // _SMALL_ALIGN) * _SMALL_ALIGN
    return [*groups, _Group(pieces, numbers, -(-at // ALIGN) * ALIGN)]
