"""What a loop remembers or draws, and what follows from it for replicas that join: leaving, drawing, counting.

A replica that joins in the middle goes through the loop's lines from its beginning with values of its own, and each
replica draws its own numbers outside of a microbatch. Where that decides something the line is `by hand`, else `check`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from outlast.convert._facts import LOADERS, calls_in, names_in
from outlast.convert._loops import Loops

__all__ = ["say_remembered"]

_DRAWS = ("random.", "numpy.random.")
_TORCH_DRAWS = (
    "rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "rand_like", "randn_like",
    "randint_like", "poisson",
)  # fmt: skip
_IN_PLACE = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_")
_GATHERS = ("update", "append", "add", "extend", "add_scalar", "log", "push", "record")
_LEAVE = (
    "all replicas have to leave after the same step: let it follow from what is equal on all, such as step.loss, "
    "step.metrics or training.evaluate(…)"
)
_STATE = (
    "decides when training ends, and a replica that joins begins with a new one: protect(state={…}) carries what has "
    "state_dict() and load_state_dict(); or call training.stop(reason) where it says so, and go on"
)


def say_remembered(made: Any, body: Any, loops: Loops) -> None:
    """Say them. `made`: the rewrite; `body`: the rewrite of the loops."""
    _Remembered(made, body, loops).say()


class _Remembered:
    def __init__(self, made: Any, body: Any, loops: Loops) -> None:
        self.made, self.body, self.loops, self.facts = made, body, loops, made.facts
        self.objects = self._objects()

    def say(self) -> None:
        for node in self._leaves():
            self._leaving(node)
        for statement in self._outside():
            self._draws(statement)
        for statement in self._inside():
            self._gathers(statement)

    # --- leaving -------------------------------------------------------------------------------------------------
    def _leaves(self) -> Iterator[ast.stmt]:
        """Where the loop over epochs is left, and no `for` or function between; and returns out of a turn."""
        loops = self.loops
        for loop in (loops.epochs, loops.batches):
            for node in ast.walk(loop) if loop is not None else ():
                if not isinstance(node, ast.Break | ast.Return):
                    continue
                kinds = ast.For | ast.While | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
                outer = next(o for o in self.facts.within(node) if isinstance(o, kinds))
                own = outer is loop and (loop is loops.epochs or isinstance(node, ast.Return))
                if own:
                    yield node

    def _leaving(self, node: ast.stmt) -> None:
        names: set[str] = set()
        for outer in self.facts.within(node):
            if outer in (self.loops.epochs, self.loops.batches):
                break
            if isinstance(outer, ast.If | ast.Try | ast.With):
                names |= names_in(outer.test) if isinstance(outer, ast.If) else set()
        for _ in range(3):
            for given in ast.walk(self.loops.epochs or self.loops.batches):
                if isinstance(given, ast.Assign | ast.AnnAssign) and given.value is not None:
                    stored = set().union(*(names_in(target, ast.Store) for target in _targets(given)))
                    names |= names_in(given.value) if stored & names else set()
        remembered = sorted(name for name in names if name.partition(".")[0] in self.objects or name in self.objects)
        known = self.facts.models | {self.body.optimizer, "torch", "print", ""}
        remembered += sorted(names & (self._carried() | self._read_of_imports(node)) - known)
        what = ast.unparse(node)
        if remembered:
            self.made.say(node, "by hand", what, f"{remembered[0]} {_STATE}")
        else:
            self.made.say(node, "check", what, _LEAVE)

    def _objects(self) -> set[str]:
        """Names outside of the loops that are given an object of some class: a stopper of the script's own."""
        found: set[str] = set()
        inside = set(ast.walk(self.loops.epochs or self.loops.batches))
        known = {*self.facts.models, self.body.optimizer, *self.body.given.values(), ast.unparse(self.loops.loader)}
        for node in ast.walk(self.facts.tree):
            if node in inside or not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
                continue
            last = ast.unparse(node.value.func).rpartition(".")[2]
            if last[:1].isupper() and not self.facts.is_call(node.value, *LOADERS, "Path"):
                found |= set().union(*(names_in(target, ast.Store) for target in node.targets))
        return found - known

    def _carried(self) -> set[str]:
        """Names whose new value is made of the old one, or is given under a condition."""
        found: set[str] = set()
        for loop in (self.loops.epochs, self.loops.batches):
            for node in ast.walk(loop) if loop is not None else ():
                if isinstance(node, ast.AugAssign):
                    found.add(ast.unparse(node.target))
                elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not self.made.gone(node):
                    called = node.value.func  # history.append(loss), stopper(loss): what it is told it may remember
                    found.add(ast.unparse(called.value if isinstance(called, ast.Attribute) else called))
                elif isinstance(node, ast.Assign):
                    stored = set().union(*(names_in(target, ast.Store) for target in node.targets))
                    among = any(isinstance(outer, ast.If) for outer in self._up_to(node, loop))
                    found |= stored if among else stored & names_in(node.value)
        return found

    def _read_of_imports(self, node: ast.AST) -> set[str]:
        """Imported names of which a condition reads an attribute, such as `monitor.should_stop`."""
        found: set[str] = set()
        for outer in self._up_to(node, self.loops.epochs or self.loops.batches):
            for part in ast.walk(outer.test) if isinstance(outer, ast.If) else ():
                read = isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name)
                if read and part.value.id in self._imported:  # type: ignore[attr-defined]
                    found.add(part.value.id)  # type: ignore[attr-defined]
        return found

    @property
    def _imported(self) -> set[str]:
        tree = self.facts.tree
        rows = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        return {(alias.asname or alias.name).partition(".")[0] for row in rows for alias in row.names}

    def _up_to(self, node: ast.AST, loop: Any) -> Iterator[ast.AST]:
        for outer in self.facts.within(node):
            if outer is loop:
                return
            yield outer

    # --- drawing, counting ---------------------------------------------------------------------------------------
    def _outside(self) -> Iterator[ast.stmt]:
        """Statements of the loops that stand in no microbatch."""
        rows = self.loops.batches.body
        if self.body.span is not None:
            first, last = self.body.span
            yield from (*rows[:first], *rows[last + 1 :])
        if self.loops.epochs is not None:
            yield from (s for s in self.loops.epochs.body if self.loops.batches not in ast.walk(s))

    def _draws(self, statement: ast.stmt) -> None:
        if self.made.gone(statement):
            return
        for call in calls_in(statement):
            full = self.facts.dotted(call.func)
            method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            drawn = full in [f"torch.{name}" for name in _TORCH_DRAWS] or method in _IN_PLACE
            if full.startswith(_DRAWS) or drawn:
                self.made.say(
                    call, "by hand", ast.unparse(call),
                    "draws numbers outside of the loop over batches, where each replica draws its own: put it into "
                    "that loop, where they are seeded by the step and the microbatch",
                )  # fmt: skip

    def _inside(self) -> list[ast.stmt]:
        if self.body.span is None:
            return []
        first, last = self.body.span
        return list(self.loops.batches.body[first : last + 1])

    def _gathers(self, statement: ast.stmt) -> None:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)) or self.made.gone(statement):
            return
        if call.func.attr in _GATHERS and call is not self.loops.backward:
            self.made.say(
                statement, "check", ast.unparse(statement),
                "is told this replica's microbatches only; for the mean over the whole batch: step.metric(name, value) "
                "here, step.metrics[name] behind the loop over batches",
            )  # fmt: skip


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]
