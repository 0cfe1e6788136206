"""Patterns of tensors' names, and what a training state says of its model's names. No torch.

A pattern that no name matches is a mistake, told with what is near. A state keeps each tensor once, under one name; the
model's other names for it (tied weights) and the buffers that its files leave out stand beside the step, for exports.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any, NamedTuple

from outlast.errors import ConfigError, nearest

__all__ = ["MODEL", "ModelNames", "chosen", "model_names"]

MODEL = "model."
_SHOWN = 8


class ModelNames(NamedTuple):
    """`tied`: other name -> the name that the tensor is kept under; `transient`: buffers that are in no file."""

    tied: dict[str, str]
    transient: set[str]


def chosen(names: Sequence[str], patterns: Sequence[str] | None) -> list[int]:
    """Which names match one of the patterns (`*` and `?` as in a shell); all without any. Raises ConfigError."""
    for pattern in patterns or ():
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            some = ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
            remedy = nearest(pattern.strip("*?"), names, f"there are {some}", both=True)
            raise ConfigError(f"no tensor matches {pattern!r}", remedy=f"{remedy}; * and ? stand for any text")
    return [n for n, name in enumerate(names) if not patterns or any(fnmatch.fnmatchcase(name, p) for p in patterns)]


def model_names(tree: Any) -> ModelNames:
    """The model's names as an encoded tree has them; empty where the state says nothing of them."""
    run = _entry(tree, "run")
    tied = _entry(run, "tied")
    pairs = tied.get("d", []) if isinstance(tied, dict) else []
    transient = _entry(run, "transient")
    listed = transient.get("l", []) if isinstance(transient, dict) else []
    texts = {other: name for other, name in pairs if isinstance(other, str) and isinstance(name, str)}
    return ModelNames(
        {MODEL + other: MODEL + name for other, name in texts.items()},
        {MODEL + name for name in listed if isinstance(name, str)},
    )


def _entry(node: Any, key: str) -> Any:
    entries = node.get("d", []) if isinstance(node, dict) else []
    return next((value for name, value in entries if name == key), None)
