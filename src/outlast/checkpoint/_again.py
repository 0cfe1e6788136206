"""The same state again: recognised in one walk, without naming or describing anything anew. torch.

Role: a save's call stands in the training loop, and between two saves a state changes its numbers, not its shape.
Invariant: what `Outline.of_again` returns is what a full flattening would return; whatever it is not sure of it
refuses, and the full flattening decides (and complains). Holds no tensor, only what one looked like.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch

from outlast.checkpoint.tree import SCALARS

__all__ = ["PLAIN", "Outline", "has_memory"]

PLAIN = {torch.Tensor, torch.nn.Parameter}
_KEYS = {str, int, bool, bytes, type(None)}  # equal keys of one such type are the same key to the bit
_DICTS: dict[type, str] = {dict: "d", collections.OrderedDict: "od"}
_LISTS: dict[type, str] = {list: "l", tuple: "t"}


class _Changed(Exception):
    """Not the state that was outlined, or none that can be."""


class _Container:
    """A dict, list or tuple: its keys, what each value was (a container, a plain tensor or a scalar), and its node."""

    def __init__(self, kind: type, keys: list[Any], kids: list[Any], node: Any) -> None:
        self.kind, self.keys, self.kids, self.node = kind, keys, kids, node
        self.key_kinds: list[type] = list(map(type, keys))


class Outline:
    """Remembers an encoded tree and its tensors, and encodes another one that differs from it in values only."""

    def __init__(self, root: Any, tensors: Sequence[torch.Tensor]) -> None:
        self._root = root
        self._looks = [_look(tensor) for tensor in tensors]

    @staticmethod
    def of(tree: Any, node: Any, tensors: Sequence[torch.Tensor]) -> Outline | None:
        """None for a state with leaves that are not plain tensors and scalars, or with one tensor in two places."""
        numbers: list[int] = []
        try:
            root = _outline(tree, node, numbers)
        except _Changed:
            return None
        if numbers != list(range(len(tensors))) or not isinstance(root, _Container):
            return None
        return Outline(root, tensors)

    def of_again(self, tree: Any) -> tuple[Any, list[torch.Tensor]] | None:
        """(node, tensors) of a tree that differs from the last one in values only; None if it may differ in more."""
        tensors: list[torch.Tensor] = []
        try:
            node = _again(tree, self._root, tensors)
        except _Changed:
            return None
        if [_look(tensor) for tensor in tensors] != self._looks:
            return None
        if len({tensor.data_ptr() for tensor in tensors}) != len(tensors):
            return None  # perhaps one tensor in two places
        return node, tensors


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether there is any behind its elements: a storage can be freed under a tensor that keeps its shape."""
    return tensor.data_ptr() != 0 and tensor.untyped_storage().nbytes() != 0


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.is_meta, has_memory(tensor)


def _outline(value: Any, node: Any, numbers: list[int]) -> Any:
    kind = type(value)
    if kind in SCALARS:
        return kind
    if kind in PLAIN and "T" in node:
        numbers.append(node["T"])
        return torch.Tensor
    if kind in _LISTS:
        nodes = node[_LISTS[kind]]
        kids = [_outline(kid, of_kid, numbers) for kid, of_kid in zip(value, nodes, strict=True)]
        return _Container(kind, [], kids, node)
    if kind in _DICTS and _KEYS.issuperset(map(type, value)):
        nodes = [entry[1] for entry in node[_DICTS[kind]]]
        kids = [_outline(kid, of_kid, numbers) for kid, of_kid in zip(value.values(), nodes, strict=True)]
        return _Container(kind, list(value), kids, node)
    raise _Changed


def _again(value: Any, known: _Container, tensors: list[torch.Tensor]) -> Any:
    """The container's node: the last one itself if nothing in it changed. Nodes are shared, never written to."""
    kind: type = type(value)
    if kind is not known.kind or len(value) != len(known.kids):
        raise _Changed
    is_dict = kind in _DICTS
    if is_dict and (list(value) != known.keys or [type(key) for key in value] != known.key_kinds):
        raise _Changed
    entries = known.node[_DICTS[kind] if is_dict else _LISTS[kind]]
    changed: dict[int, Any] = {}
    for place, (kid, was) in enumerate(zip(value.values() if is_dict else value, known.kids, strict=True)):
        if was is torch.Tensor:
            if type(kid) not in PLAIN or kid.is_nested or kid.layout != torch.strided:
                raise _Changed
            tensors.append(kid)
            continue
        old = entries[place][1] if is_dict else entries[place]
        if type(was) is _Container:
            node = _again(kid, was, tensors)
        elif type(kid) is was:
            node = SCALARS[was](kid)
        else:
            raise _Changed
        if node is not old and (type(was) is _Container or node != old):
            changed[place] = node
    if changed:
        fresh = [changed.get(i, e) if not is_dict else [e[0], changed.get(i, e[1])] for i, e in enumerate(entries)]
        known.node = {(_DICTS if is_dict else _LISTS)[kind]: fresh}
    return known.node
