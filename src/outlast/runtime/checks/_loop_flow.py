"""Which stores of a loop's body reach which of its reads: one turn of the loop, read from its source.

Role: reaching definitions. A read that nothing of the same turn reaches is one of the turn before. Judges nothing;
errs on the side of a store that is there: a loop inside is taken to run at least once, a branch under the same
condition as an earlier one to be taken with it. Functions that are called are not followed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from outlast.runtime.checks._places import Place, beginnings, of_groups, place_of, places_read

__all__ = ["Flow", "Read", "Sink", "Stored", "StoredKind"]

StoredKind = Literal["value", "step", "item", "count"]
"""`step`: what the loop over steps yields; `item`: what another loop does; `count`: a count of the loop's own turns."""

_CHANGES = frozenset({
    "append", "appendleft", "extend", "insert", "pop", "popleft", "popitem", "remove", "add", "discard", "setdefault",
    "update",
})  # fmt: skip
_OVERWRITES = frozenset({
    "clear", "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "manual_seed",
    "seed", "set_state", "setstate",
})  # fmt: skip
_LEAVES_AS_IT_IS = frozenset({"requires_grad_", "detach_", "share_memory_"})
_MAKE = frozenset({"list", "dict", "set", "tuple", "deque", "defaultdict", "float", "int", "tensor", "zeros", "ones"})


@dataclass(frozen=True)
class Read:
    """A read of a place. `reached_by`: the stores; None among them stands for the turns before and what was there
    before the loop."""

    place: Place
    line: int
    reached_by: frozenset[Stored | None]


@dataclass(eq=False)
class Stored:
    """A store to a place. `tests`: reads that decide whether it is done; `once`: behind a test that it makes false;
    `plain`: nothing is called for its value, so that equal reads give an equal one."""

    place: Place
    line: int
    kind: StoredKind
    plain: bool
    once: bool
    reads: set[Read] = field(default_factory=set)
    tests: set[Read] = field(default_factory=set)


@dataclass(eq=False)
class Sink:
    """What steers training: a backward, or a setting that is stored in a parameter group."""

    what: str
    reads: set[Read] = field(default_factory=set)


_Env = dict[Place, frozenset[Stored | None]]
_BEFORE: frozenset[Stored | None] = frozenset({None})
_NOTHING: frozenset[Read] = frozenset()


