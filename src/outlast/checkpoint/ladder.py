"""Which generation to load, and from where: nearest tier first, then farther ones, then older generations. No torch.

Role: order candidates over several stores and try them until one serves. A generation that lies in several stores is
one candidate: its chunks come from the nearest store where they are right. Invariants: nothing is skipped silently;
an older generation is used only when no store has the newer one whole; a store that does not answer is not waited for.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from outlast.checkpoint.manifest import Damage, Head, parse_head
from outlast.checkpoint.patience import Stuck, patient
from outlast.checkpoint.reader import Reader, Skip
from outlast.checkpoint.store import Source, generation_name
from outlast.errors import CheckpointError

__all__ = ["Rung", "candidates", "first_valid", "open_reader"]

T = TypeVar("T")


class Rung(NamedTuple):
    head: Head
    stores: tuple[Source, ...]


def candidates(stores: Sequence[Source], note: Callable[[Skip], None]) -> list[Rung]:
    """Every generation that some store has a head of, newest first; `stores` nearest first."""
    found: list[Rung] = []
    for store in stores:
        for generation in reversed(_listed(store, note)):
            head = _head(store, generation, note)
            if head is not None:
                _add(found, head, store)
    return found


def _listed(store: Source, note: Callable[[Skip], None]) -> list[int]:
    try:
        return store.generations()
    except OSError as error:
        note(Skip(-1, -1, store.tier, store.url, "", str(error)))
        return []


def _head(store: Source, generation: int, note: Callable[[Skip], None]) -> Head | None:
    try:
        return parse_head(store.read_head(generation), file=generation_name(generation), generation=generation)
    except (Damage, OSError) as error:
        reason = error.what if isinstance(error, Damage) else str(error)
        note(Skip(generation, -1, store.tier, store.url, generation_name(generation), reason))
        return None


def _add(found: list[Rung], head: Head, store: Source) -> None:
    """Same save and parts: another place of the same generation. Else by number; memory's own heads by step."""
    for index, known in enumerate(found):
        if known.head.save == head.save and known.head.parts == head.parts:
            found[index] = Rung(known.head, (*known.stores, store))
            return
        if not _is_newer(known, head, store):
            found.insert(index, Rung(head, (store,)))
            return
    found.append(Rung(head, (store,)))


def _is_newer(known: Rung, head: Head, store: Source) -> bool:
    """Whether `known` stays before `head`. Snapshots in memory have no generation number to compare."""
    if "memory" in {known.stores[0].tier, store.tier} and known.stores[0].tier != store.tier:
        return (known.head.view, known.head.step) >= (head.view, head.step)
    return known.head.generation >= head.generation


def open_reader(candidate: Rung, note: Callable[[Skip], None], *, limit_s: float | None = None) -> Reader:
    return Reader(candidate.head, candidate.stores, note=note, limit_s=limit_s)


def first_valid(
    stores: Sequence[Source],
    use: Callable[[Reader, Rung], T],
    *,
    note: Callable[[Skip], None],
    limit_s: float,
    generation: int | None = None,
) -> T | None:
    """`use` the newest generation that can be read to the end (or only `generation`); None if there is none at all.

    `use` may be called again, with the same generation from farther away or with an older one, after it raised
    `Damage` or `OSError`. A store that has not answered for `limit_s` is asked no more. Raises `CheckpointError` when
    there are generations but none of them serves.
    """
    reasons: list[str] = []

    def remember(skip: Skip) -> None:
        reasons.append(f"{skip.file or skip.url} ({skip.tier}): {skip.reason}")
        note(skip)

    found = candidates(patient(stores, limit_s), remember)
    if generation is not None:
        found = [c for c in found if c.head.generation == generation]
    tries = collections.deque(found)
    while tries:
        candidate = tries.popleft()
        try:
            with _held(candidate, remember), open_reader(candidate, remember, limit_s=limit_s) as reader:
                return use(reader, candidate)
        except (Damage, OSError) as error:
            remember(_reason(candidate, error))
            rest = tuple(
                store for store in candidate.stores if not isinstance(error, Stuck) or store is not error.place
            )
            if rest and len(rest) < len(candidate.stores):
                tries.appendleft(Rung(candidate.head, rest))
    if not found and not reasons and generation is None:
        return None
    wanted = "no generation" if generation is None else f"generation {generation} not"
    raise CheckpointError(
        f"{wanted} of {len(found)} could be loaded: " + "; ".join(reasons[:8] or ["no such generation"]),
        where=", ".join(store.url for store in stores),
        did="nothing of them is used; a state that was being filled in place is not to be trained on",
        remedy="`outlast ckpt verify` shows what is wrong in each",
    )


def _without(candidate: Rung, place: Source) -> list[Rung]:
    rest = tuple(store for store in candidate.stores if store is not place)
    return [Rung(candidate.head, rest)] if rest else []


def _reason(candidate: Rung, error: Damage | OSError) -> Skip:
    """Why a candidate is not used, as it lies there."""
    store, where = candidate.stores[0], error.file if isinstance(error, Damage) else ""
    reason = error.what if isinstance(error, Damage) else str(error)
    if isinstance(error, Stuck):
        store = error.place
    return Skip(candidate.head.generation, candidate.head.step, store.tier, store.url, where, f"not loaded: {reason}")


@contextlib.contextmanager
def _held(candidate: Rung, note: Callable[[Skip], None]) -> Iterator[None]:
    """Keep a generation from being removed while it is read, in each store that still has it."""
    with contextlib.ExitStack() as stack:
        for store in candidate.stores:
            try:
                stack.enter_context(store.in_use(candidate.head.generation))
            except (Damage, OSError) as error:
                reason = error.what if isinstance(error, Damage) else str(error)
                note(Skip(candidate.head.generation, candidate.head.step, store.tier, store.url, "", reason))
        yield
