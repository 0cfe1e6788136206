"""The values beside the tensors of two generations: which differ, by path. No torch.

Role: what `outlast ckpt diff` says of learning rates, counts and settings. Works on trees as they are written, so
nothing is built of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

__all__ = ["ValueDiff", "values_that_differ"]

_DICTS, _LISTS = ("d", "od", "ct"), ("l", "t", "st", "fs")
_MAX = 200  # characters of a value
ABSENT = "(absent)"


class ValueDiff(NamedTuple):
    """What each side has at `path`, as text."""

    path: str
    first: str
    second: str


def values_that_differ(a: Any, b: Any) -> list[ValueDiff]:
    """In a's order, then what only b has."""
    ours, theirs = dict(_leaves(a, "")), dict(_leaves(b, ""))
    paths = dict.fromkeys([*ours, *theirs])
    found = [ValueDiff(path, ours.get(path, ABSENT), theirs.get(path, ABSENT)) for path in paths]
    return [each for each in found if each.first != each.second]


def _leaves(node: Any, path: str) -> Iterator[tuple[str, str]]:
    kind = next(iter(node)) if isinstance(node, dict) and len(node) == 1 else ""
    if kind in _DICTS:
        yield path, "an empty dict" if not node[kind] else "a dict"
        for key, value in node[kind]:
            yield from _leaves(value, _join(path, key if isinstance(key, str) else _shown(key)))
    elif kind in _LISTS:
        yield path, f"{len(node[kind])} items"
        for place, value in enumerate(node[kind]):
            yield from _leaves(value, _join(path, str(place)))
    else:
        yield path, _shown(node)


def _shown(node: Any) -> str:
    if isinstance(node, dict) and "T" in node:
        return "a tensor"  # its number is the order in which it was met, and says nothing
    if isinstance(node, dict) and isinstance(node.get("f"), str):
        return repr(struct.unpack(">d", bytes.fromhex(node["f"]))[0])
    if isinstance(node, dict) and "i" in node:
        return str(node["i"])
    return msgspec.json.encode(node).decode()[:_MAX]


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