class Flow:
    """Walks one loop's body. `steps`: the loops whose turns are steps or epochs; `names`: what stands for a step or an
    epoch; `groups`: names of parameter groups. `at_the_end`: what a turn leaves at each place."""

    def __init__(self, loop: Any, steps: Sequence[Any], names: frozenset[str], groups: frozenset[str]) -> None:
        self._steps, self._names, self._groups = steps, names, groups
        self._env: _Env = {}
        self._stores: dict[tuple[int, Place], Stored] = {}
        self._sinks: dict[int, Sink] = {}
        self._tests: list[frozenset[Read]] = []
        self._skips: frozenset[Read] = _NOTHING  # what decided that the turn was not gone on with
        self._loops: list[Any] = [loop]
        self._once = False
        self._under: dict[str, tuple[Any, _Env, list[_Env]]] = {}  # by test: what it read, what was there after it
        self._left: list[_Env] = []
        self._visits: dict[type[ast.stmt], Callable[[Any], None]] = {
            ast.Assign: self._assign, ast.AnnAssign: self._annassign, ast.AugAssign: self._augassign,
            ast.For: self._for, ast.AsyncFor: self._for, ast.While: self._while, ast.If: self._if,
            ast.Match: self._match,
            ast.With: self._with, ast.AsyncWith: self._with, ast.Try: self._try, ast.FunctionDef: self._defined,
            ast.AsyncFunctionDef: self._defined, ast.ClassDef: self._defined, ast.Import: self._import,
            ast.ImportFrom: self._import, ast.Continue: self._continue, ast.Break: self._break,
            ast.TryStar: self._try,
        }  # fmt: skip
        if not isinstance(loop, ast.While):
            self._target(loop)
        self._walk(loop.body)
        self.at_the_end = _joined([self._env, *self._left])
        self.sinks = list(self._sinks.values())

    # --- statements ----------------------------------------------------------------------------------------------
    def _walk(self, rows: Iterable[ast.stmt]) -> None:
        for row in rows:
            visit = self._visits.get(type(row))
            if visit is not None:
                visit(row)
            else:
                for inner in ast.iter_child_nodes(row):
                    if isinstance(inner, ast.expr):
                        self._read(inner)

    def _assign(self, row: ast.Assign) -> None:
        for target in row.targets:
            self._bind(target, row.value, row)

    def _annassign(self, row: ast.AnnAssign) -> None:
        if row.value is not None:
            self._bind(row.target, row.value, row)

    def _augassign(self, row: ast.AugAssign) -> None:
        reads = self._read(row.value)
        if of_groups(row.target, self._groups):
            self._into_groups(row.target, reads)
            return
        place = place_of(row.target) or place_of(getattr(row.target, "value", row.target))
        if place is not None:
            self._store(place, row, reads | {self._reached(place, row.lineno)})

    def _for(self, row: ast.For) -> None:
        self._tests.append(self._read_all(row.iter) if row not in self._steps else _NOTHING)
        self._target(row)
        self._turns(row)
        self._tests.pop()

    def _while(self, row: ast.While) -> None:
        self._tests.append(self._read(row.test))
        self._turns(row)
        self._tests.pop()

    def _turns(self, row: Any) -> None:
        """Twice: the second turn finds what the first one left."""
        before, skips = dict(self._env), self._skips
        self._loops.append(row)
        for env in (before, None):
            self._env = env if env is not None else _joined([before, self._env])
            self._walk(row.body)
            self._skips = skips
        self._loops.pop()
        self._walk(row.orelse)

    def _target(self, row: Any) -> None:
        kind: StoredKind = "step" if row in self._steps else "item"
        reads = self._read(row.iter)
        first = row.target.elts[0] if isinstance(row.target, ast.Tuple) and row.target.elts else None
        counted = first if kind == "step" and _counts(row.iter) else None
        self._bind_all(row.target, reads, row, kind, counted)

    def _bind_all(self, target: ast.AST, reads: frozenset[Read], row: Any, kind: StoredKind, counted: Any) -> None:
        for inner in ast.walk(target):
            if isinstance(inner, ast.Name):
                self._store((inner.id,), row, reads, "count" if inner is counted else kind)

    def _if(self, row: ast.If) -> None:
        test = self._read(row.test)
        said, before = ast.unparse(row.test), self._env
        values = {(read.place, read.reached_by) for read in test}
        known = self._under.get(said)
        ends = []
        self._tests.append(test)
        once, self._once = self._once, self._once or _once(row)
        for branch, rows in enumerate((row.body, row.orelse)):
            self._env = dict(before)
            if known is not None and known[0] == values:
                self._env |= {p: known[2][branch][p] for p, found in known[1].items() if before.get(p) == found}
            self._walk(rows)
            self._once = once
            ends.append(self._env)
            if rows and isinstance(rows[-1], ast.Continue) and self._loops[-1] is self._loops[0]:
                self._left.append(self._env)
        self._tests.pop()
        go_on = [e for e, rows in zip(ends, (row.body, row.orelse), strict=True) if not _ends(rows)]
        self._env = _joined(go_on or ends)
        if len(go_on) == 2:
            new = {p: found for p, found in self._env.items() if _found(ends[0], p) != _found(ends[1], p)}
            self._under[said] = values, new, [{p: _found(end, p) for p in new} for end in ends]

    def _match(self, row: ast.Match) -> None:
        self._tests.append(self._read(row.subject))
        before, ends = self._env, []
        for case in row.cases:
            self._env = dict(before)
            for inner in ast.walk(case.pattern):
                name = getattr(inner, "name", None)
                if isinstance(name, str):
                    self._store((name,), inner, self._tests[-1])
            self._walk(case.body)
            ends.append(self._env)
        self._env = _joined([*ends, before])
        self._tests.pop()

    def _with(self, row: ast.With) -> None:
        for item in row.items:
            if item.optional_vars is not None:
                self._bind(item.optional_vars, item.context_expr, row)
            else:
                self._read(item.context_expr)
        self._walk(row.body)

    def _try(self, row: ast.Try) -> None:
        before = self._env
        self._env = dict(before)
        self._walk([*row.body, *row.orelse])
        ends = [self._env]
        for handler in row.handlers:
            self._env = _joined([before, ends[0]])
            self._walk(handler.body)
            ends += [self._env] if not _ends(handler.body) else []
        self._env = _joined(ends)
        self._walk(row.finalbody)

    def _defined(self, row: Any) -> None:
        self._store((row.name,), row, self._read_all(row))

    def _import(self, row: ast.Import | ast.ImportFrom) -> None:
        for alias in row.names:
            self._store(((alias.asname or alias.name).partition(".")[0],), row, _NOTHING, plain=True)

    def _continue(self, row: ast.Continue) -> None:
        self._skips |= frozenset[Read]().union(*self._tests)

    def _break(self, row: ast.Break) -> None:
        """Out of a loop over steps it ends training: what decides that is another matter."""
        if self._loops[-1] not in self._steps:
            self._skips |= frozenset[Read]().union(*self._tests)

    # --- expressions ---------------------------------------------------------------------------------------------
    def _read(self, node: ast.expr) -> frozenset[Read]:
        """What it reads. Done with it is what it does: assign by `:=`, change by a method, call a backward."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.NamedExpr):
                reads = self._read_all(inner.value)
                self._store((inner.target.id,), inner, reads, plain=_plain(inner.value))
        reads = self._read_all(node)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call):
                self._called(inner)
        return reads

    def _read_all(self, node: ast.AST) -> frozenset[Read]:
        return frozenset(self._reached(place, line) for place, line in places_read(node))

    def _called(self, call: ast.Call) -> None:
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if name in ("backward", "manual_backward") or (
            name == "pipeline" and isinstance(owner, ast.Name) and owner.id in self._names
        ):
            self._sink(call, "the loss", self._read_all(call))
        elif owner is not None and name.endswith("_") and not name.startswith("_") and name not in _LEAVES_AS_IT_IS:
            over = name in _OVERWRITES
            while isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute):
                over = over or owner.func.attr in _OVERWRITES
                owner = owner.func.value
            self._changed(owner, call, over)
        elif owner is not None and name in _CHANGES | _OVERWRITES:
            self._changed(owner, call, name in _OVERWRITES)

    def _changed(self, owner: ast.AST, call: ast.Call, over: bool) -> None:
        place = place_of(owner)
        if place is None:
            return
        reads = frozenset[Read]().union(*(self._read_all(a) for a in [*call.args, *(k.value for k in call.keywords)]))
        self._store(place, call, reads if over else reads | {self._reached(place, call.lineno)}, plain=over)

    def _reached(self, place: Place, line: int) -> Read:
        return Read(place, line, _found(self._env, place))

    # --- stores --------------------------------------------------------------------------------------------------
    def _bind(self, target: ast.expr, value: ast.expr, row: Any) -> None:
        several = isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List)
        targets, values = (target.elts, value.elts) if several else ([target], [value])  # type: ignore[attr-defined]
        if len(targets) != len(values):
            targets, values = [target], [value]
        reads = [self._read(held) for held in values]  # all are read before one is stored
        for inner, held, found in zip(targets, values, reads, strict=True):
            self._put(inner, found, row, plain=_plain(held))

    def _put(self, target: ast.expr, reads: frozenset[Read], row: Any, *, plain: bool) -> None:
        if isinstance(target, ast.Tuple | ast.List | ast.Starred):
            for inner in target.elts if not isinstance(target, ast.Starred) else [target.value]:
                self._put(inner, reads, row, plain=plain)
        elif of_groups(target, self._groups):
            self._into_groups(target, reads)
        else:
            place = place_of(target)
            if place is None and isinstance(target, ast.Subscript):  # taken for all of it: who reads before it counts
                place, reads = place_of(target.value), reads | self._read(target.slice)
            kind: StoredKind = "step" if place is not None and len(place) == 1 and place[0] in self._names else "value"
            if place is not None:
                self._store(place, row, reads, kind, plain=plain)

    def _store(
        self, place: Place, row: Any, reads: Iterable[Read], kind: StoredKind = "value", *, plain: bool = False
    ) -> None:
        made = Stored(place, row.lineno, kind, plain, self._once)
        store = self._stores.setdefault((id(row), place), made)
        store.reads |= set(reads)
        store.tests |= set[Read]().union(*self._tests)
        self._env = {held: found for held, found in self._env.items() if held[: len(place)] != place}
        self._env[place] = frozenset({store})

    def _into_groups(self, target: ast.expr, reads: Iterable[Read]) -> None:
        key = target.slice.value if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) else ""
        self._sink(target, "the learning rate" if key == "lr" else "the optimizer's settings", reads)

    def _sink(self, node: ast.AST, what: str, reads: Iterable[Read]) -> None:
        sink = self._sinks.setdefault(id(node), Sink(what))
        sink.reads |= set(reads).union(self._skips, *self._tests)


def _found(env: _Env, place: Place) -> frozenset[Stored | None]:
    return next((env[start] for start in beginnings(place) if start in env), _BEFORE)


def _joined(envs: Sequence[_Env]) -> _Env:
    places = {place for env in envs for place in env}
    return {place: frozenset[Stored | None]().union(*(_found(env, place) for env in envs)) for place in places}


def _ends(rows: Sequence[ast.stmt]) -> bool:
    return bool(rows) and isinstance(rows[-1], ast.Continue | ast.Break | ast.Return | ast.Raise)


def _counts(node: ast.AST) -> bool:
    """Whether a loop over it counts its own turns, also in a bar around that."""
    return any(isinstance(n, ast.Call) and getattr(n.func, "id", "") == "enumerate" for n in ast.walk(node))


def _plain(value: ast.expr) -> bool:
    calls = [n for n in ast.walk(value) if isinstance(n, ast.Call)]
    return all(getattr(call.func, "attr", getattr(call.func, "id", "")) in _MAKE for call in calls)


def _once(row: ast.If) -> bool:
    """Whether it is the test of something made once: `if mask is None: mask = …`, `if first: first = False`."""
    test, stored = row.test, [s for s in row.body if isinstance(s, ast.Assign)]
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    if isinstance(test, ast.Call) and getattr(test.func, "id", "") == "hasattr" and len(test.args) == 2:
        name = f"{ast.unparse(test.args[0])}.{getattr(test.args[1], 'value', '')}"
        return any(ast.unparse(target) == name for s in stored for target in s.targets)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        if isinstance(test.ops[0], ast.NotIn):
            held = ast.unparse(test.comparators[0])
            return any(isinstance(t, ast.Subscript) and ast.unparse(t.value) == held for s in stored for t in s.targets)
        none = isinstance(test.ops[0], ast.Is) and ast.unparse(test.comparators[0]) == "None"
        return none and any(ast.unparse(t) == ast.unparse(test.left) for s in stored for t in s.targets)
    flags = [s for s in stored if isinstance(s.value, ast.Constant)]
    return place_of(test) is not None and any(ast.unparse(t) == ast.unparse(test) for s in flags for t in s.targets)
