"""What a lying replica may send: attacks as pure functions of the honest rows, for tests and for `prove`.

Role: each function takes the honest rows (h, d), which its liars are assumed to know, and returns the liars' rows
(num_liars, d) in the same dtype. Nothing draws at random by itself: a seed is an argument. `strongest` picks the factor
of a family that hurts a given rule most, as the papers' own evaluations do.

Not here: who lies (the caller puts rows together), label flipping of a real data set (`flip_labels` only maps labels).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

__all__ = [
    "ATTACKS", "alie", "colluding_groups", "flip_labels", "inconsistent", "ipm", "lying_reducer", "mimic", "nan_rows",
    "random_bits", "scaling", "sign_flip", "stale", "strongest",
]  # fmt: skip


def sign_flip(honest: Tensor, num_liars: int, *, factor: float = 1.0) -> Tensor:
    """The honest mean, negated."""
    return _repeat(-factor * _mean(honest), honest, num_liars)


def scaling(honest: Tensor, num_liars: int, *, factor: float = 1e3) -> Tensor:
    """The honest mean, much too long."""
    return _repeat(factor * _mean(honest), honest, num_liars)


def ipm(honest: Tensor, num_liars: int, *, factor: float = 0.5) -> Tensor:
    """Inner-product manipulation: minus a fraction of the honest mean (Xie et al. 2020, Fall of empires)."""
    return _repeat(-factor * _mean(honest), honest, num_liars)


def alie(honest: Tensor, num_liars: int, *, factor: float = 1.0) -> Tensor:
    """A little is enough: the mean, moved against itself by `factor` standard deviations in every coordinate.

    Baruch et al. 2019, algorithm 3; the direction is against the mean's sign.
    """
    mean = _mean(honest)
    spread = honest.double().std(dim=0, unbiased=False)
    return _repeat(mean - factor * spread * torch.where(mean >= 0, 1.0, -1.0), honest, num_liars)


def mimic(honest: Tensor, num_liars: int, *, target: int | None = None) -> Tensor:
    """All copy one honest row, so that its share counts too much (Karimireddy et al. 2022, section 3).

    Without a target: the row that reaches furthest along the direction in which the honest rows differ most.
    """
    if target is None:
        centered = honest.double() - _mean(honest)
        _, vectors = torch.linalg.eigh(centered @ centered.T)
        target = int(vectors[:, -1].abs().argmax())
    return honest[target].expand(num_liars, -1).clone()


def random_bits(honest: Tensor, num_liars: int, *, seed: int = 0, rate: float = 1e-3) -> Tensor:
    """Honest rows with each bit flipped with probability `rate`, as broken memory sends them (NaN included)."""
    rows = honest[torch.arange(num_liars) % len(honest)].clone()
    draw = torch.Generator().manual_seed(seed)
    raw = rows.view(torch.uint8)
    for bit in range(8):
        hit = torch.rand(raw.shape, generator=draw) < rate
        raw ^= hit.to(torch.uint8) << bit
    return rows


def stale(honest: Tensor, num_liars: int, *, earlier: Tensor) -> Tensor:
    """Rows of an earlier step (h', d), sent again."""
    return earlier[torch.arange(num_liars) % len(earlier)].to(honest.dtype).clone()


def nan_rows(honest: Tensor, num_liars: int, *, value: float = float("nan"), share: float = 1.0) -> Tensor:
    """Honest-looking rows of which the first share of elements is not finite."""
    rows = honest[torch.arange(num_liars) % len(honest)].clone()
    rows[:, : max(1, round(share * rows.shape[1]))] = value
    return rows


def colluding_groups(honest: Tensor, num_liars: int, *, factor: float = 1.5, num_groups: int = 2) -> Tensor:
    """Groups that support each other around different false points, each near enough to be believed."""
    mean, spread = _mean(honest), honest.double().std(dim=0, unbiased=False)
    signs = [1.0 if group % 2 else -1.0 for group in range(num_groups)]
    stretch = [1.0 + group // 2 for group in range(num_groups)]
    points = [mean + factor * s * k * spread for s, k in zip(signs, stretch, strict=True)]
    rows = [points[liar % num_groups] for liar in range(num_liars)]
    return torch.stack(rows).to(honest.dtype) if rows else honest[:0].clone()


def inconsistent(honest: Tensor, num_liars: int, *, num_peers: int, factor: float = 1.0) -> list[Tensor]:
    """A different lie for each peer (num_peers tensors): what headers cannot agree on (protocol, rule 26)."""
    return [
        _repeat(_mean(honest) * (factor * (-1.0) ** peer * (1 + peer)), honest, num_liars) for peer in range(num_peers)
    ]


def lying_reducer(slice_result: Tensor, *, factor: float = -1.0, start: int = 0, stop: int | None = None) -> Tensor:
    """A reduced slice (w,) that its reducer has falsified from `start` to `stop`."""
    false = slice_result.clone()
    false[start:stop] *= factor
    return false


def flip_labels(labels: Tensor, num_classes: int) -> Tensor:
    """Labels l become num_classes - 1 - l: the data of a replica that lies about what it sees."""
    return num_classes - 1 - labels


def strongest(
    family: Callable[..., Tensor],
    honest: Tensor,
    num_liars: int,
    rule: Callable[[Tensor], Tensor],
    factors: Iterable[float],
) -> tuple[Tensor, float]:
    """The lies of the factor that carries `rule`, called on liars and honest rows together, furthest from the mean.

    Returns (rows, factor). This is "optimised" ALIE or IPM: a line search (Allouah et al. 2023, section 6).
    """
    mean, best = _mean(honest), (torch.empty(0), 0.0, -1.0)
    for factor in factors:
        rows = family(honest, num_liars, factor=factor)
        distance = float((rule(torch.cat([rows, honest])).double() - mean).norm())
        if best[2] < 0.0 or distance > best[2]:  # of honest rows that are not finite the first factor is as good as any
            best = (rows, factor, max(0.0, distance))
    return best[0], best[1]


ATTACKS: dict[str, Callable[..., Tensor]] = {
    "sign_flip": sign_flip, "scaling": scaling, "alie": alie, "ipm": ipm, "mimic": mimic, "random_bits": random_bits,
    "nan": nan_rows, "colluding_groups": colluding_groups, "stale": stale,
}  # fmt: skip


def _mean(honest: Tensor) -> Tensor:
    return honest.double().mean(dim=0)


def _repeat(row: Tensor, honest: Tensor, num_liars: int) -> Tensor:
    return row.to(honest.dtype).expand(num_liars, -1).clone()
