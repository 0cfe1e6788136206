"""What an expression of Python reads, as places: a name with the attributes and constant keys that follow it.

`self.state["n"].detach` is ("self", ".state", "['n']", ".detach"). Who reads a place reads what was last stored there,
or at the longest beginning of it that was stored to. Nothing is executed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = ["Place", "beginnings", "names_in", "of_groups", "place_of", "places_read", "targets_of"]

Place = tuple[str, ...]

_OF_ITS_SHAPE = {".shape", ".size", ".device", ".dtype", ".ndim", ".dim", ".numel"}
"""What is read by these is no value that training changes."""
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def place_of(node: ast.AST) -> Place | None:
    """None for what is no name with attributes and constant keys."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        link = f".{node.attr}"
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value is not ...:
        link = f"[{node.slice.value!r}]"
    else:
        return None
    owner = place_of(node.value)
    return (*owner, link) if owner is not None else None


def beginnings(place: Place) -> Iterator[Place]:
    """The place and all that it is a part of, the longest first."""
    for length in range(len(place), 0, -1):
        yield place[:length]


def places_read(node: ast.AST, bound: frozenset[str] = frozenset()) -> Iterator[tuple[Place, int]]:
    """Places with their lines. `bound`: names that an expression around it binds."""
    place = place_of(node)
    if place is not None:
        if place[0] not in bound and _OF_ITS_SHAPE.isdisjoint(place):
            yield place, node.lineno  # type: ignore[attr-defined]
        return
    if isinstance(node, _COMPREHENSIONS):
        bound |= {name for generator in node.generators for name in targets_of(generator.target)}
    elif isinstance(node, _FUNCTIONS):
        bound |= {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("len", "isinstance"):
        return
    for inner in ast.iter_child_nodes(node):
        yield from places_read(inner, bound)


def names_in(node: ast.AST) -> set[str]:
    """Every name in it."""
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def targets_of(target: ast.AST) -> set[str]:
    """The names that an assignment to it binds."""
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def of_groups(node: ast.AST, groups: frozenset[str]) -> bool:
    """Whether it is an item of an optimizer's `param_groups`. `groups`: names that stand for one of them."""
    inner = node
    while isinstance(inner, ast.Subscript | ast.Attribute):
        if isinstance(inner, ast.Attribute) and inner.attr == "param_groups":
            return isinstance(node, ast.Subscript)
        inner = inner.value
    return isinstance(node, ast.Subscript) and isinstance(inner, ast.Name) and inner.id in groups
