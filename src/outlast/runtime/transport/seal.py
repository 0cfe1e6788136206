"""Codes on frames: whoever sits between two proved ends can change, repeat, reorder and leave out no frame unseen.

The handshake gives both ends two keys, one for each direction, that no other connection has. A frame's code is a keyed
BLAKE2b of its number on the connection and of its bytes, so a frame that is out of its place has another one. It hides
nothing: who sits on the path still reads. Nor does it tell an end that was cut off from one that ended: that is a lost
connection like any other. A length is acted on before its frame is here, so it has a short code of its own.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, Protocol

from outlast.errors import WireRefusal

__all__ = ["CODE_BYTES", "FORGED", "LENGTH_CODE_BYTES", "Growing", "Keys", "Seal", "same"]

CODE_BYTES = 16
LENGTH_CODE_BYTES = 8
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

    def sealed(self, head: bytes, body: Any) -> bytes:
        """Make the next frame: `head`, which is its length, `body`, and the codes of both."""
        return b"".join((head, self.length_code(head), body, self.code(head, body)))

    def length_code(self, head: Any) -> bytes:
        """Make the code of the next frame's length. Before that frame's own."""
        number = (self._number + 1).to_bytes(8, "big")
        keyed = hashlib.blake2b(number, digest_size=LENGTH_CODE_BYTES, key=self._key, person=b"length")
        keyed.update(head)
        return keyed.digest()

    def check_length(self, code: Any, head: Any) -> None:
        """Raise WireRefusal unless this is the code of the next frame's length: before that is waited for."""
        if not same(code, self.length_code(head)):
            raise WireRefusal(FORGED)

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
