"""Guards as mathematics: where a tensor is not finite, whether activations have collapsed; bands are `core/policy`'s.

Role: say what is seen, never what to do about it; verdicts (skip, rewind, stop) are `core/policy`'s too. Invariant:
nothing here keeps a reference to a tensor or takes part in autograd.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from outlast.core.policy.bands import Band, BandReading

__all__ = [
    "ActivationStats",
    "Band",
    "Nonfinite",
    "BandReading",
    "activation_stats",
    "collapse_reasons",
    "find_nonfinite",
]

_CHUNK = 1 << 20
_ROUNDS = 16  # of the power method


@dataclass(frozen=True, kw_only=True, slots=True)
class Nonfinite:
    """Where a tensor is not finite. `index`: of the first such element, in the tensor's own shape."""

    name: str
    num_nan: int
    num_inf: int
    index: tuple[int, ...]


def find_nonfinite(named: Iterable[tuple[str, Tensor]]) -> list[Nonfinite]:
    """Every tensor that holds a NaN or an infinity, in the order given. Walks all of them: called after a hit only."""
    found = []
    for name, tensor in named:
        if not tensor.is_floating_point():
            continue
        where = _first_nonfinite(tensor.detach())
        if where is not None:
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(where), tensor.shape))
            found.append(
                Nonfinite(name=name, num_nan=int(tensor.isnan().sum()), num_inf=int(tensor.isinf().sum()), index=index)
            )
    return found


def _first_nonfinite(tensor: Tensor) -> int | None:
    flat = tensor.reshape(-1)
    for at in range(0, flat.numel(), _CHUNK):
        bad = ~torch.isfinite(flat[at : at + _CHUNK])
        if bool(bad.any()):
            return at + int(bad.to(torch.uint8).argmax())
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationStats:
    """A layer's output over a batch. `dead`: share of units that never leave zero; `constant`: share that never vary;
    `spread`: median over units of their standard deviation; `rank`: directions that carry the variance (see source);
    `rest`: root mean square a unit of what lies outside the strongest direction; `noise`: of the dtype's rounding.
    """

    num_samples: int
    num_units: int
    dead: float
    constant: float
    spread: float
    rank: float
    rest: float = 0.0
    noise: float = 0.0


def activation_stats(output: Tensor) -> ActivationStats:
    """Statistics of activations (samples, ..., units); all leading dimensions count as samples. Float64 inside.

    `rank` is the participation ratio (sum of variances' eigenvalues)^2 / (sum of their squares), from the smaller of
    the two Gram matrices: it falls towards one when all samples are mapped onto one line, but also where one direction
    outgrows all others, as in any language model that has learnt how frequent its tokens are. `rest` tells them apart.
    """
    flat = output.detach().reshape(-1, output.shape[-1] if output.dim() else 1).double()
    samples, units = flat.shape
    if samples == 0 or units == 0:
        return ActivationStats(num_samples=samples, num_units=units, dead=0.0, constant=0.0, spread=0.0, rank=0.0)
    centered = flat - flat.mean(dim=0)
    deviation = centered.square().mean(dim=0).sqrt()
    size = flat.abs().amax(dim=0)
    gram = centered.T @ centered if units <= samples else centered @ centered.T
    trace, square = float(gram.diagonal().sum()), float(gram.square().sum())
    rest = max(0.0, trace - _largest(gram)) / (samples * units)
    rounding = torch.finfo(output.dtype).eps if output.is_floating_point() else 0.0
    return ActivationStats(
        num_samples=samples,
        num_units=units,
        dead=float((size == 0).double().mean()),
        constant=float((deviation <= 1e-12 * size).double().mean()),
        spread=float(deviation.median()),
        rank=trace**2 / square if square > 0.0 else 0.0,
        rest=rest**0.5,
        noise=rounding * float(flat.square().mean().sqrt()),
    )


def _largest(gram: Tensor) -> float:
    """The largest eigenvalue, from below, by the power method: what is missing counts as rest."""
    vector = gram[int(gram.diagonal().argmax())]
    for _ in range(_ROUNDS):
        size = float(vector.norm())
        if size == 0.0:
            return 0.0
        vector = gram @ (vector / size)
    vector = vector / vector.norm()
    return float(vector @ gram @ vector)


def collapse_reasons(
    now: ActivationStats,
    healthy: ActivationStats,
    *,
    dead_more: float = 0.5,
    spread_less: float = 1e-3,
    rank: float = 1.5,
) -> list[str]:
    """Why these activations have collapsed against a healthy sample of the same layer; empty when they have not. On one
    line lies what has hardly a second direction left: not because the first has grown, but because all others vanish,
    or go down in the rounding of the dtype."""
    reasons = []
    if now.dead - healthy.dead >= dead_more:
        reasons.append(f"{now.dead:.0%} of {now.num_units} units are dead (healthy: {healthy.dead:.0%})")
    if healthy.spread > 0.0 and now.spread <= spread_less * healthy.spread:
        reasons.append(f"variance is vanishing: spread {now.spread:.3g} (healthy: {healthy.spread:.3g})")
    lost = max(spread_less * healthy.rest, min(now.noise, 0.1 * healthy.rest))
    if now.rank < rank <= healthy.rank / 2 and now.rest <= lost:
        reasons.append(f"all samples lie on one line: rank {now.rank:.2f} (healthy: {healthy.rank:.2f})")
    return reasons
