"""Where a script trains: its backward, the loop over batches around it, the loop over epochs around that.

Each may stand in a function of its own that the next one calls. What is not found as expected is told as a riddle
(line, what, remedy) and stops the conversion of loops.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from outlast.convert._callers import calls_by_any_name, repeats
from outlast.convert._facts import Facts

__all__ = ["Loops", "Unclear", "find_loops"]

OWN_LOOP = (
    "write the loop by hand: `training = run.protect(model, optimizer, dataset, global_batch_size=…, microbatches=…)`, "
    "`for step in training.steps(until=…):`, `for batch in step:`, `step.backward(loss)` (docs: reference/loop). Where "
    "batches are drawn at random in the loop give dataset=range(N) and draw inside `for _ in step:`, where torch's and "
    "numpy's random numbers are seeded by position"
)


class Unclear(Exception):
    """The script's loops are not of a kind that is understood."""

    def __init__(self, line: int, what: str, remedy: str = OWN_LOOP) -> None:
        super().__init__(what)
        self.line, self.what, self.remedy = line, what, remedy


@dataclass(frozen=True, kw_only=True)
class Loops:
    """`batches` and `epochs`: the loops. `body`: the statement of the loop over batches that the backward stands in.
    `loader`: what is looped over, as text where `epochs` stands; `passed`: the argument that carries it, if any."""

    backward: ast.Call
    loss: ast.expr
    batches: ast.For
    body: ast.stmt
    step_call: ast.Call | None  # of the function or method in which the backward stands, if that is another one
    epochs: ast.For | None
    loader: ast.expr  # inside of the loop's header
    passed: ast.expr | None
    through_self: bool


def find_loops(facts: Facts) -> Loops:
    """Raises Unclear."""
    backward, loss = _backward(facts)
    batches, call = _batch_loop(facts, backward)
    body = next(s for s in batches.body if any(n is (call or backward) for n in ast.walk(s)))
    if batches.body[0].lineno == batches.lineno:
        raise Unclear(batches.lineno, "the loop over batches stands in one line")
    loader = _loader(facts, batches.iter)
    function = facts.function_of(batches)
    epochs = _range_around(facts, batches)
    passed: ast.expr | None = None
    if epochs is None and not isinstance(function, ast.Module):
        calls = [(c, _range_around(facts, c)) for c in facts.calls_of(function)]
        inside = [(c, loop) for c, loop in calls if loop is not None]
        again = [] if inside else list(repeats(facts, function))
        if len(inside) > 1 or again:
            count = len(calls_by_any_name(facts, function))
            where = f"; line {again[0].lineno} does it again" if again else ""  # type: ignore[attr-defined]
            raise Unclear(
                function.lineno, f"{function.name}, which trains, is called {count} times, {len(inside)} of them "
                f"in a loop over a range: one is understood{where}"
            )  # fmt: skip
        if inside:
            outer, epochs = inside[0]
            passed = facts.argument(outer, function, ast.unparse(loader))
            if passed is None and not ast.unparse(loader).startswith("self."):
                raise Unclear(
                    batches.lineno, f"{function.name} loops over {ast.unparse(loader)}, which nobody gives it"
                )
    return Loops(
        backward=backward,
        loss=loss,
        batches=batches,
        body=body,
        step_call=call,
        epochs=epochs,
        loader=loader,
        passed=passed,
        through_self=ast.unparse(loader).startswith("self."),
    )


def _backward(facts: Facts) -> tuple[ast.Call, ast.expr]:
    found = [
        n
        for n in ast.walk(facts.tree)
        if isinstance(n, ast.Call)
        and isinstance(n.func, ast.Attribute)
        and n.func.attr == "backward"
        and facts.dotted(n.func) != "torch.autograd.backward"
    ]
    if len(found) != 1:
        line = found[1].lineno if found else 1
        raise Unclear(line, f"there are {len(found)} calls of backward(), and one is understood")
    [call] = found
    assert isinstance(call.func, ast.Attribute)
    loss = call.func.value
    if isinstance(loss, ast.Call) and facts.is_call(loss, "scale") and loss.args:
        loss = loss.args[0]
    if call.args or call.keywords or not isinstance(facts.parents[call], ast.Expr):
        raise Unclear(call.lineno, "backward() is called with arguments, or its result is used")
    return call, loss


def _batch_loop(facts: Facts, backward: ast.Call) -> tuple[ast.For, ast.Call | None]:
    function = facts.function_of(backward)
    loop = _for_around(facts, backward)
    if loop is not None:
        return loop, None
    for call in facts.calls_of(function):
        loop = _for_around(facts, call)
        if loop is not None and isinstance(facts.parents.get(function), ast.ClassDef):
            return loop, call
    raise Unclear(backward.lineno, "the backward stands in no `for … in loader` that is understood")


def _for_around(facts: Facts, node: ast.AST) -> ast.For | None:
    """The innermost loop over something that is no range, in the same function; a `while` between ends the search."""
    for outer in facts.within(node):
        if isinstance(outer, ast.FunctionDef | ast.While | ast.AsyncFunctionDef | ast.Lambda):
            return None
        if isinstance(outer, ast.For):
            return None if facts.is_call(outer.iter, "range") else outer
    return None


def _range_around(facts: Facts, node: ast.AST) -> ast.For | None:
    for outer in facts.within(node):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        if isinstance(outer, ast.For) and _range_of(facts, outer.iter) is not None:
            return outer
    return None


def _range_of(facts: Facts, node: Any) -> ast.Call | None:
    return node if isinstance(node, ast.Call) and facts.is_call(node, "range") else None


def _loader(facts: Facts, node: ast.expr) -> ast.expr:
    """What is looped over, inside of enumerate() or a progress bar."""
    while isinstance(node, ast.Call) and facts.is_call(node, "enumerate", "tqdm", "trange", "track") and node.args:
        node = node.args[0]
    if not isinstance(node, ast.Name | ast.Attribute):
        raise Unclear(node.lineno, f"the batches come from {ast.unparse(node)}")
    return node
