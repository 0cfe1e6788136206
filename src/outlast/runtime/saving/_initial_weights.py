"""The weights that a run begins with at step 0, taken by name from elsewhere (`init_from`). torch.

Role: find the tensors of an import, of an export or of another run's model, hold their names against the model's, and
copy. Invariants: nothing is copied before everything was compared; what does not fit is listed, all of it. Takes no
optimizer, schedule or step over: those begin anew, and so does what the script derived from its first weights.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from outlast.checkpoint import Reader, Skip, open_store
from outlast.checkpoint.ladder import Rung, first_valid
from outlast.checkpoint.loading import fresh
from outlast.checkpoint.occupancy import local_path
from outlast.checkpoint.safetensors_files import is_safetensors, open_file, read_at, sources_of
from outlast.checkpoint.state_tensors import bytes_of, dtype_named
from outlast.errors import CheckpointError
from outlast.runtime.saving.contents import model_prefix, no_checkpoint, place_and_number
from outlast.tensors import local, part_of

__all__ = ["begin_with"]

_SHOWN = 50


class _Found(NamedTuple):
    """`what`: the source, for people."""

    what: str
    tensors: dict[str, Tensor]


def begin_with(
    text: str, model: torch.nn.Module, *, strict: bool, timeout_s: float, elsewhere: Collection[str] = ()
) -> str:
    """Copy the weights at `text` into the model; returns what was done, in a sentence.

    `text`: a checkpoint directory or URL (with `@N` for one generation), a safetensors file, its index or directory.
    `elsewhere`: names that may be there and are for other ranks. Raises CheckpointError if there is nothing, or if it
    does not fit: a name that is missing or not wanted (unless not `strict`), a shape that differs, nothing that fits.
    """
    place, number = place_and_number(text)
    path = local_path(text)
    found = _of_files(path) if path is not None and is_safetensors(path) else _of_store(place, number, timeout_s)
    mine = _targets(model)
    strip, add = _renaming(found.tensors, mine)
    theirs = {_renamed(name, strip, add): tensor for name, tensor in found.tensors.items()}
    theirs = {name: tensor for name, tensor in theirs.items() if name not in elsewhere}
    wanted = _optional(model, mine)
    missing = sorted(names[0] for names in _places(mine).values() if wanted & set(names) and not theirs.keys() & names)
    unexpected = sorted(theirs.keys() - mine.keys())
    wrong = _misfits(theirs, mine)
    listed = [*(f"missing there: {n}" for n in missing), *(f"not wanted by the model: {n}" for n in unexpected)]
    if wrong or (strict and listed) or not theirs.keys() & mine.keys():
        raise _refusal(found.what, [*wrong, *listed], strict=strict or bool(wrong))
    with torch.no_grad():
        for name in theirs.keys() & mine.keys():
            local(mine[name]).copy_(part_of(theirs[name], mine[name]))
    return _told(found.what, theirs, mine, strip, add, listed)


def _of_files(path: str) -> _Found:
    sources, metadata = sources_of(path)
    start = _start(metadata, sources)
    tensors = {}
    with contextlib.ExitStack() as stack:
        fds = {file: open_file(file, stack) for file in {source.path for source in sources.values()}}
        for name, source in sources.items():
            if not name.startswith(start):
                continue
            memory = bytearray(source.spec.bytes)
            read_at(fds[source.path], source.at, memoryview(memory), source.path)
            dtype = dtype_named(source.spec.dtype)
            tensors[name.removeprefix(start)] = bytes_of(memoryview(memory), dtype, source.spec.shape).view(dtype)
    return _Found(path, tensors)


def _start(metadata: Mapping[str, str], names: Iterable[str]) -> str:
    """What the model's names begin with in files of an export of more than a model; they carry its tree."""
    try:
        return model_prefix(msgspec.json.decode(metadata.get("outlast.tree", "{}")), names)
    except msgspec.MsgspecError:
        return ""


