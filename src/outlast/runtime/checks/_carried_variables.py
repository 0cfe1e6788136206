"""Which variables of a loop are carried from step to step and steer the training, read from the loop's source.

Role: a pure function of the source and the line that asks for the next step. It follows what a backward, or a setting
stored in a parameter group, is computed from, backwards through one turn of the loop and into the turn before. What
is computed anew in each step, or follows from the step's number, is not carried. Not followed: functions that the loop
calls, and what they change.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outlast.runtime.checks._loop_flow import Flow, Read, Sink, Stored
from outlast.runtime.checks._places import Place, beginnings, names_in, targets_of

__all__ = ["Carried", "carried_in"]

_LOOPS = ast.For | ast.AsyncFor | ast.While
_OF_THE_STEP = (".number", ".epoch")


@dataclass(frozen=True, kw_only=True)
class Carried:
    """One that steers `what`, as used in `line`. `how`: "carried" from turn to turn, "counted", which a count of the
    loop's turns is, or "read": it is only read, which changes it if it is a random generator."""

    place: Place
    line: int
    what: str
    how: Literal["carried", "counted", "read"]

    @property
    def name(self) -> str:
        """As it is written."""
        return "".join(self.place)


def carried_in(source: str, line: int) -> tuple[Carried, ...] | None:
    """None where no loop that trains asks for its next turn in this line. Raises SyntaxError, ValueError and
    RecursionError, as `ast.parse` does."""
    tree = ast.parse(source)
    scope, around = _around(tree, line)
    steps = _loops_of_steps(around, line)
    if not steps:
        return None
    names = frozenset(name for loop in steps for name in _names_of(loop, line))
    groups = frozenset(_names_of_groups(scope))
    flows = [Flow(loop, steps, names, groups) for loop in steps]
    if not any(flow.sinks for flow in flows):
        return None
    found: dict[Place, Carried] = {}
    for flow in flows:
        for row in _Slice(flow).rows():
            found.setdefault(row.place, row)
    carried = {row.place for row in found.values() if row.how != "read"}
    rows = [r for r in found.values() if r.how != "read" or carried.isdisjoint(beginnings(r.place))]
    return tuple(sorted(rows, key=lambda row: (row.line, row.place)))


# --- the loops -------------------------------------------------------------------------------------------------------
def _around(tree: ast.Module, line: int) -> tuple[ast.AST, list[Any]]:
    """The function that the line is in, or the module, and the loops around it there, the outermost first."""
    scope: ast.AST = tree
    loops: list[Any] = []
    todo: list[ast.AST] = [tree]
    while todo:
        inner = [n for n in ast.iter_child_nodes(todo.pop()) if _spans(n, line)]
        for node in inner:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                scope, loops = node, []
            elif isinstance(node, _LOOPS):
                loops.append(node)
        todo += inner
    return scope, loops


def _spans(node: ast.AST, line: int) -> bool:
    end = getattr(node, "end_lineno", None)
    return end is None or node.lineno <= line <= end  # type: ignore[attr-defined]


def _loops_of_steps(around: Sequence[Any], line: int) -> list[Any]:
    """The loop that this line takes a step for, and those whose epochs it is in."""
    headers = [n for n in around if not isinstance(n, ast.While) and n.lineno <= line <= n.iter.end_lineno]
    found = (headers or list(around))[-1:]
    for outer in reversed(around[: around.index(found[0])] if found else []):
        first = found[0]
        if not (isinstance(outer, ast.While) or isinstance(first, ast.While)):
            found = [outer, *found] if names_in(first.iter) & targets_of(outer.target) else found
    return found


def _names_of(loop: Any, line: int) -> set[str]:
    if not isinstance(loop, ast.While):
        return targets_of(loop.target)
    rows = [n for n in ast.walk(loop) if isinstance(n, ast.Assign) and n.lineno <= line <= (n.end_lineno or 0)]
    return {name for row in rows for target in row.targets for name in targets_of(target)}


def _names_of_groups(scope: ast.AST) -> Iterator[str]:
    for node in ast.walk(scope):
        if isinstance(node, ast.For | ast.comprehension) and _has_groups(node.iter):
            yield from targets_of(node.target)
        elif isinstance(node, ast.Assign) and _has_groups(node.value):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _has_groups(node: ast.AST) -> bool:
    inner = node.args[0] if isinstance(node, ast.Call) and node.args else node
    while isinstance(inner, ast.Subscript):
        inner = inner.value
    several = node.args if isinstance(node, ast.Call) else [inner]
    return any(isinstance(n, ast.Attribute) and n.attr == "param_groups" for n in [inner, *several])


