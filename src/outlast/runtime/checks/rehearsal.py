"""In the first steps: would a replica that joins end with the same bits? One member tries it, before any fault (41).

Two questions, asked by the view's last member (or whoever is alone) in the second and third step that it makes. Does
the loop write to the state between two steps in a way that nobody sees? And does an optimizer, as the script made it,
with only the state and settings that a joiner receives, do the same step? It works on a copy of parameters and
optimizer state, where memory has room for one; hooks of optimizers are the script's own and would run twice, so with
them, or with an optimizer that cannot be copied, the second question is not asked. What the loop keeps beside the state
is the matter of `unseen_averages.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from outlast.errors import LoopUnrepeatable
from outlast.runtime.training.state import State
from outlast.tensors import fingerprint

__all__ = ["Rehearsal"]

_STEPS = 3  # the first one has no state yet that could be missing
_SHARE = 0.25  # of the memory that is free
_NO_COPY = (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError, RecursionError)


class Rehearsal:
    """Goes through the first steps as a joiner would, and names what it could not repeat. `chosen`: whether it is for
    this member to do."""

    def __init__(self, state: State, chosen: Callable[[], bool]) -> None:
        self._state, self._chosen = state, chosen
        self._left = _STEPS
        self._before: dict[str, int] = {}
        self._params: dict[int, Tensor] = {}
        self._twins: list[Any] = self._make_twins()

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
                remedy="change parameters under torch.no_grad(), not through .data: such changes are handed on; "
                "change optimizer state in the optimizer's own step",
            )

    def _fingerprints(self) -> dict[str, int]:
        rows = dict(zip(self._state.names, self._state.params, strict=True)) | _states(self._state, self._state.params)
        return {name: fingerprint(tensor.detach().cpu()) for name, tensor in rows.items()}

    # --- what an optimizer keeps to itself -----------------------------------------------------------------------
    def replay(self) -> None:
        """Before the optimizers' step, with the gradients in place: the same step from what a joiner would have."""
        if not self._twins or self._left >= _STEPS or not self._chosen() or not self._fits():
            self._params.clear()
            return
        pairs = [
            (param, twin)
            for optimizer, twin in zip(self._state.optimizers, self._twins, strict=True)
            for param, twin in _pairs(optimizer, twin)
        ]
        self._params = {}
        with torch.no_grad():
            for param, twin in pairs:
                twin.copy_(param)
                twin.grad = None if param.grad is None else param.grad.clone()
                self._params[id(param)] = twin
        for optimizer, twin in zip(self._state.optimizers, self._twins, strict=True):
            twin.state.clear()
            for param, own in _pairs(optimizer, twin):
                if param in optimizer.state:
                    twin.state[own] = {k: _cloned(v) for k, v in optimizer.state[param].items()}
            for theirs, own in zip(optimizer.param_groups, twin.param_groups, strict=True):
                own.update({k: _cloned(v) for k, v in theirs.items() if k != "params"})
            twin.step()

    def compare(self, step: int) -> None:
        """After the optimizers' step. Raises LoopUnrepeatable, naming the first tensor that came out differently."""
        mine = [param for param in self._state.params if id(param) in self._params]
        names = {id(p): n for p, n in zip(self._state.params, self._state.names, strict=True)}
        for param in mine:
            twin = self._params[id(param)]
            if not torch.equal(_raw(param), _raw(twin)):
                raise LoopUnrepeatable(
                    f"{names[id(param)]} after step {step} is another one where the optimizer begins with the state "
                    "and settings that a replica which joins would be given",
                    did="it was found in a rehearsal, before any fault",
                    remedy="keep all that step() counts or remembers in optimizer.state or param_groups, and nothing "
                    "in attributes of the optimizer",
                )
        self._params.clear()

    def _make_twins(self) -> list[Any]:
        """The optimizers as the script made them, of parameters of their own; none where that cannot be had."""
        if any(_has_hooks(optimizer) for optimizer in self._state.optimizers) or not self._fits():
            return []
        params = [p for optimizer in self._state.optimizers for g in optimizer.param_groups for p in g["params"]]
        memo: dict[int, Any] = {id(p): torch.nn.Parameter(p.detach().clone(), p.requires_grad) for p in params}
        try:
            return [_twin(optimizer, memo) for optimizer in self._state.optimizers]
        except _NO_COPY:
            return []

    def _fits(self) -> bool:
        """Whether a copy of parameters, gradients and optimizer state takes a small part of what is free."""
        needed = self._state.size_bytes() + sum(p.numel() * p.element_size() for p in self._state.params)
        return needed < _SHARE * _free_bytes(self._state.params[0].device)


def _twin(optimizer: Any, memo: dict[int, Any]) -> Any:
    twin = object.__new__(type(optimizer))
    memo[id(optimizer)] = twin
    kept = {key: value for key, value in vars(optimizer).items() if key != "step"}  # a scheduler's wrapper of it
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


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
