"""What a script says about processes: which names are ranks, wrapped models and samplers, and what is done with them.

Only reads. Whoever changes something asks here what a name stands for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["LOADERS", "Facts", "names_in"]

_RANKS = {"RANK": "rank", "LOCAL_RANK": "local", "WORLD_SIZE": "world"}
_RANK_CALLS = {"get_rank": "rank", "get_world_size": "world", "get_node_local_rank": "local"}
LOADERS = ("DataLoader", "StatefulDataLoader")  # torchdata's is one of torch's
_WRAPPERS = ("DistributedDataParallel", "DDP")


def names_in(node: ast.AST, kind: type[ast.expr_context] = ast.Load) -> set[str]:
    """Names that are read (or written) in it; attributes of `self` with their dot."""
    found: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, kind):
            found.add(part.id)
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, kind) and isinstance(part.value, ast.Name):
            found.add(f"{part.value.id}.{part.attr}")
    return found


class Facts:
    """Knows what names in one script stand for: imports, ranks, wrapped models, samplers. Raises SyntaxError for what
    is no Python."""

    def __init__(self, source: str, aliases: Mapping[str, str] | None = None) -> None:
        """`aliases`: imports of a text that this one was made of."""
        self.tree = ast.parse(source)
        self.parents: dict[ast.AST, ast.AST] = {
            child: parent for parent in ast.walk(self.tree) for child in ast.iter_child_nodes(parent)
        }
        self.aliases = {**(aliases or {}), **self._imports()}
        self.kinds: dict[str, str] = {}  # "rank", "local", "world" or "writer" by the text that stands for it
        self.wrapped: set[str] = set()  # what DDP was put around, as text
        self.managers: set[str] = set()  # torchft's
        self.samplers: dict[str, str] = {}  # a distributed sampler's name to its shuffle=
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._assigned(ast.unparse(node.targets[0]), node.value)
                for target, value in pairs_of(node):
                    if kind := self.rank_kind(value):
                        self.kinds[ast.unparse(target)] = kind
        self.models = self.wrapped or self._optimized()  # as text
        for node in ast.walk(self.tree):  # master_process = ddp_rank == 0, once ranks are known
            for target, value in pairs_of(node) if isinstance(node, ast.Assign) else ():
                if self.is_writer_test(value):
                    self.kinds[ast.unparse(target)] = "writer"

    def _optimized(self) -> set[str]:
        """The only thing whose parameters a script without DDP asks for."""
        calls = list(calls_in(self.tree))
        if any(self.is_call(call, *_WRAPPERS) for call in calls):
            return set()
        methods = [c.func for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "parameters"]
        owners = {ast.unparse(method.value) for method in methods}
        return owners if len(owners) == 1 else set()

    def _imports(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {a.asname: a.name for a in node.names if a.asname}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        return found

    def _assigned(self, target: str, value: ast.expr) -> None:
        if isinstance(value, ast.Call) and self.is_call(value, *_WRAPPERS):
            self.wrapped.add(target)
        if isinstance(value, ast.Call) and self.dotted(value.func) == "torchft.Manager":
            self.managers.add(target)
        sampler = next((c for c in calls_in(value) if self.is_call(c, "DistributedSampler")), None)
        if sampler is not None and not any(self.is_call(c, *LOADERS) for c in calls_in(value)):
            self.samplers[target] = shuffle_of(sampler)

    def dotted(self, node: ast.AST) -> str:
        """The full name that an expression calls or reads, imports resolved."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self.dotted(node.value)}.{node.attr}"
        return ""

    def is_call(self, node: Any, *last: str) -> bool:
        """Whether it calls something whose last name is one of these."""
        return isinstance(node, ast.Call) and self.dotted(node.func).rpartition(".")[2] in last

    def rank_kind(self, value: ast.expr) -> str:
        """ "rank", "local" or "world" for an expression that reads one from torchrun or torch.distributed."""
        if isinstance(value, ast.Call) and self.is_call(value, "int", "str") and value.args:
            return self.rank_kind(value.args[0])
        if isinstance(value, ast.Call) and self.is_call(value, *_RANK_CALLS):
            return _RANK_CALLS[self.dotted(value.func).rpartition(".")[2]]
        key: Any = None
        if isinstance(value, ast.Subscript) and self.dotted(value.value).endswith("environ"):
            key = value.slice
        elif isinstance(value, ast.Call) and self.dotted(value.func).endswith(("environ.get", "getenv")) and value.args:
            key = value.args[0]
        return (
            _RANKS.get(str(key.value), "") if isinstance(key, ast.Constant) else self.kinds.get(ast.unparse(value), "")
        )

    def is_writer_test(self, node: ast.AST) -> bool:
        """`rank == 0`, however the rank is had."""
        if not (isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq | ast.NotEq)):
            return False
        zero = node.comparators[0]
        return (
            isinstance(zero, ast.Constant) and zero.value in (0, "0") and self.rank_kind(node.left) in ("rank", "local")
        )

    def within(self, node: ast.AST) -> Iterator[ast.AST]:
        """What it lies in, from the inside out."""
        at = self.parents.get(node)
        while at is not None:
            yield at
            at = self.parents.get(at)

    def function_of(self, node: ast.AST) -> Any:
        """The function it stands in, or the module."""
        return next(n for n in self.within(node) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module))

    def statement_of(self, node: ast.AST) -> Any:
        return node if isinstance(node, ast.stmt) else next(n for n in self.within(node) if isinstance(n, ast.stmt))

    def calls_of(self, function: Any) -> list[ast.Call]:
        """Where the script calls one of its own functions or methods."""
        if isinstance(function, ast.Module):
            return []
        method = isinstance(self.parents.get(function), ast.ClassDef)
        wanted = f"self.{function.name}" if method else function.name
        return [n for n in ast.walk(self.tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == wanted]

    def argument(self, call: ast.Call, function: Any, name: str) -> ast.expr | None:
        """What a call gives for a parameter."""
        names = [a.arg for a in function.args.args if a.arg != "self"]
        for keyword in call.keywords:
            if keyword.arg == name:
                return keyword.value
        place = names.index(name) if name in names else -1
        return call.args[place] if 0 <= place < len(call.args) else None


def pairs_of(node: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    """What is given to what: `a, b = x, y` are two. Empty where it cannot be told apart."""
    if len(node.targets) != 1:
        return []
    target, value = node.targets[0], node.value
    if not isinstance(target, ast.Tuple | ast.List):
        return [(target, value)]
    alike = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
    if not alike or any(isinstance(part, ast.Starred) for part in [*target.elts, *value.elts]):  # type: ignore[attr-defined]
        return []
    return list(zip(target.elts, value.elts, strict=True))  # type: ignore[attr-defined]


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """Every call in it."""
    yield from (n for n in ast.walk(node) if isinstance(n, ast.Call))


def shuffle_of(sampler: ast.Call) -> str:
    """What a distributed sampler was told of shuffling."""
    return next((ast.unparse(k.value) for k in sampler.keywords if k.arg == "shuffle"), "True")