# --- the slice -------------------------------------------------------------------------------------------------------
class _Slice:
    """What one flow's sinks are computed from."""

    def __init__(self, flow: Flow) -> None:
        self._end, self._sinks = flow.at_the_end, flow.sinks
        self._found: dict[tuple[Place, str], str] = {}  # and what it steers
        self._lines: dict[Place, list[tuple[bool, int]]] = {}  # of its uses, those for another place first
        self._known: dict[tuple[Stored, Sequence[str]], bool] = {}

    def rows(self) -> Iterator[Carried]:
        """A place once, with the line where another place or a sink is computed from it, if there is one."""
        for sink in self._sinks:
            self._follow(sink)
        for (place, how), what in self._found.items():
            yield Carried(place=place, line=min(self._lines[place])[1], what=what, how=how)  # type: ignore[arg-type]

    def _follow(self, sink: Sink) -> None:
        todo: list[tuple[Read, Place]] = [(read, ()) for read in sink.reads]
        seen = set(todo)
        while todo:
            read, into = todo.pop()
            for place, store in self._origins(read, sink):
                self._lines.setdefault(place, []).append((into == place, read.line))
                more = store.reads | store.tests if store is not None else set[Read]()
                fresh = {(inner, place) for inner in more} - seen
                seen |= fresh
                todo += fresh

    def _origins(self, read: Read, sink: Sink) -> Iterator[tuple[Place, Stored | None]]:
        """The stores that it may be of, also in the turn before if that counts; None for what was there before all."""
        for store in read.reached_by:
            if store is not None:
                if store.kind == "count":
                    self._found.setdefault((store.place, "counted"), sink.what)
                yield store.place, store
                continue
            place, stores = self._left_at(read.place)
            if not stores:
                self._found.setdefault((read.place, "read"), sink.what)
                yield read.place, None
            elif self._is_carried(place, stores):
                self._found.setdefault((place, "carried"), sink.what)
                yield from ((place, left) for left in stores)

    def _left_at(self, place: Place) -> tuple[Place, list[Stored]]:
        """What the turn before left there: the place, or the beginning of it, that was stored to."""
        for start in beginnings(place):
            stores = [store for store in self._end.get(start, ()) if store is not None]
            if stores:
                return start, stores
        return place, []

    def _is_carried(self, place: Place, stores: Sequence[Stored]) -> bool:
        """Whether what the stores leave is known only to who was there: not an item of another loop, nothing that is
        the same each time, or made once from what is always there, or follows from the step's number."""
        stores = [s for s in stores if s.kind == "value" and not (s.once and self._is_known(s, ()))]
        always = None not in self._end[place]
        if always and len(stores) == 1 and stores[0].plain and self._is_known(stores[0], ()):
            return False
        if stores and all(self._is_known(s, _OF_THE_STEP) and self._reads_the_step(s) for s in stores):
            return not always and not all(self._is_renewed(s) for s in stores)
        return bool(stores)

    def _is_renewed(self, store: Stored) -> bool:
        """Whether what decides that it is stored is the step's number and what it was, as in
        `if step.epoch != epoch: epoch = step.epoch`."""
        others = [read for read in store.tests if read.place != store.place]
        known = all(self._origin_known(read, origin, _OF_THE_STEP) for read in others for origin in read.reached_by)
        return known and len(others) < len(store.tests)

    def _is_known(self, store: Stored, of_the_step: Sequence[str]) -> bool:
        """Whether its value is computed from what no turn changes, and from these attributes of the step."""
        key = store, of_the_step
        if key not in self._known:
            self._known[key] = False  # for who comes back to it: what depends on itself is not
            self._known[key] = all(
                self._origin_known(read, origin, of_the_step) for read in store.reads for origin in read.reached_by
            )
        return self._known[key]

    def _origin_known(self, read: Read, origin: Stored | None, of_the_step: Sequence[str]) -> bool:
        if origin is None:
            return not self._left_at(read.place)[1]
        if origin.kind == "step":
            return len(read.place) > 1 and read.place[1] in of_the_step
        return origin.kind == "value" and self._is_known(origin, of_the_step)

    def _reads_the_step(self, store: Stored) -> bool:
        seen, todo = {store}, [store]
        while todo:
            origins = {o for read in todo.pop().reads for o in read.reached_by if o is not None}
            if any(origin.kind == "step" for origin in origins):
                return True
            todo += origins - seen
            seen |= origins
        return False
