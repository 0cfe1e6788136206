"""Codes on frames: whoever sits between two proved ends can change, repeat, reorder and leave out no frame unseen.

The handshake gives both ends two keys, one for each direction, that no other connection has. A frame's code is a keyed
BLAKE2b of its number on the connection and of its bytes, so a frame that is out of its place has another one. It hides
nothing: who sits on the path still reads. Nor does it tell an end that was cut off from one that ended: that is a lost
connection like any other.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, Protocol

from outlast.errors import WireRefusal

__all__ = ["CODE_BYTES", "FORGED", "Growing", "Keys", "Seal", "same"]

CODE_BYTES = 16
FORGED = "a frame that was changed, repeated or left out on its way"
Keys = tuple[bytes, bytes]
"""For what this end sends, and for what the other does."""


class Growing(Protocol):
    """A code that is not done yet."""

    def update(self, data: Any, /) -> None: ...
    def digest(self) -> bytes: ...


class Seal:
    """Makes or checks the codes of one direction of one connection, in the order of its frames."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def code(self, *parts: Any) -> bytes:
        """Make the code of the next frame, whose bytes these parts are one after the other."""
        growing = self.begun()
        for part in parts:
            growing.update(part)
        return growing.digest()

    def begun(self) -> Growing:
        """Begin the next frame's code, for bytes that come or go piece by piece."""
        self._number += 1
        return hashlib.blake2b(self._number.to_bytes(8, "big"), digest_size=CODE_BYTES, key=self._key)

    def check(self, code: Any, *parts: Any) -> None:
        """Raise WireRefusal unless this is the code of the next frame."""
        if not same(code, self.code(*parts)):
            raise WireRefusal(FORGED)


def same(code: Any, wanted: bytes) -> bool:
    """Compare two codes, in a time that tells nothing of them."""
    return hmac.compare_digest(bytes(code), wanted)
