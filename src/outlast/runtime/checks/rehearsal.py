"""In the first steps: would a replica that joins end with the same bits? One member tries it, before any fault (41).

Two questions, asked by the view's last member (or whoever is alone) in the second and third step that it makes. Does
the loop write to the state between two steps in a way that nobody sees? And does an optimizer, as the script made it,
with only the state and settings that a joiner receives, do the same step? It works on a copy of parameters and
optimizer state, where memory has room for one; else on the parameters themselves, which are laid aside meanwhile, in
the host's memory or a file. Hooks of optimizers are the script's own and would run twice, so with them, or with an
optimizer that cannot be copied, the second question is not asked. What the loop keeps beside the state is the matter
of `unseen_averages.py`. Where a replica is several ranks each tries it on what it holds; an optimizer may gather what
the others hold, so all try a step, or none does; what each holds whole is the matter of `_whole_parameters.py`.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from outlast.errors import LoopUnrepeatable
from outlast.runtime.checks._laid_aside import LaidAside, shared, tensors_in
from outlast.runtime.checks._whole_parameters import WholeParameters
from outlast.runtime.checks.ranks_together import AloneRank, is_of_ranks
from outlast.runtime.training.free_memory import free_bytes
from outlast.runtime.training.state import State
from outlast.tensors import fingerprint, is_shard, local

__all__ = ["Rehearsal"]

_STEPS = 3  # the first one has no state yet that could be missing
_SHARE = 0.25  # of the memory that is free
_NO_COPY = (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError, RecursionError)


class Rehearsal:
    """Goes through the first steps as a joiner would, and names what it could not repeat. `chosen`: whether it is for
    this member to do, the same on all its ranks. `folder`: where there is room on a disk. `ranks`: of this replica."""

    def __init__(
        self, state: State, chosen: Callable[[], bool], folder: Path | None = None, ranks: AloneRank | None = None
    ) -> None:
        self._state, self._chosen, self._ranks = state, chosen, ranks or AloneRank()
        self._folder = folder or Path(tempfile.gettempdir())
        self._whole, self._left = WholeParameters(state), _STEPS
        self._before: dict[str, int] = {}
        self._expected: dict[int, int] = {}  # fingerprints of parameters, by their place
        self._twins = self._made(apart=False)  # the optimizers as the script made them, of its own parameters
        self._apart = self._made(apart=True) if self._twins and self._fits() else []  # and of copies

    # --- what the loop writes ------------------------------------------------------------------------------------
    def applied(self) -> bool:
        """A step was applied; whether there is more to do in the next ones."""
        self._left -= 1
        self._before = self._fingerprints() if self._left > 0 and self._chosen() else {}
        return self._left > 0

    def begun(self, step: int, written: dict[str, Tensor]) -> None:
        """The loop has come to its next inner loop. Raises LoopUnrepeatable for what it wrote unseen."""
        before, self._before = self._before, {}
        now = self._fingerprints() if before else {}
        changed = [name for name in before if before[name] != now.get(name) and name not in written]
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise LoopUnrepeatable(
                f"the loop changed {changed[0]}{more} before step {step}; a replica that joins would not do that",
                did="it was found in a rehearsal, before any fault",
                remedy="change parameters under torch.no_grad(), not through .data"
                + self._nor()
                + ": such changes are handed on; "
                "change optimizer state in the optimizer's own step",
            )

    def _nor(self) -> str:
        return " or to_local()" if any(map(is_shard, self._state.params)) else ""

    def _fingerprints(self) -> dict[str, int]:
        rows = dict(zip(self._state.names, self._state.params, strict=True)) | _states(self._state, self._state.params)
        return {name: _print(tensor) for name, tensor in rows.items()}

    # --- what an optimizer keeps to itself -----------------------------------------------------------------------
    def replay(self) -> None:
        """Before the optimizers' step, with the gradients in place: the same step from what a joiner would have."""
        if not self._chosen():
            return
        self._whole.before()
        if self._left >= _STEPS:
            return
        copies = bool(self._apart) and self._fits()
        aside = self._lay_aside() if self._twins and not copies else None
        if not self._ranks.all(copies or aside is not None):
            if aside is not None:
                aside.forget()
        elif aside is None:
            self._on_copies()
        else:
            self._in_place(aside)

    def _on_copies(self) -> None:
        pairs = [pair for theirs, own in self._by_optimizer(self._apart) for pair in _pairs(theirs, own)]
        with torch.no_grad():
            for param, twin in pairs:
                local(twin).copy_(local(param))
                twin.grad = None if param.grad is None else param.grad.clone()
        for optimizer, twin in self._by_optimizer(self._apart):
            _do_step(optimizer, twin, _cloned)
        self._expect({id(param): twin for param, twin in pairs})
        for _, twin in pairs:
            twin.grad = None

    def _lay_aside(self) -> LaidAside | None:
        """Where memory has no room for copies: what a step may change. None: there is no room anywhere, or there are
        tensors that have no bytes of their own."""
        params, optimizers = self._state.params, self._state.optimizers
        held = [params, [p.grad for p in params], [list(o.state.values()) for o in optimizers]]
        try:
            tensors = tensors_in([held, [o.param_groups for o in optimizers]])
            return LaidAside(tensors, _SHARE / self._ranks.width, self._folder, self._ranks.width)
        except (*_NO_COPY, OSError):
            return None

    def _in_place(self, aside: LaidAside) -> None:
        """On the parameters themselves, which are then what they were."""
        params = self._state.params
        grads = [param.grad for param in params]
        try:
            with aside:
                for optimizer, twin in self._by_optimizer(self._twins):
                    _do_step(optimizer, twin, shared)
                self._expect({})
        finally:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad

    def _by_optimizer(self, twins: list[Any]) -> list[tuple[Any, Any]]:
        return list(zip(self._state.optimizers, twins, strict=True))

    def _expect(self, twins: dict[int, Tensor]) -> None:
        """Keep what came out: of copies, by their parameter, or of the parameters where there are none."""
        stepped = {id(param) for theirs, own in self._by_optimizer(self._twins) for param, _ in _pairs(theirs, own)}
        mine = [(place, param) for place, param in enumerate(self._state.params) if id(param) in stepped]
        self._expected = {place: _print(twins.get(id(param), param)) for place, param in mine}

    def compare(self, step: int) -> None:
        """After the optimizers' step. Raises LoopUnrepeatable, naming the first tensor that came out differently, or
        that ranks of this replica hold whole and have trained apart."""
        self._whole.after(step)
        expected, self._expected = self._expected, {}
        for place, was in expected.items():
            if _print(self._state.params[place]) != was:
                raise LoopUnrepeatable(
                    f"{self._state.names[place]} after step {step} is another one where the optimizer begins with the "
                    "state and settings that a replica which joins would be given",
                    did="it was found in a rehearsal, before any fault",
                    remedy="keep all that step() counts or remembers in optimizer.state or param_groups, and nothing "
                    "in attributes of the optimizer",
                )

    def _made(self, *, apart: bool) -> list[Any]:
        """The optimizers as they are now, with parameters of their own if `apart`; none where that cannot be had."""
        if any(_has_hooks(optimizer) for optimizer in self._state.optimizers):
            return []
        params = [p for optimizer in self._state.optimizers for g in optimizer.param_groups for p in g["params"]]
        memo: dict[int, Any] = {id(p): p for p in params}
        if apart:
            memo = {id(p): torch.nn.Parameter(p.detach().clone(), p.requires_grad) for p in params}
        else:  # what it holds of the state is set before each use
            memo |= {id(t): t for t in tensors_in([list(o.state.values()) for o in self._state.optimizers])}
        memo |= {id(mesh): mesh for mesh in (getattr(p, "device_mesh", None) for p in params) if mesh is not None}
        try:
            return [_twin(optimizer, memo) for optimizer in self._state.optimizers]
        except _NO_COPY:
            return []

    def _fits(self) -> bool:
        """Whether a copy of parameters, gradients and optimizer state takes a small part of what is free."""
        needed = self._state.size_bytes() + sum(p.numel() * p.element_size() for p in map(local, self._state.params))
        return needed * self._ranks.width < _SHARE * free_bytes(self._state.params[0].device)


