"""The format on disk: heads, parts, and what makes them trustworthy. No torch, no I/O.

Role: a *head* is one published generation: a small JSON document that names its *parts* by size and digest. A part is
what one writer wrote: a JSON document with its stream (cut into chunks, each with a digest and a place in a data
file) and the boxes of tensors that lie in the stream. Writer 0's part also holds the state's tree and all tensors'
names, dtypes and shapes. Invariants: every byte of a head or part is under its digest; nothing that a document says
is acted on before `parse_head` or `parse_part` has checked all of it, and neither allocates more than the document's
own size. A later DCP storage plug-in can keep its own keys in `Head.extra`. Field by field:
docs/reference/checkpoint-format.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash

from outlast.checkpoint.head_facts import checked
from outlast.errors import Damage

__all__ = [
    "DTYPE_BYTES", "FORMAT", "MAX_CHUNK_BYTES", "MAX_HEAD_BYTES", "MAX_PART_BYTES", "Chunk", "Damage", "FileRef",
    "Head", "Part", "PartRef", "Piece", "UNREADABLE", "TensorSpec", "check_name", "digest", "parse_head", "parse_part",
    "schema_digest", "seal",
]  # fmt: skip

FORMAT = 1
MAX_HEAD_BYTES = 16 << 20
MAX_PART_BYTES = 256 << 20
MAX_CHUNK_BYTES = 64 << 20
_MAX_INT = 1 << 62
_MAX_NDIM = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_SEAL_BYTES = len('{"xxh3_128":"') + 32 + len('",\n')

UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""What decoding JSON of unknown origin raises."""

DTYPE_BYTES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1, "bits8": 1, "bits16": 2, "bits1x8": 1, "bits2x4": 1, "bits4x2": 1,
    **{f"int{k}": 1 for k in range(1, 8)}, **{f"uint{k}": 1 for k in range(1, 8)},
}  # fmt: skip
"""Bytes of one element. The names are torch's; packed types count their packed elements."""


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class PartRef(_Record, frozen=True, kw_only=True):
    """A part file, by writer."""

    writer: int
    name: str
    bytes: int
    digest: str


class Head(_Record, frozen=True, kw_only=True):
    """One generation. `view`: (epoch, n) of the members that wrote it; `bytes`: of all streams; `created_s`: Unix."""

    xxh3_128: str = ""
    format: int
    generation: int
    step: int
    view: tuple[int, int]
    save: str
    run: str
    certified: bool
    created_s: float
    bytes: int
    parts: list[PartRef]
    extra: dict[str, str] = {}


class FileRef(_Record, frozen=True, kw_only=True):
    name: str
    bytes: int


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """`bytes` bytes of the stream, at `at` in file number `file` of the part's list."""

    file: int
    at: int
    bytes: int
    digest: str


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A box of tensor number `tensor` in global coordinates, row-major at `at` in the stream."""

    tensor: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    at: int


class Part(_Record, frozen=True, kw_only=True):
    """What one writer wrote. `tree` and `tensors` are filled in writer 0's part and null in the others."""

    xxh3_128: str = ""
    format: int
    save: str
    writer: int
    num_writers: int
    schema: str
    stream_bytes: int
    files: list[FileRef]
    chunks: list[Chunk]
    pieces: list[Piece]
    tensors: list[TensorSpec] | None = None
    tree: Any = None


class _Version(msgspec.Struct):
    format: int


def digest(data: Any) -> str:
    """XXH3, 128 bits, as 32 hexadecimal digits. `data`: anything with the buffer interface."""
    return xxhash.xxh3_128_hexdigest(data)


def schema_digest(tensors: Sequence[TensorSpec]) -> str:
    return digest(msgspec.json.encode(list(tensors)))


def seal(document: Head | Part) -> bytes:
    """The document as JSON whose first member is the digest of everything after its first line."""
    body = msgspec.json.encode(msgspec.structs.replace(document, xxh3_128=""))
    rest = body.removeprefix(b'{"xxh3_128":"",') + b"\n"
    return b'{"xxh3_128":"' + digest(rest).encode() + b'",\n' + rest


def check_name(name: str, suffix: str, *, file: str) -> None:
    """Refuses anything but a plain file name: no separators, no leading dot, no odd characters."""
    if not _NAME.fullmatch(name) or not name.endswith(suffix):
        raise Damage(f"names a file {name[:80]!r}, which no writer would", file=file)


