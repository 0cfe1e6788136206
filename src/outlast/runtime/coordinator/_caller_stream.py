"""One proved connection to the coordinator: frames in and out, each with its code (`transport/seal.py`)."""

from __future__ import annotations

import asyncio
import struct

from outlast.runtime.transport.frames import frame_length
from outlast.runtime.transport.seal import CODE_BYTES, LENGTH_CODE_BYTES, Keys, Seal

__all__ = ["CallerStream"]

_LENGTH = struct.Struct(">I")


class CallerStream:
    """Reads and writes the frames of one caller. `keys`: for what this end sends, and for what the caller does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: Keys) -> None:
        self._reader, self._writer = reader, writer
        self._mine, self._theirs = (Seal(key) for key in keys)

    async def read(self) -> bytes:
        """Return the next frame's body. WireRefusal if it is not what was sent; OSError or EOFError at the end."""
        head = await self._reader.readexactly(_LENGTH.size)
        self._theirs.check_length(await self._reader.readexactly(LENGTH_CODE_BYTES), head)
        body = await self._reader.readexactly(frame_length(head))
        self._theirs.check(await self._reader.readexactly(CODE_BYTES), head, body)
        return body

    def write(self, data: bytes) -> None:
        """Queue a whole frame."""
        self._writer.write(self._mine.sealed(data[: _LENGTH.size], memoryview(data)[_LENGTH.size :]))

    async def say_last(self, data: bytes) -> None:
        """Send a frame, and nothing more; what comes meanwhile is read, or its end would lose these words."""
        self.write(data)
        self._writer.write_eof()
        while await self._reader.read(1 << 16):
            pass

    async def drain(self) -> None:
        await self._writer.drain()

    def abort(self) -> None:
        """Hang up at once."""
        self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()
