"""The file in which a campaign keeps its results, a JSON line each, so that it goes on where it was stopped.

One campaign writes to it at a time. A line that a kill has cut short is taken off.
"""

from __future__ import annotations

import fcntl
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import msgspec

from outlast.errors import ConfigError

__all__ = ["CampaignFile", "campaign_file"]

Result = TypeVar("Result", bound=msgspec.Struct)


class CampaignFile(Generic[Result]):
    """`found`: the results so far, `seed`: theirs, or the one that was asked for, or a new one."""

    def __init__(self, found: list[Result], seed: int, write: Callable[[bytes], object]) -> None:
        self.found, self.seed, self._write = found, seed, write

    def add(self, result: Result) -> None:
        """Keep one more."""
        self.found.append(result)
        self._write(msgspec.json.encode(result) + b"\n")


@contextmanager
def campaign_file(
    path: Path | None, kind: type[Result], seed_of: Callable[[Result], int], seed: int
) -> Iterator[CampaignFile[Result]]:
    """What `--resume` names, held until the campaign is over; without one nothing is kept. `seed`: -1 for any.

    Raises ConfigError if another campaign holds it, if it cannot be written, is of another seed, or has a line that is
    no result.
    """
    if path is None:
        yield CampaignFile([], _drawn(seed), lambda _: None)
        return
    with _opened(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another campaign writes to --resume {path}", remedy="let it end, or give another file"
            ) from error
        file.seek(0)
        known = file.read()
        whole = known[: known.rfind(b"\n") + 1]
        try:
            found = [msgspec.json.decode(line, type=kind) for line in whole.splitlines()]
            if known and not whole:  # it may be anybody's
                raise msgspec.DecodeError("it has no end")
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"--resume {path} has a line that is no result: {error}", remedy="give a new file"
            ) from error
        seeds = {seed_of(result) for result in found}
        if len(seeds) > 1 or (seed >= 0 and seeds - {seed}):
            raise ConfigError(f"--resume {path} is of seed {min(seeds)}, not {seed}", remedy="leave --seed out")
        if len(whole) < len(known):
            file.truncate(len(whole))
        yield CampaignFile(found, seeds.pop() if seeds else _drawn(seed), file.write)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("ab+", buffering=0)
    except OSError as error:
        raise ConfigError(f"--resume {path}: {error.strerror}", remedy="name a file that can be written") from error


def _drawn(seed: int) -> int:
    return secrets.randbelow(1_000_000) if seed < 0 else seed
