"""What `training.after_step` is given: a function that replicas which join call as well, for each step they replay.

It looks for objects that keep state and that nobody has registered: what they keep would be another thing on who joins
later, and no step would show it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn import Module

from outlast.errors import ConfigError, StepMisuse
from outlast.runtime.training.state import State

__all__ = ["check_follower"]


def check_follower(function: Callable[..., object], state: State, begun: bool) -> None:
    """Raises StepMisuse or ConfigError for what cannot work."""
    if begun:
        raise StepMisuse(
            "training.after_step(…) was called when the loop had begun",
            did="it was not called for the steps so far",
            remedy="call it after protect() and before training.steps(…)",
        )
    if not callable(function):
        raise ConfigError(
            f"training.after_step({function!r}): it cannot be called",
            remedy="training.after_step(lambda: average.update_parameters(model))",
        )
    known = {id(part) for part in (*state.extra.values(), *state.optimizers, *state.schedulers)}
    holders = [state.model, *(part for part in state.extra.values() if isinstance(part, Module))]
    known |= {id(module) for holder in holders for module in holder.modules()}
    tensors = {id(t) for holder in holders for t in (*holder.parameters(), *holder.buffers())}
    for name, found in _used(function):
        if id(found) not in known and not inspect.isclass(found) and _keeps(found, tensors):
            raise ConfigError(
                f"training.after_step: the function uses {name}, a {type(found).__name__} that is not registered",
                did="a replica that joins would be given none of what it keeps",
                remedy=f'protect(..., state={{"{name}": {name}}})',
            )


def _used(function: Any) -> Iterator[tuple[str, Any]]:
    """Objects that the function is bound to, closes over, or names among its module's, with their names; and those
    of their attributes that it names."""
    function = getattr(function, "func", function)  # of functools.partial
    if hasattr(function, "__self__"):
        bound = function.__self__
        function = function.__func__ if hasattr(function, "__func__") else function
        yield "it", bound
        yield from _named(bound, getattr(function, "__code__", None))
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            held = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        yield name, held
        yield from _named(held, code)
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
            yield from _named(function.__globals__[name], code)


def _named(holder: Any, code: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of an object that a code names."""
    held = {} if inspect.ismodule(holder) else getattr(holder, "__dict__", {})
    yield from ((name, held[name]) for name in getattr(code, "co_names", ()) if name in held)


def _keeps(found: Any, known: set[int]) -> bool:
    """Whether it has state of its own, beside tensors that are known."""
    if isinstance(found, Module) and all(id(t) in known for t in (*found.parameters(), *found.buffers())):
        return False
    return all(callable(getattr(found, name, None)) for name in ("state_dict", "load_state_dict"))
