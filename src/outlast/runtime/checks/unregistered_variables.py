"""Is the training steered by a variable of the loop that nobody was told of? Whoever joins begins with what it was
before the loop (41).

Looked for once, as the loop asks for its second step: in the source of the function that asks, and then only at the
variables that were found there. It is told and refused nothing: what is read from a source can be wrong, and where it
cannot be read nothing is said.
"""

from __future__ import annotations

import inspect
import linecache
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outlast.runtime.checks._carried_variables import Carried, carried_in
from outlast.runtime.checks._places import Place
from outlast.runtime.training.own_generators import OwnGenerator
from outlast.runtime.training.state import State

__all__ = ["UnregisteredVariables"]

_OURS = (str(Path(__file__).parents[2]), str(Path(str(torch.__file__)).parent), "<frozen")
_FRAMES = 8  # that are looked at for a loop
_LONGEST = 1 << 19  # characters of a source: what is longer was written by a program
_NAMED = 3  # variables beside the first
_ITEMS = 8  # of a list that are looked at
_SIMPLE = (bool, int, float, complex, str, type(None), np.generic, np.ndarray)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class UnregisteredVariables:
    """`given` is called with each step that the loop asks for, under the loop's frame; `leads`: whether this process
    is the one that tells."""

    def __init__(self, state: State, leads: Callable[[], bool]) -> None:
        self._state, self._leads = state, leads
        self._looks_in: int | None = 1

    def given(self) -> None:
        """Print the sentence, once, if there is one."""
        if self._looks_in is None:
            return
        if self._looks_in:  # before the first turn there is nothing to look at
            self._looks_in -= 1
            return
        self._looks_in = None
        try:
            said = sentence(sys._getframe(1), self._state) if self._leads() else ""
        except Exception:  # noqa: BLE001 - the boundary: whatever a source does to who reads it, training goes on
            said = ""
        if said:
            print(f"outlast: {said}", file=sys.stderr, flush=True)


def sentence(frame: FrameType | None, state: State) -> str:
    """What there is to be said of the loop that asks for a step below `frame`; "" for nothing."""
    for outer in islice(_frames(frame), _FRAMES):
        found = _carried(outer)
        if found is not None:
            rows = _of_state(found, outer, state)
            return _in_words(rows, Path(outer.f_code.co_filename).name) if rows else ""
    return ""


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OURS):
            yield frame
        frame = frame.f_back


def _carried(frame: FrameType) -> tuple[Carried, ...] | None:
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    source = "".join(lines)
    if len(source) > _LONGEST or "for " not in source:
        return None
    try:
        return carried_in(source, frame.f_lineno)
    except (SyntaxError, ValueError, RecursionError):  # no Python, or not that of this interpreter
        return None


# --- what the frame holds --------------------------------------------------------------------------------------------
def _of_state(found: Iterable[Carried], frame: FrameType, state: State) -> list[Carried]:
    """Those which hold now what training may be steered by, and which no one hands on."""
    found = list(found)
    values = _values(frame, {row.place[0] for row in found}) if found else {}
    parts = [state.model, *state.optimizers, *state.schedulers, *state.extra.values()]
    parts += [part.generator for part in state.extra.values() if isinstance(part, OwnGenerator)]
    known = {id(part) for part in parts}
    rows: dict[Place, Carried] = {}
    for row in found:
        for place, value in _there(row, values, known):
            counts = isinstance(value, _GENERATORS) if row.how == "read" else _is_state(value)
            if counts and not _is_part(value, state):
                rows.setdefault(place, replace(row, place=place))
    return list(rows.values())


def _values(frame: FrameType, names: set[str]) -> dict[str, Any]:
    """What these names stand for. The frame keeps no other variable alive for having been asked: up to Python 3.12 it
    holds a copy of all of them from then on."""
    local = frame.f_locals
    found = {name: local[name] for name in names if name in local}
    found |= {name: frame.f_globals[name] for name in names - found.keys() if name in frame.f_globals}
    ours = frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(local) is dict
    if ours and sys.getrefcount(local) <= 3:  # the frame, here, the count: no `locals()` that the script keeps
        local.clear()
    return found


def _there(row: Carried, values: Mapping[str, Any], known: set[int]) -> Iterator[tuple[Place, Any]]:
    """It and its value, if it is there and belongs to nothing that has its state handed on; of what is read, the
    generator on the way. No property is evaluated."""
    name, *links = row.place
    if name not in values:
        return
    value, at = values[name], 1
    for link in links:
        if row.how == "read" and isinstance(value, _GENERATORS):
            break
        if id(value) in known or isinstance(value, nn.Module | torch.optim.Optimizer | ModuleType | type):
            return
        inside = value if link.startswith("[") else getattr(value, "__dict__", None)
        key = next((key for key in inside if link in (f"[{key!r}]", f".{key}")), None) if type(inside) is dict else None
        if key is None or not isinstance(inside, dict):
            return
        value, at = inside[key], at + 1
    if id(value) not in known:
        yield row.place[:at], value


def _is_state(value: Any, depth: int = 0) -> bool:
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    if isinstance(value, (*_SIMPLE, *_GENERATORS)):
        return True
    if isinstance(value, dict):
        value = list(islice(value.values(), _ITEMS))
    if isinstance(value, list | tuple | deque | set) and depth < 4:
        return all(_is_state(item, depth + 1) for item in islice(value, _ITEMS))
    return False


def _is_part(value: Any, state: State) -> bool:
    """Whether it is a tensor of the state, or of what is registered."""
    if type(value) is not Tensor or value.layout != torch.strided or not value.numel():
        return False
    place = value.device, value.data_ptr()
    return any(tensor.device == place[0] and tensor.data_ptr() == place[1] for tensor in state.encoded()[1].values())


# --- words -----------------------------------------------------------------------------------------------------------
_WORDS = {
    "carried": (
        "is carried from step to step and steers {what}; a replica that joins begins with the {name} it had before the "
        "loop: compute it from step.number, or register an object that holds it with protect(state={{...}})"
    ),
    "counted": (
        "counts the turns of this loop and steers {what}; a replica that joins counts from its first turn on: use "
        "step.number"
    ),
    "read": (
        "is a generator that nobody registered, and what it draws steers {what}; a replica that joins begins with its "
        "first numbers: register it with protect(state={{...}})"
    ),
}


def _in_words(rows: Sequence[Carried], file: str) -> str:
    first, *more = rows
    name = f"`{first.name}`"
    said = f"{file}:{first.line}: {name} {_WORDS[first.how].format(what=first.what, name=name)}"
    alike = [f"`{row.name}` (line {row.line})" for row in more[:_NAMED]]
    rest = f" and {len(more) - _NAMED} more" if len(more) > _NAMED else ""
    return f"{said}. So it is with {', '.join(alike)}{rest}" if alike else said