def _of_store(place: str, number: int | None, timeout_s: float) -> _Found:
    store = open_store(place)
    skipped: list[Skip] = []

    def use(reader: Reader, candidate: Rung) -> _Found:
        start = model_prefix(reader.tree, [spec.name for spec in reader.tensors])
        names = {n: s.name.removeprefix(start) for n, s in enumerate(reader.tensors) if s.name.startswith(start)}
        loaded = fresh(reader, list(names))
        what = f"generation {candidate.head.generation} at {place}" + (", its model" if start else "")
        return _Found(what, {names[n]: tensor for n, tensor in loaded.items()})

    found = first_valid([store], use, note=skipped.append, limit_s=timeout_s, generation=number)
    if found is None:
        raise no_checkpoint(place)
    return found


def _targets(model: torch.nn.Module) -> dict[str, Tensor]:
    """The live tensors by every name that they have: tied ones have several."""
    named = itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return dict(named)


def _places(mine: Mapping[str, Tensor]) -> dict[int, list[str]]:
    """The names of each tensor."""
    places: dict[int, list[str]] = {}
    for name, tensor in mine.items():
        places.setdefault(id(tensor), []).append(name)
    return places


def _optional(model: torch.nn.Module, mine: Mapping[str, Tensor]) -> set[str]:
    """The names that must be there: buffers that are not kept in files (`persistent=False`) need not."""
    kept = set(model.state_dict())
    return {name for name in mine if name in kept}


def _prefixes(names: Iterable[str]) -> list[str]:
    """The dotted beginnings of the first name that all names share, shortest first; the empty one always."""
    every = list(names)
    parts = every[0].split(".")[:-1] if every else []
    found = ["".join(f"{part}." for part in parts[:n]) for n in range(len(parts) + 1)]
    return [start for start in found if all(name.startswith(start) for name in every)]


def _renaming(theirs: Collection[str], mine: Collection[str]) -> tuple[str, str]:
    """What to strip from their names and put in front, so that most of them are the model's. Nothing, if that does."""
    pairs = itertools.product(_prefixes(theirs), _beginnings(mine))
    return max(pairs, key=lambda pair: sum(_renamed(name, *pair) in mine for name in theirs))


def _beginnings(names: Collection[str]) -> list[str]:
    firsts = dict.fromkeys(name.partition(".")[0] + "." for name in names if "." in name)
    return ["", *firsts]


def _renamed(name: str, strip: str, add: str) -> str:
    return add + name.removeprefix(strip)


def _misfits(theirs: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> list[str]:
    wrong = []
    for name in sorted(theirs.keys() & mine.keys()):
        there, here = theirs[name], mine[name]
        same = there.dtype == here.dtype or (there.dtype.is_floating_point and here.dtype.is_floating_point)
        if there.shape != here.shape or not same:
            wrong.append(f"{name}: {there.dtype}{list(there.shape)} there, {here.dtype}{list(here.shape)} in the model")
    for names in _places(mine).values():
        tied = [name for name in names if name in theirs]
        wrong += [
            f"{tied[0]} and {other} are one tensor in the model and two there"
            for other in tied[1:]
            if not torch.equal(theirs[tied[0]], theirs[other])
        ]
    return wrong


def _refusal(what: str, listed: list[str], *, strict: bool) -> CheckpointError:
    more = [f"… and {len(listed) - _SHOWN} more"] if len(listed) > _SHOWN else []
    return CheckpointError(
        "\n".join([f"the weights of {what} do not fit the model:", *listed[:_SHOWN], *more]),
        did="nothing was loaded, nothing was trained",
        remedy="the model that they are of; --no-init-strict (init_strict = false) begins with those names that fit"
        if strict
        else "weights that have at least one name of the model",
    )


def _told(
    what: str, theirs: Mapping[str, Tensor], mine: Mapping[str, Tensor], strip: str, add: str, listed: list[str]
) -> str:
    taken = sorted(theirs.keys() & mine.keys())
    changed = [name for name in taken if theirs[name].dtype != mine[name].dtype]
    notes = [f"{strip!r} taken off their names"] if strip else []
    notes += [f"{add!r} put before their names"] if add else []
    notes += [f"{len(changed)} converted from {theirs[changed[0]].dtype}".replace("torch.", "")] if changed else []
    more = [f"and {len(listed) - 8} more"] if len(listed) > 8 else []
    notes += ["; ".join(["left out: " + listed[0], *listed[1:8], *more])] if listed else []
    return f"begins at step 0 with {len(taken)} tensors of {what}" + (f" ({', '.join(notes)})" if notes else "")
