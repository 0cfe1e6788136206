"""Which generations to keep, and giving back what no kept one reaches. No torch.

Role: `choose` is the decision, pure; `prune` carries it out on a store. Invariants: the newest generation stays; so
do protected ones, and ones in use by a reader; a certified generation makes room only for certified ones; nothing is
reused before the head that reached it is durably gone; when a kept generation cannot be read, nothing is given back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import msgspec

from outlast.checkpoint._publish import heads
from outlast.checkpoint.manifest import MAX_PART_BYTES, Damage, Head, parse_part
from outlast.checkpoint.store import Store
from outlast.errors import ConfigError

__all__ = ["PruneResult", "Retention", "choose", "fewer", "prune"]

_TOKEN = re.compile(r"e(\d+)-v(\d+)-s(\d+)-a(\d+)-w\d+-")


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """Keep the last `keep_last` generations, and every `keep_every`-th by number for good (0: none).

    Certified generations are counted by themselves: the last `keep_last` of them stay, however many uncertified ones
    come after.
    """

    keep_last: int = 3
    keep_every: int = 0

    def __post_init__(self) -> None:
        if self.keep_last < 1 or self.keep_every < 0:
            raise ConfigError(
                f"keep_last={self.keep_last}, keep_every={self.keep_every}",
                remedy="keep_last is 1 or more; keep_every is 0 (off) or more",
            )


class PruneResult(NamedTuple):
    """Generations and files removed; `note` says why files were left, if they were."""

    generations: list[int]
    files: int
    freed_bytes: int
    note: str = ""


def choose(policy: Retention, generations: Sequence[tuple[int, bool]], *, protected: Collection[int] = ()) -> list[int]:
    """The generations to remove. `generations`: (number, certified) of those that can be read."""
    kept: set[int] = set(protected)
    ordered = sorted(generations, reverse=True)
    kept.update(number for number, _ in ordered[: policy.keep_last])
    kept.update([number for number, certified in ordered if certified][: policy.keep_last])
    if policy.keep_every:
        kept.update(number for number, _ in ordered if number % policy.keep_every == 0)
    return sorted(number for number, _ in ordered if number not in kept)


def fewer(policy: Retention, num_there: int) -> Retention:
    """For a place without room: one generation less than there are, and never more than was wanted; at least one. What
    is kept for good stays."""
    return msgspec.structs.replace(policy, keep_last=max(1, min(policy.keep_last, num_there - 1)))


def prune(
    store: Store,
    policy: Retention,
    *,
    protected: Collection[int] = (),
    names_in_flight: Collection[str] = (),
    known: dict[int, dict[str, int]] | None = None,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> PruneResult:
    """Remove generations and then the files that none reaches. Call from one place at a time.

    `known` remembers what a generation reaches between calls. `progress` is told how many heads of how many have been
    read, then of how many generations that stay the files are known. Raises `OSError`.
    """
    good, bad = heads(store, progress=progress)
    doomed = choose(policy, [(h.generation, h.certified) for h in good], protected=protected)
    kept = [h for h in good if h.generation not in doomed]
    # A head nobody can read is no good to anyone once the kept ones are all newer.
    oldest = min((h.generation for h in kept), default=None)
    doomed += [g for g in bad if oldest is not None and g < oldest and g not in protected]
    if dry_run:
        return PruneResult(sorted(doomed), 0, 0)
    reach = known if known is not None else {}
    sealed: dict[str, int] = {}
    for head in good:
        if head.generation in doomed:
            sealed |= _try_reach(store, head, reach) or {}
    gone = store.withdraw(doomed)
    for generation in gone:
        reach.pop(generation, None)
    kept = [h for h in good if h.generation not in gone]
    unreadable = [g for g in bad if g not in gone]
    live: set[str] = set(names_in_flight)
    for done, head in enumerate(kept):
        if progress is not None:
            progress(done, len(kept))
        files = _try_reach(store, head, reach)
        if files is None:
            return PruneResult(gone, 0, 0, f"generation {head.generation} cannot be read: its files are not known")
        live |= files.keys()
    if unreadable:
        return PruneResult(gone, 0, 0, f"generation {unreadable[0]} cannot be read: its files are not known")
    return _collect(store, kept, live, sealed, gone)


def _collect(store: Store, kept: list[Head], live: set[str], sealed: dict[str, int], gone: list[int]) -> PruneResult:
    """Drop dead files. Only those of a withdrawn generation have surely no writer and may be written over."""
    newest = max(((h.view, h.step) for h in kept), default=None)
    dead = [name for name in store.names() if name not in live and (name in sealed or _is_past(name, newest))]
    freed = sum(store.size(name) or 0 for name in dead)
    store.discard(dead, recycle=[name for name in dead if name in sealed and name.endswith(".bin")])
    return PruneResult(gone, len(dead), freed)


def _is_past(name: str, newest: tuple[tuple[int, int], int] | None) -> bool:
    """Whether a file belongs to a save that can no longer be published: it is not newer than what is."""
    match = _TOKEN.match(name)
    if match is None or newest is None:
        return False
    epoch, n, step = (int(match[i]) for i in (1, 2, 3))
    return ((epoch, n), step) <= newest


def _try_reach(store: Store, head: Head, known: dict[int, dict[str, int]]) -> dict[str, int] | None:
    """Names and sizes of all files that a generation reaches; None if that cannot be found out."""
    if head.generation not in known:
        files: dict[str, int] = {}
        try:
            for ref in head.parts:
                part = parse_part(store.read_part(ref.name, MAX_PART_BYTES), ref, num_writers=len(head.parts))
                files[ref.name] = ref.bytes
                files |= {file.name: file.bytes for file in part.files}
        except (Damage, OSError):
            return None
        known[head.generation] = files
    return known[head.generation]
