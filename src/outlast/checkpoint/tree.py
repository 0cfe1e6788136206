"""Nested containers and scalars as JSON, without pickle, to the bit. No torch: tensors are leaves named by number.

Role: the shape of a state: dict, OrderedDict, Counter, list, tuple, set, None, bool, int, float (every NaN), complex,
str (any), bytes. What else a state may hold (tensors, arrays, dtypes) is turned into nodes by the caller's `leaf`.
Invariants: decode(encode(x)) equals x in types and bits; decoding builds nothing but these types, and never more than
the JSON holds. Named tuples and classes are refused: rebuilding them would mean importing what a file names.
"""

from __future__ import annotations

import base64
import collections
import struct
from collections.abc import Callable, Iterable
from typing import Any

from outlast.checkpoint.manifest import Damage
from outlast.errors import ConfigError

__all__ = ["SCALARS", "decode_tree", "encode_tree", "tensor_names"]

_MAX_DEPTH = 200
_SAFE_INT = 1 << 53

Leaf = Callable[[Any, str], Any]
"""(value, name) -> node, or None if the value is not a leaf of the caller's."""


def encode_tree(tree: Any, leaf: Leaf) -> Any:
    """The tree as JSON values. Raises `ConfigError` naming the place of anything that cannot be kept."""
    return _encode(tree, "", leaf, 0)


def _encode(value: Any, name: str, leaf: Leaf, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ConfigError(
            f"the state is nested deeper than {_MAX_DEPTH} levels, or contains itself, at {name[:120]!r}",
            remedy="register only what is needed to go on",
        )
    scalar = SCALARS.get(type(value))
    if scalar is not None:
        return scalar(value)
    node = leaf(value, name)
    if node is not None:
        return node
    if isinstance(value, collections.OrderedDict | collections.Counter | dict) and type(value) in _DICTS:
        return {_DICTS[type(value)]: [_entry(k, v, name, leaf, depth) for k, v in value.items()]}
    if type(value) in _LISTS:
        items = sorted(value, key=repr) if type(value) in {set, frozenset} else value
        return {_LISTS[type(value)]: [_encode(v, _join(name, i), leaf, depth + 1) for i, v in enumerate(items)]}
    raise ConfigError(
        f"the state holds a {type(value).__module__}.{type(value).__qualname__} at {name or 'its root'!r}",
        remedy="checkpoints keep tensors, arrays, dict, list, tuple, set, str, bytes, numbers and None: convert it, or "
        "give the object a state_dict() of these",
    )


def _entry(key: Any, value: Any, name: str, leaf: Leaf, depth: int) -> list[Any]:
    if type(key) is str:
        return [_text(key), _encode(value, _join(name, key), leaf, depth + 1)]
    if not isinstance(key, str | int | float | bool | bytes | tuple | None):
        raise ConfigError(
            f"a key of type {type(key).__qualname__} at {name or 'the root'!r} cannot be kept",
            remedy="use str, int, float, bool, bytes, None or tuples of them as keys",
        )
    return [
        _encode(key, name, lambda _value, _name: None, depth + 1),
        _encode(value, _join(name, key), leaf, depth + 1),
    ]


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _text(value: str) -> Any:
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:  # lone surrogates, which JSON over UTF-8 cannot hold
        return {"s": base64.b64encode(value.encode("utf-16-le", "surrogatepass")).decode()}
    return value


def _float(value: float) -> str:
    return struct.pack(">d", value).hex()


SCALARS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda v: v,
    bool: lambda v: v,
    int: lambda v: v if -_SAFE_INT < v < _SAFE_INT else {"i": hex(v)},
    float: lambda v: {"f": _float(v)},
    complex: lambda v: {"c": [_float(v.real), _float(v.imag)]},
    str: _text,
    bytes: lambda v: {"b": base64.b64encode(v).decode()},
}
_DICTS: dict[type, str] = {dict: "d", collections.OrderedDict: "od", collections.Counter: "ct"}
_LISTS: dict[type, str] = {list: "l", tuple: "t", set: "st", frozenset: "fs"}
_BUILD: dict[str, Callable[[Iterable[Any]], Any]] = {
    "d": dict,
    "od": collections.OrderedDict,
    "ct": lambda pairs: collections.Counter(dict(pairs)),
    "l": list,
    "t": tuple,
    "st": set,
    "fs": frozenset,
}


def decode_tree(node: Any, make: Callable[[str, Any], Any], *, file: str) -> Any:
    """Inverse of `encode_tree`. `make(tag, payload)` rebuilds the caller's leaves, or raises KeyError for no leaf.

    Raises `Damage` for nodes that `encode_tree` would not have made.
    """
    try:
        return _decode(node, make, 0)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, struct.error, RecursionError) as error:
        raise Damage(f"its tree holds something that is no state: {type(error).__name__}: {error}", file=file) from None


def _decode(node: Any, make: Callable[[str, Any], Any], depth: int) -> Any:
    if depth > 2 * _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if node is None or isinstance(node, bool | int | str):
        return node
    if not isinstance(node, dict) or len(node) != 1:
        raise ValueError("a node with more than one tag")
    ((tag, payload),) = node.items()
    if tag in {"d", "od", "ct"}:
        return _BUILD[tag]([(_decode(k, make, depth + 1), _decode(v, make, depth + 1)) for k, v in payload])
    if tag in _BUILD:
        return _BUILD[tag]([_decode(v, make, depth + 1) for v in payload])
    if tag == "i":
        return int(payload, 16)
    if tag == "f":
        return _unfloat(payload)
    if tag == "c":
        return complex(_unfloat(payload[0]), _unfloat(payload[1]))
    if tag == "s":
        return base64.b64decode(payload, validate=True).decode("utf-16-le", "surrogatepass")
    if tag == "b":
        return base64.b64decode(payload, validate=True)
    return make(tag, payload)


def _unfloat(text: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(text))[0]
    return value


def tensor_names(candidates: Iterable[str]) -> list[str]:
    """Make names unique in order: a repeated `a.b` becomes `a.b#2`."""
    seen: set[str] = set()
    names = []
    for name in candidates:
        unique, k = name, 1
        while unique in seen:
            k += 1
            unique = f"{name}#{k}"
        seen.add(unique)
        names.append(unique)
    return names
