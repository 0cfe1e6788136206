"""What a place holds: a training state that a run can go on with, weights that it can begin with, or neither. No torch.

Role: the sentences for a run that is told to go on with, or to begin with, what it cannot; asked before anything is
started. Reads heads and headers, never the values of a tensor: what is wrong further down is told by who loads it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from outlast.checkpoint import Head, Reader, heads, open_store
from outlast.checkpoint.occupancy import local_path
from outlast.checkpoint.safetensors_files import is_safetensors, sources_of
from outlast.checkpoint.store import Source
from outlast.errors import CheckpointError, Damage, OutlastError

__all__ = [
    "PARTS", "check_holds_state", "check_holds_weights", "keys_of", "model_prefix", "no_checkpoint", "place_and_number",
    "weights_only",
]  # fmt: skip

PARTS = {"model", "optimizers", "run"}
"""What a training state has at its top, among others."""
_PLACES = "a checkpoint directory or URL (DIR@N for one generation); weights to begin with may also be safetensors"


def keys_of(tree: Any) -> Collection[str]:
    """The keys at the top of a tree as it is written."""
    return _entries(tree).keys()


def _entries(tree: Any) -> dict[str, Any]:
    """What is at the top of a tree as it is written, under keys that are text."""
    entries = tree.get("d", []) if isinstance(tree, dict) else []
    return {entry[0]: entry[1] for entry in entries if isinstance(entry[0], str)}


def model_prefix(tree: Any, names: Iterable[str]) -> str:
    """What the names of the model's tensors begin with, in a tree as it is written that holds more than the model: a
    training state, or what another loop saved as {"model": …, "optimizer": …}, also below one key that is around both.
    `names`: of all tensors. "" where the tree is the weights."""
    before, entries = "", _entries(tree)
    while len(entries) == 1:
        ((key, inner),) = entries.items()
        before, entries = f"{before}{key}.", _entries(inner)
    prefix = f"{before}model."
    return prefix if "model" in entries and any(name.startswith(prefix) for name in names) else ""


def weights_only(generation: int, url: str) -> CheckpointError:
    """The error for going on with weights alone."""
    return CheckpointError(
        f"generation {generation} at {url} holds weights only, no training state to resume",
        did="nothing was trained",
        remedy=f"--init-from {url}@{generation} begins at step 0 with these weights (init_from in the configuration, "
        "outlast.Checkpoint(init_from=…) in a script)",
    )


def place_and_number(text: str) -> tuple[str, int | None]:
    """`PLACE@N` is generation N of PLACE."""
    place, _, number = text.rpartition("@")
    return (place, int(number)) if place and number.isdigit() else (text, None)


def check_holds_state(text: str, *, asked: bool) -> None:
    """Before anything is started, for a place on this machine: raises CheckpointError if what it would resume from
    holds weights alone. `asked`: it was named to resume from, so that nothing there is wrong, too."""
    place, number = place_and_number(text)
    if local_path(place) is None:
        return
    store = open_store(place)
    if asked:
        _check_generations(text, store)
    try:
        found = [head for head in heads(store)[0] if number is None or head.generation == number]
        only = bool(found) and not set(_keys(found[0], store)) >= PARTS
    except (OSError, OutlastError):
        return
    if only:
        raise weights_only(found[0].generation, place)


def check_holds_weights(text: str) -> None:
    """Before anything is started, for a place on this machine: raises CheckpointError if there are no weights to begin
    with."""
    place, _ = place_and_number(text)
    path = local_path(text)
    if path is None:
        return
    try:
        if is_safetensors(path):
            sources_of(path)
            return
    except Damage as error:
        error.remedy = "the file anew, from where it comes"
        raise
    except OSError as error:
        raise _unreadable(path, error) from error
    _check_generations(text, open_store(place))


def _check_generations(text: str, store: Source) -> None:
    """Raises CheckpointError unless there is a generation to load whose head can be read."""
    place, number = place_and_number(text)
    try:
        good, bad = heads(store)
    except OSError as error:
        raise _unreadable(place, error) from error
    if any(number in (None, head.generation) for head in good):
        return
    failed = {n: why for n, why in bad.items() if number in (None, n)}
    if failed:
        what = "; ".join(f"generation {n}: {why}" for n, why in list(failed.items())[:8])
        raise CheckpointError(
            f"no generation at {text} can be read: {what}",
            did="nothing was trained",
            remedy=f"`outlast ckpt verify {place}` shows what is wrong in each",
        )
    raise no_checkpoint(text, [head.generation for head in good])


def _unreadable(place: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{place} cannot be read: {error.strerror}", did="nothing was trained", remedy="see its owner and its mode"
    )


def no_checkpoint(text: str, others: Sequence[int] = ()) -> CheckpointError:
    """The error for a place without a generation, or without the one that was asked for: `others` are there."""
    place, number = place_and_number(text)
    what, remedy = f"there is no checkpoint at {place}", f"{_PLACES}; `outlast ckpt ls` shows what is there"
    path = local_path(place)
    if others:
        what = f"there is no generation {number} at {place}"
        remedy = f"there: {', '.join(map(str, others[:10]))}; `outlast ckpt ls {place}` lists them"
    elif path is not None and os.path.isfile(path):
        what = f"{place} is a file, and none of safetensors"
        remedy = f"{_PLACES}; what torch.save wrote is loaded in the script, before protect"
    elif path is not None and os.path.isfile(os.path.join(path, ".metadata")):
        what = f"{place} is a checkpoint of torch's DCP"
        remedy = f"outlast ckpt import {place} NEW, then --init-from NEW"
    elif path is not None and is_safetensors(path):
        what, remedy = f"{place} holds weights only, as safetensors", f"--init-from {place} begins with them"
    return CheckpointError(what, did="nothing was trained", remedy=remedy)


def _keys(head: Head, store: Source) -> Collection[str]:
    with Reader(head, [store]) as reader:
        return keys_of(reader.tree)
