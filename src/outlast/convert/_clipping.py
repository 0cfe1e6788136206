"""Clipping of gradients: an argument of `protect`, and the norm that it gave is the step's.

Only a norm with a bound and nothing else is understood. Whether it is the whole model's is a doubt of `_doubts`.
"""

from __future__ import annotations

import ast
from typing import Any

from outlast.convert._facts import calls_in

__all__ = ["clipped"]

_BY_HAND = "protect(clip_norm=…), and step.grad_norm behind the loop over batches"
_TOO_LATE = (
    "it stands behind the optimizer's step, and changes nothing of what was stepped with. Leave it out, as the loop "
    "trained so far; or put it before the step, if it was meant to clip: then it is protect(clip_norm=…), and its norm "
    "step.grad_norm"
)


def clipped(body: Any, call: ast.Call, last: str, alone: bool) -> None:
    """Rewrite one call of the function `last`. `body`: the rewrite of the loop; `alone`: the result is not used."""
    made = body.made
    if _behind_the_step(body, call):
        made.say(call, "by hand", ast.unparse(call), _TOO_LATE)
        return
    bound = call.args[1] if len(call.args) > 1 else next((k.value for k in call.keywords if k.arg == "max_norm"), None)
    name = "" if alone else _name_given(body, call)
    understood = last == "clip_grad_norm_" and bound is not None and len(call.args) + len(call.keywords) <= 2
    if bound is None or not understood or not (alone or name):
        made.say(call, "by hand", ast.unparse(call), _BY_HAND)
        return
    body.given["clip_norm"] = ast.unparse(bound)
    if alone:
        made.drop(call, ast.unparse(call), "protect(clip_norm=…); step.grad_norm is the norm before clipping")
        return
    body.normed.append(call)
    made.put(call, f"{made.names['step']}.grad_norm", "the norm before clipping; protect(clip_norm=…) clips")
    _numbers(body, call, name)


def _behind_the_step(body: Any, call: ast.Call) -> bool:
    """Whether the optimizer has stepped since the backward when it clips."""
    place, backward = body.facts.function_of(call), body.loops.backward
    own = body.facts.function_of(backward) is place
    for other in calls_in(place):
        if isinstance(other.func, ast.Attribute) and other.func.attr == "step":
            owner = ast.unparse(other.func.value).lower()
            stepped = "sched" not in owner and not owner.endswith("lr")
            if stepped and other.lineno < call.lineno and (not own or backward.lineno < other.lineno):
                return True
    return False


def _name_given(body: Any, call: ast.Call) -> str:
    """The variable that is given the result, in the loop over batches itself; "" for another use, or another place."""
    statement = body.facts.parents[call]
    named = isinstance(statement, ast.Assign) and len(statement.targets) == 1 and statement.value is call
    if not named or body.loops.step_call is not None or not isinstance(statement.targets[0], ast.Name):
        return ""
    return str(statement.targets[0].id)


def _numbers(body: Any, call: ast.Call, name: str) -> None:
    """What was a tensor is a number: `norm.item()` is `norm`, and any other attribute of it is left to a person."""
    for node in ast.walk(body.facts.function_of(call)):
        if not (isinstance(node, ast.Attribute) and ast.unparse(node.value) == name):
            continue
        asked = body.facts.parents[node]
        if node.attr == "item" and isinstance(asked, ast.Call) and asked.func is node:
            body.made.put(asked, name, "it is a number already")
        else:
            body.made.say(node, "by hand", ast.unparse(node), f"{name} is a number now, and no tensor")