def _unseal(data: bytes, file: str) -> None:
    line, rest = data[:_SEAL_BYTES], data[_SEAL_BYTES:]
    if not data:
        raise Damage("is empty", file=file)
    if line != b'{"xxh3_128":"' + digest(rest).encode() + b'",\n':
        raise Damage("its bytes do not match its own digest", file=file)
    try:
        version = msgspec.json.decode(data, type=_Version).format
    except UNREADABLE as error:
        raise Damage(f"is not a manifest: {error}", file=file) from error
    if version != FORMAT:
        relation = "a newer outlast" if version > FORMAT else "an unknown outlast"
        raise Damage(f"is in format {version}, of {relation}; this one reads format {FORMAT}", file=file)


def parse_head(data: bytes, *, file: str, generation: int | None = None) -> Head:
    """Check and decode. `generation`: the number in the file's name, which must be the head's own.

    Raises `Damage` naming `file` for anything that `seal` would not have written.
    """
    _unseal(data, file)
    try:
        head = msgspec.json.decode(data, type=Head)
    except UNREADABLE as error:
        raise Damage(f"is not a head: {error}", file=file) from error
    if generation is not None and head.generation != generation:
        raise Damage(f"is generation {head.generation} under the name of generation {generation}", file=file)
    if not head.parts or [p.writer for p in head.parts] != list(range(len(head.parts))):
        raise Damage("does not list one part for each writer", file=file)
    for part in head.parts:
        check_name(part.name, ".json", file=file)
        if not 0 < part.bytes <= MAX_PART_BYTES or not _DIGEST.fullmatch(part.digest):
            raise Damage(f"states {part.bytes} bytes or a malformed digest for part {part.name}", file=file)
    if min(head.generation, head.step + 1, head.bytes, *head.view) < 0 or not math.isfinite(head.created_s):
        raise Damage("holds a number that cannot be", file=file)
    checked(head.extra, file=file)
    return head


def parse_part(data: bytes, ref: PartRef, *, num_writers: int, save: str | None = None) -> Part:
    """Check and decode a part that a head (or a report) refers to. Raises `Damage`."""
    file = ref.name
    if len(data) != ref.bytes or digest(data) != ref.digest:
        raise Damage("is not the file that the head refers to (size or digest differ)", file=file)
    _unseal(data, file)
    try:
        part = msgspec.json.decode(data, type=Part)
    except UNREADABLE as error:
        raise Damage(f"is not a part: {error}", file=file) from error
    if (part.writer, part.num_writers) != (ref.writer, num_writers) or (save is not None and part.save != save):
        raise Damage(f"belongs to save {part.save}, writer {part.writer} of {part.num_writers}", file=file)
    if (part.tensors is None) != (ref.writer != 0):
        raise Damage("the tree and the tensors belong into writer 0's part", file=file)
    _check_stream(part, file)
    if part.tensors is not None:
        _check_tensors(part.tensors, part.schema, file)
    return part


def _check_stream(part: Part, file: str) -> None:
    for ref in part.files:
        check_name(ref.name, ".bin", file=file)
        if not 0 < ref.bytes <= _MAX_INT:
            raise Damage(f"states {ref.bytes} bytes for {ref.name}", file=file)
    total = 0
    for chunk in part.chunks:
        inside = 0 <= chunk.file < len(part.files) and 0 < chunk.bytes <= MAX_CHUNK_BYTES and chunk.at >= 0
        if not inside or chunk.at + chunk.bytes > part.files[chunk.file].bytes or not _DIGEST.fullmatch(chunk.digest):
            raise Damage(f"chunk {chunk.file}:{chunk.at}+{chunk.bytes} lies in none of its files", file=file)
        total += chunk.bytes
    if total != part.stream_bytes:
        raise Damage(f"its chunks hold {total} bytes and its stream {part.stream_bytes}", file=file)


def _check_tensors(tensors: list[TensorSpec], schema: str, file: str) -> None:
    names = set()
    for spec in tensors:
        if spec.dtype not in DTYPE_BYTES:
            raise Damage(f"tensor {spec.name[:80]!r} has the unknown dtype {spec.dtype[:40]!r}", file=file)
        if len(spec.shape) > _MAX_NDIM or any(n < 0 for n in spec.shape) or spec.bytes > _MAX_INT:
            raise Damage(f"tensor {spec.name[:80]!r} has the impossible shape {spec.shape[:8]}", file=file)
        names.add(spec.name)
    if len(names) != len(tensors):
        raise Damage("two tensors have one name", file=file)
    if schema_digest(tensors) != schema:
        raise Damage("its schema digest does not match its tensors", file=file)
