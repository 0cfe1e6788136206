"""Have activations collapsed? Sampled forward hooks, with a ceiling on what they may cost.

Now and then one microbatch is watched: the outputs of leaf modules are reduced to a few statistics and compared with
what the same layer showed when it was first seen (after `_SETTLE` looks, its healthiest). The period follows from
measured cost: never more than `collapse_share` of the time since the last look. It changes nothing that training uses.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from outlast.core.policy import Guards
from outlast.tensors import ActivationStats, activation_stats, collapse_reasons

__all__ = ["Activations"]

_ROWS, _UNITS = 256, 512  # of an output, at most
_SETTLE = 3
_MODULES = 64  # watched at one look; the others take their turn


class Activations:
    """Looks for the first operation whose result is not finite. `num_looks`, `spent_s`: for reports and tests."""

    def __init__(self, model: nn.Module, policy: Guards, clock: Any = time.perf_counter) -> None:
        self._leaves = [(name, m) for name, m in model.named_modules() if name and not any(m.children())]
        self._share, self._clock = policy.collapse_share, clock
        self._healthy: dict[str, tuple[int, ActivationStats]] = {}
        self._told: set[str] = set()
        self._found: list[tuple[str, str]] = []
        self._handles: list[RemovableHandle] = []
        self._next_s = self._cost_s = 0.0
        self._turn = 0
        self.num_looks, self.spent_s = 0, 0.0

    def begin(self) -> None:
        """A microbatch is about to run."""
        if self._clock() < self._next_s or not self._leaves or self._handles:
            return
        self._cost_s = 0.0
        count = len(self._leaves)
        for i in range(min(count, _MODULES)):
            name, module = self._leaves[(self._turn + i) % count]
            self._handles.append(module.register_forward_hook(self._hook(name)))
        self._turn = (self._turn + _MODULES) % count if count > _MODULES else 0

    def end(self) -> None:
        """It ran: unhook, and work out when the next look is due."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.num_looks += 1
        self.spent_s += self._cost_s
        self._next_s = self._clock() + self._cost_s / self._share

    def take(self) -> tuple[tuple[str, str], ...]:
        """What was found since the last call, each module once: (module, what was seen)."""
        found, self._found = tuple(self._found), []
        return found

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if module.training and isinstance(output, Tensor) and output.is_floating_point() and output.dim() > 1:
                start = self._clock()
                self._look(name, output)
                self._cost_s += self._clock() - start

        return look

    def _look(self, name: str, output: Tensor) -> None:
        with torch.no_grad():
            rows = output.detach().reshape(-1, output.shape[-1])
            now = activation_stats(rows[:: max(1, len(rows) // _ROWS)][:_ROWS, :_UNITS])
        seen, healthy = self._healthy.get(name, (0, now))
        if seen < _SETTLE:
            best = now if now.spread > healthy.spread or not seen else healthy
            self._healthy[name] = (seen + 1, best)
            return
        reasons = collapse_reasons(now, healthy)
        if reasons and name not in self._told:
            self._told.add(name)
            self._found.append((name, "; ".join(reasons)))
        elif not reasons:
            self._told.discard(name)
