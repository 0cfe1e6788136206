"""What a loop that is not understood needs, line by line: nothing of it is changed, and all of it is named.

The rest of such a script is converted as that of any other.
"""

from __future__ import annotations

import ast
from typing import Any

from outlast.convert._facts import Facts

__all__ = ["outermost_loop", "say_loops"]

_LOOP = (
    "its turns become `for step in training.steps(until=…):`, or epochs of steps, with `for batch in step:` in it; "
    "what is done once a batch goes into the inner one"
)
_STEPS = "goes: outlast takes the step when the loop over the step's batches ends; protect() is given the optimizer"
_SCHEDULES = "goes with protect(scheduler=…); once an epoch it stays, behind the loop over the epoch's steps"
_SCALES = "protect(scaler=scaler), and no scale, unscale_, step, update"
_CALLS = {
    "zero_grad": "goes: gradients are cleared by outlast",
    "unscale_": _SCALES,
    "clip_grad_norm_": "goes: protect(clip_norm=…); step.grad_norm is the norm before it",
    "clip_grad_value_": "goes: protect(clip_norm=…)",
    "GradScaler": _SCALES,
    "item": "behind the loop over the step's batches: step.loss, the mean over the whole batch, for the loss itself",
}
_JUMPS: dict[type[ast.AST], str] = {
    ast.Break: "out of the loop over steps, if all replicas do it after the same one; else training.stop(reason)",
    ast.Continue: "each batch has its backward; one that should not count: step.backward(0.0 * loss)",
}


def outermost_loop(facts: Facts) -> Any:
    """The loop around the first backward that has one, in the same function; None without."""
    found = [_around(facts, call)[-1:] for call in _backwards(facts)]
    return next((loops[0] for loops in found if loops), None)


def say_loops(made: Any) -> None:
    """Say `by hand` for each line. `made`: the rewrite, which has done all the rest."""
    facts: Facts = made.facts
    loops = dict.fromkeys(loop for call in _backwards(facts) for loop in _around(facts, call))
    for loop in loops:
        head = ast.unparse(loop).splitlines()[0]
        made.say(loop, "by hand", head, _LOOP)
    for call in _backwards(facts):
        made.say(call, "by hand", ast.unparse(call), "step.backward(loss), once in each turn of `for batch in step`")
    inside = {id(node) for loop in loops for node in ast.walk(loop)}
    for node in ast.walk(facts.tree):
        if made.gone(node):
            continue
        jump = _JUMPS.get(type(node))
        if jump and next((o for o in facts.within(node) if isinstance(o, ast.For | ast.While)), None) in loops:
            made.say(node, "by hand", ast.unparse(node), jump)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            why = _of_call(facts, node, id(node) in inside)
            if why:
                made.say(node, "by hand", ast.unparse(node), why)


def _backwards(facts: Facts) -> list[ast.Call]:
    calls = [n for n in ast.walk(facts.tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    return [call for call in calls if call.func.attr == "backward"]  # type: ignore[attr-defined]


def _around(facts: Facts, node: ast.AST) -> list[Any]:
    """Loops around it in its function, from the inside out."""
    found: list[Any] = []
    for outer in facts.within(node):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            break
        if isinstance(outer, ast.For | ast.While):
            found.append(outer)
    return found


def _of_call(facts: Facts, call: ast.Call, in_loop: bool) -> str:
    last = facts.dotted(call.func).rpartition(".")[2]
    owner = ast.unparse(call.func.value).lower() if isinstance(call.func, ast.Attribute) else ""
    if last == "item" and not (in_loop and "loss" in owner):
        return ""
    if last == "step" and isinstance(facts.parents[call], ast.Expr):
        return _SCALES if "scaler" in owner else _SCHEDULES if "sched" in owner or owner.endswith("lr") else _STEPS
    if last == "update" and "scaler" in owner:
        return _SCALES
    return _CALLS.get(last, "")
