"""What the script's own variables hold when its loop ends, beside the state that is registered: name and digest.

A process that joined late has run the loop for its last steps only. A variable in which it differs from one that ran
them all is state that nobody carries over, and this is how it gets a name. Objects are only read.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import xxhash

from outlast.runtime.training.own_generators import OwnGenerator
from outlast.runtime.training.state import State

__all__ = ["loop_variables"]

_OURS = (str(Path(__file__).parents[2]), str(Path(str(torch.__file__)).parent))
_MOST = 100_000  # items of one list: what is longer is a data set
_SIMPLE = (bool, int, float, str, bytes, type(None))


def loop_variables(frame: FrameType | None, state: State) -> dict[str, tuple[str, str]]:
    """(kind, digest) by name, of the first frame above `frame` that is the user's, and of its module."""
    while frame is not None and frame.f_code.co_filename.startswith((*_OURS, "<")):
        frame = frame.f_back
    if frame is None:
        return {}
    known = {id(part) for part in (state.model, *state.optimizers, *state.schedulers, *state.extra.values())}
    known |= {id(part.generator) for part in state.extra.values() if isinstance(part, OwnGenerator)}
    found: dict[str, tuple[str, str]] = {}
    for name, value in _named(frame):
        if id(value) not in known and name not in found and not name.startswith("__"):
            told = _told(value)
            if told is not None:
                found[name] = told
    return found


def _named(frame: FrameType) -> Iterator[tuple[str, Any]]:
    rows = [*frame.f_locals.items(), *frame.f_globals.items()]
    yield from rows
    for name, value in rows:  # one level into the script's own objects: a trainer, a data set
        module = getattr(type(value), "__module__", "")
        if module == frame.f_globals.get("__name__") and hasattr(value, "__dict__"):
            yield from ((f"{name}.{inner}", held) for inner, held in vars(value).items())


def _told(value: Any) -> tuple[str, str] | None:
    """None for what is no state: modules, functions, large lists."""
    kind, content = _kind_and_content(value)
    if not kind:
        return None
    state = xxhash.xxh3_64()
    return (kind, state.hexdigest()) if _update(state, content, 0) else None


def _kind_and_content(value: Any) -> tuple[str, Any]:
    if isinstance(value, torch.Generator):
        return "random", value.get_state()
    if isinstance(value, np.random.Generator):
        return "random", value.bit_generator.state
    if isinstance(value, random.Random):
        return "random", value.getstate()
    if isinstance(value, torch.Tensor | np.ndarray):
        return "tensor", value
    if not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
        return f"object of {type(value).__name__}", _state_of(value)
    if isinstance(value, (*_SIMPLE, list, tuple, dict)):
        return "value", value
    return "", None


def _state_of(value: Any) -> Any:
    try:
        return value.state_dict()
    except (TypeError, ValueError, RuntimeError, AttributeError):  # one that wants arguments, or is not ready
        return None


def _update(state: Any, value: Any, depth: int) -> bool:
    """Whether all of it could be read."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.layout != torch.strided or value.is_quantized:
            return False
        state.update(f"{value.dtype}{tuple(value.shape)}".encode())
        state.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return True
    if isinstance(value, np.ndarray):
        state.update(f"{value.dtype}{value.shape}".encode())
        state.update(np.ascontiguousarray(value).tobytes())
        return bool(value.dtype != object)
    if isinstance(value, Mapping) and depth < 6:
        return len(value) <= _MOST and all(
            _update(state, str(key), depth + 1) and _update(state, item, depth + 1) for key, item in value.items()
        )
    if isinstance(value, list | tuple) and depth < 6:
        return len(value) <= _MOST and all(_update(state, item, depth + 1) for item in value)
    if isinstance(value, _SIMPLE):
        state.update(repr(value).encode() + b"\0")
        return True
    return False
