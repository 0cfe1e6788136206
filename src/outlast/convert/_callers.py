"""Who calls a function of the script, and whether that may happen more than once.

What trains is called once, for `protect` is. Invariant: a call counts where it cannot be told whose method it calls:
one too many is told to a person, and one that is overlooked would train something else.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from outlast.convert._facts import Facts, calls_in

__all__ = ["calls_by_any_name", "loops_around", "repeats"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
_MODULE_CALLS = ("eval", "parameters", "to")  # of torch's modules, which have a train() of their own


def repeats(facts: Facts, function: Any) -> Iterator[ast.AST]:
    """What may run it again: further calls of it, and loops around a call; then the same of whoever calls it."""
    seen: set[ast.AST] = {facts.tree}
    waiting = [function]
    while waiting:
        at = waiting.pop(0)
        if at in seen:
            continue
        seen.add(at)
        calls = calls_by_any_name(facts, at)
        yield from calls[1:]
        for call in calls:
            yield from loops_around(facts, call)
            waiting.append(facts.function_of(call))
        for call in calls_in(facts.tree):  # map(train, range(10))
            if facts.is_call(call, "map", "starmap") and call.args and _last(call.args[0]) == at.name:
                yield call


def loops_around(facts: Facts, node: ast.AST) -> Iterator[ast.AST]:
    """Loops in whose turns it stands, in its own function; a lambda may be called in one."""
    for outer in facts.within(node):
        if isinstance(outer, _FUNCTIONS):
            return
        if isinstance(outer, _LOOPS):
            yield outer


def calls_by_any_name(facts: Facts, function: Any) -> list[ast.Call]:
    """Where the script calls one of its functions or, by whatever name of its object, one of its methods."""
    cls = facts.parents.get(function)
    if isinstance(function, ast.Module):
        return []
    if not isinstance(cls, ast.ClassDef):
        return facts.calls_of(function)
    calls = list(calls_in(facts.tree))
    if function.name == "__init__":
        return [call for call in calls if ast.unparse(call.func) == cls.name]
    methods = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == function.name]
    return [call for call in methods if _may_be_of(facts, call, cls)]


def _may_be_of(facts: Facts, call: ast.Call, cls: ast.ClassDef) -> bool:
    """Whether the object whose method is called may be of this class."""
    assert isinstance(call.func, ast.Attribute)
    owner, related = ast.unparse(call.func.value), _related(facts, cls)
    if owner == "self":
        holder = next((o for o in facts.within(call) if isinstance(o, ast.ClassDef)), None)
        return holder is None or holder.name in related
    made = [
        node.value.func
        for node in ast.walk(facts.tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if ast.unparse(target) == owner
    ]
    if any(set(ast.unparse(maker).split(".")) & related for maker in made):
        return True
    if (made and all(_last(maker)[:1].isupper() for maker in made)) or owner.partition(".")[0] in _imported(facts):
        return False
    return call.func.attr != "train" or bool(cls.bases) or not _is_module(facts, owner)


def _related(facts: Facts, cls: ast.ClassDef) -> set[str]:
    """The class, those it derives from, and those that derive from it, by name."""
    bases = {n.name: {_last(base) for base in n.bases} for n in ast.walk(facts.tree) if isinstance(n, ast.ClassDef)}
    above, below = {cls.name}, {cls.name}
    for _ in bases:
        above |= set().union(*(bases.get(name, set()) for name in above))
        below |= {name for name, over in bases.items() if over & below}
    return above | below


def _is_module(facts: Facts, owner: str) -> bool:
    """Whether it is a model, which torch's train() is called of."""
    wrappers = [c for c in calls_in(facts.tree) if facts.is_call(c, "DistributedDataParallel", "DDP") and c.args]
    names = {text.rpartition(".")[2] for text in [*facts.models, *(ast.unparse(c.args[0]) for c in wrappers)]}
    called = {ast.unparse(call.func) for call in calls_in(facts.tree)}
    return owner.rpartition(".")[2] in names | {"module"} or any(f"{owner}.{word}" in called for word in _MODULE_CALLS)


def _imported(facts: Facts) -> set[str]:
    rows = [n for n in ast.walk(facts.tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    return {(alias.asname or alias.name).partition(".")[0] for row in rows for alias in row.names}


def _last(node: ast.AST) -> str:
    return ast.unparse(node).rpartition(".")[2]
