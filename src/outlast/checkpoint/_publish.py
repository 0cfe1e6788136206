"""The one act that makes a generation: checking every promise, then writing the head. No torch.

Role: what the coordinator (or whoever it names) does with a `Publish` action of `core.protocol.saves.commit`.
Invariants: a head is written only after every part was read back and every data file seen with its size; numbers grow
by one and are taken exclusively, so two publishers cannot both have one; what is older than the newest generation of
the same run, by view and step, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from outlast.checkpoint.manifest import MAX_PART_BYTES, Damage, Head, PartRef, parse_head, parse_part, seal
from outlast.checkpoint.reader import Reader
from outlast.checkpoint.store import Source, Store, generation_name, generation_number
from outlast.core.protocol.saves.commit import PartReport, SaveId
from outlast.errors import CheckpointError

__all__ = ["certify", "heads", "publish", "read_head", "report_of"]

_MAX_TRIES = 64
_STRAY = 1000  # a head that nobody can read and that lies so far ahead of those that can be is no generation
_LOOK_BACK = 8  # heads of one run grow in view and step, so its newest few tell all


def read_head(store: Source, generation: int) -> Head:
    """Raises `Damage` or `OSError`."""
    return parse_head(store.read_head(generation), file=generation_name(generation), generation=generation)


def heads(
    store: Source, *, newest: int | None = None, progress: Callable[[int, int], None] | None = None
) -> tuple[list[Head], dict[int, str]]:
    """The readable heads, newest first, and why the others are not; only the `newest` so many if given.

    `progress` is told how many of how many have been read.
    """
    good, bad = [], {}
    numbers = store.generations()
    numbers = numbers if newest is None else numbers[-newest:]
    for done, generation in enumerate(reversed(numbers)):
        if progress is not None:
            progress(done, len(numbers))
        try:
            good.append(read_head(store, generation))
        except (Damage, OSError) as error:
            bad[generation] = error.what if isinstance(error, Damage) else str(error)
    return good, bad


def publish(
    store: Store,
    save: SaveId,
    reports: Iterable[PartReport],
    *,
    created_s: float,
    run: str = "",
    certified: bool = False,
    extra: dict[str, str] | None = None,
    before: Callable[[], None] = lambda: None,
) -> int:
    """Make `save` the newest generation and return its number. The same call again returns the same number. `before`:
    called right before each try to write the head; what it raises ends it.

    Raises `CheckpointError` if the save is older than what is published, `Damage` if a part is not as reported, and
    `OSError` if the store fails; nothing is published then.
    """
    parts = [PartRef(writer=r.writer, name=r.name, bytes=r.bytes, digest=r.digest) for r in reports]
    parts.sort(key=lambda ref: ref.writer)
    draft = Head(
        format=1,
        generation=0,
        step=save.step,
        view=save.view,
        save=save.token,
        run=run,
        certified=certified,
        created_s=created_s,
        bytes=0,
        parts=parts,
        extra=extra or {},
    )
    same = _published(heads(store, newest=_LOOK_BACK)[0], draft)
    if same is not None:
        return same
    draft = msgspec.structs.replace(draft, bytes=_stream_bytes(store, draft))
    parse_head(seal(draft), file="the head to be published")
    with Reader(draft, [store]):
        pass  # every part, piece and file size was held against the others
    return _numbered(store, draft, before)


def _numbered(store: Store, draft: Head, before: Callable[[], None]) -> int:
    """Write the head under the first number that nobody else takes. What is there is read anew before each try."""
    for _ in range(_MAX_TRIES):
        found, unreadable = heads(store, newest=_LOOK_BACK)
        same = _published(found, draft)
        if same is not None:
            return same
        number = _next(found, unreadable)
        if generation_number(generation_name(number)) is None:
            raise CheckpointError(
                f"{generation_name(number)} is no number for a generation",
                where=store.url,
                did="the generation was not published",
                remedy="remove the stray file that has the highest number",
            )
        before()
        if store.publish(number, seal(msgspec.structs.replace(draft, generation=number))):
            return number
    raise CheckpointError(
        f"no free generation number after {_MAX_TRIES} tries",
        where=store.url,
        did="the generation was not published",
        remedy="let no other run save there: give each its own checkpoint directory",
    )


def _next(found: list[Head], unreadable: dict[int, str]) -> int:
    """After the newest, also one that cannot be read just now: it may be a generation. Not after a stray file whose
    enormous number would use the numbers up.
    """
    newest = max((h.generation for h in found), default=None)
    near = [n for n in unreadable if newest is None or n <= newest + _STRAY]
    return max([*near, newest if newest is not None else -1]) + 1


def _stream_bytes(store: Store, draft: Head) -> int:
    total = 0
    for ref in draft.parts:
        data = store.read_part(ref.name, MAX_PART_BYTES)
        total += parse_part(data, ref, num_writers=len(draft.parts), save=draft.save).stream_bytes
    return total


def _published(found: list[Head], draft: Head) -> int | None:
    """The generation that this save is already. Raises `CheckpointError` if it is older than the newest one."""
    for head in found:
        if head.save == draft.save and head.parts == draft.parts:
            return head.generation
    for head in found:
        if head.run == draft.run and (head.view, head.step) >= (draft.view, draft.step):
            raise CheckpointError(
                f"step {draft.step} of view {draft.view} is not newer than generation {head.generation}, which holds "
                f"step {head.step} of view {head.view}",
                where=generation_name(head.generation),
                did="the generation was not published; the newer one stays",
                remedy="nothing, if a newer view took over; else let no other run save there",
            )
    return None


def certify(store: Store, generation: int) -> None:
    """Mark a published generation certified, by replacing its head in one act."""
    head = read_head(store, generation)
    if not head.certified:
        store.replace_head(generation, seal(msgspec.structs.replace(head, certified=True)))


def report_of(ref: PartRef, schema: str) -> PartReport:
    return PartReport(writer=ref.writer, name=ref.name, bytes=ref.bytes, digest=ref.digest, schema=schema)
