"""What is folded from a journal and kept beside it: whether that may be relied on.

Role: who has read a long journal keeps what came of it, so that nobody reads it all again (`observe`'s history of a
run, the coordinator's summary for its successor). Invariant: the journal alone is the truth, so what was kept counts
only if it is whole, was made by this code, and is of this very journal. Knows nothing of what is kept, nor where.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from outlast.core import events as ev
from outlast.journal._journal import Journal

__all__ = ["code_digest", "ends_digest", "sealed", "unsealed"]

_DIGEST_BYTES = 16


def sealed(magic: bytes, body: bytes) -> bytes:
    """What to write down: `magic` names the format."""
    return magic + _digest(body) + body


def unsealed(magic: bytes, data: bytes) -> bytes | None:
    """The body of what was written down; None where it is torn, damaged or of another format."""
    start = len(magic) + _DIGEST_BYTES
    body = data[start:]
    return body if data[:start] == magic + _digest(body) else None


def code_digest(modules: Iterable[ModuleType]) -> bytes | None:
    """A digest of the source of what folds, as other code may make something else of the same entries; None where that
    cannot be read: nothing is kept then."""
    try:
        return _digest(b"".join(Path(str(module.__file__)).read_bytes() for module in modules))
    except OSError:
        return None


def ends_digest(journal: Journal, seq: int) -> bytes | None:
    """A digest of the first entry and of the one numbered `seq`, which no other journal has; None where there is no
    such entry. Raises EnvironmentFault."""
    first, last = journal.events(limit=1), journal.events(seq - 1, limit=1)
    if not last or last[0].seq != seq:
        return None
    return _digest(ev.encode(first[0].event) + ev.encode(last[0].event))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
