"""What a generation holds: a training state that a run can go on with, or weights alone. No torch.

Role: the one sentence for a run that is told to go on with what it can only begin with. Decides nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from outlast.checkpoint import Head, Reader, heads, open_store
from outlast.checkpoint.occupancy import local_path
from outlast.checkpoint.store import Source
from outlast.errors import CheckpointError, OutlastError

__all__ = ["PARTS", "check_holds_state", "is_whole_state", "keys_of", "place_and_number", "weights_only"]

PARTS = {"model", "optimizers", "run"}
"""What a training state has at its top, among others."""


def keys_of(tree: Any) -> Collection[str]:
    """The keys at the top of a tree as it is written."""
    entries = tree.get("d", []) if isinstance(tree, dict) else []
    return {entry[0] for entry in entries if isinstance(entry[0], str)}


def is_whole_state(metadata: Mapping[str, str]) -> bool:
    """Whether safetensors files with this metadata are the export of a whole training state."""
    try:
        return set(keys_of(msgspec.json.decode(metadata.get("outlast.tree", "{}")))) >= PARTS
    except msgspec.MsgspecError:
        return False


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


def check_holds_state(text: str) -> None:
    """Before anything is started, for a place on this machine: raises CheckpointError if what it would resume from
    holds weights alone. Whatever else is wrong there is told by who loads it."""
    place, number = place_and_number(text)
    if local_path(place) is None:
        return
    store = open_store(place)
    try:
        found = [head for head in heads(store)[0] if number is None or head.generation == number]
        only = bool(found) and not set(_keys(found[0], store)) >= PARTS
    except (OSError, OutlastError):
        return
    if only:
        raise weights_only(found[0].generation, place)


def _keys(head: Head, store: Source) -> Collection[str]:
    with Reader(head, [store]) as reader:
        return keys_of(reader.tree)