def _twin(optimizer: Any, memo: dict[int, Any]) -> Any:
    twin = object.__new__(type(optimizer))
    memo[id(optimizer)] = twin
    kept = {key: value for key, value in vars(optimizer).items() if key != "step"}  # a scheduler's wrapper of it
    memo |= {id(value): value for value in kept.values() if is_of_ranks(value)}
    vars(twin).update({key: copy.deepcopy(value, memo) for key, value in kept.items()})
    return twin


def _has_hooks(optimizer: Any) -> bool:
    if not isinstance(optimizer, torch.optim.Optimizer) or _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return True
    wrapper = vars(optimizer).get("step")
    if wrapper is not None and not getattr(wrapper, "_wrapped_by_lr_sched", False):
        return True
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _pairs(optimizer: Any, twin: Any) -> list[tuple[Tensor, Tensor]]:
    groups = zip(optimizer.param_groups, twin.param_groups, strict=True)
    return [pair for theirs, own in groups for pair in zip(theirs["params"], own["params"], strict=True)]


def _states(state: State, params: list[Tensor]) -> dict[str, Tensor]:
    rows: dict[str, Tensor] = {}
    for param, name in zip(params, state.names, strict=True):
        for optimizer in state.optimizers:
            if param in optimizer.state:
                kept = optimizer.state[param].items()
                rows |= {f"{key} of {name}": value for key, value in kept if isinstance(value, Tensor)}
    return rows


def _do_step(optimizer: Any, twin: Any, taken: Callable[[Any], Any]) -> None:
    """The step of an optimizer by its twin, which takes state and settings by `taken` and keeps nothing of them."""
    twin.state.clear()
    for param, own in _pairs(optimizer, twin):
        if param in optimizer.state:
            twin.state[own] = {key: taken(value) for key, value in optimizer.state[param].items()}
    for theirs, own in zip(optimizer.param_groups, twin.param_groups, strict=True):
        own.update({key: taken(value) for key, value in theirs.items() if key != "params"})
    try:
        twin.step()
    finally:
        twin.state.clear()


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _print(tensor: Tensor) -> int:
    return fingerprint(local(tensor.detach()).cpu())
