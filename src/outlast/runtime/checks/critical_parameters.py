"""Critical parameters: what a second replica computes in every step, because it costs so little (decision 0064).

The reduction of their gradients is computed by a second member, their update by all: parameter and moments are compared
in the next header. Their microbatches' gradients are audited like all others. Not here: the checks themselves
(`exchange/second_reduction.py`, `_state_rotation.py`), and which parameters to choose (`core/policy`).
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence

import torch
from torch import nn

from outlast.core.policy.critical_choice import Candidate, Kind, choose_critical
from outlast.errors import ConfigError
from outlast.runtime.checks.guards import Guarding
from outlast.runtime.exchange.second_reduction import Checks
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.state import State
from outlast.tensors import whole

__all__ = ["critical_of", "watch"]

_ROUTERS = ("*router*", "*.gate.*", "*.gating.*", "gate.*")


def critical_of(state: State, wanted: Sequence[str] | str) -> tuple[str, ...]:
    """Names of the parameters that patterns mean, or that "auto" chooses. ConfigError for a pattern that means none."""
    if wanted == "auto":
        return choose_critical(_candidates(state))
    found: set[str] = set()
    for pattern in [wanted] if isinstance(wanted, str) else wanted:
        names = fnmatch.filter(state.names, pattern)
        if not names:
            close = difflib.get_close_matches(pattern, state.names, n=1, cutoff=0.4) or state.names[:1]
            raise ConfigError(
                f"the pattern {pattern!r} of audit_params matches no parameter",
                remedy=f'a name or a pattern such as {close[0]!r}, or "auto"',
            )
        found.update(names)
    return tuple(name for name in state.names if name in found)


def watch(engine: Engine, guards: Guarding, names: Sequence[str], checks: Checks) -> None:
    """From the next step on."""
    indices = frozenset(engine.state.names.index(name) for name in names)
    guards.agreement.always(indices)
    for bucket in engine.layout.buckets:
        spans = [(start, start + numel) for index, start, numel in bucket.params if index in indices]
        if spans:
            checks.always[bucket.index] = spans


def _candidates(state: State) -> list[Candidate]:
    first, last = state.names[0].rpartition(".")[0], state.names[-1].rpartition(".")[0]
    tables = {
        id(p) for m in state.model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) for p in m.parameters()
    }
    found = []
    for name, param in zip(state.names, state.params, strict=True):
        layer = name.rpartition(".")[0]
        kind: Kind = "other"
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _ROUTERS):
            kind = "router"
        elif id(param) in tables:
            kind = "embedding"
        elif layer in (first, last):
            kind = "last" if layer == last else "first"
        found.append(_candidate(name, param, kind))
    return found


def _candidate(name: str, param: torch.Tensor, kind: Kind) -> Candidate:
    norm = float(torch.linalg.vector_norm(whole(param.detach()).float()))
    return Candidate(name=name, numel=param.numel(), norm=norm, kind=kind)
