"""Replication: how many failures until some group of replicas is wholly lost, and the time that takes.

`num_groups` groups of `degree` machines each; no machine is replaced (the planner adds repair). Invariant: exact, in
closed form. Sources: Ferreira et al., SC'11; Casanova, Robert, Vivien & Zaidouni, FGCS 51 (2015) (MNFTI).
"""

from __future__ import annotations

import numpy as np
from scipy import special

from ._structures import binomial_pmf
from .check import FloatArray, count, positive

__all__ = ["mnfti", "mnfti_hitting_dead", "mtti", "survive_losses"]


def survive_losses(num_groups: int, degree: int, losses: int) -> float:
    """P(every group still has a live member) after `losses` distinct machines of all are lost.

    The coefficient of x^losses in ((1+x)^degree - x^degree)^num_groups over C(all, losses), evaluated with each machine
    lost with probability losses/all, which makes the terms near `losses` the largest: nothing under- or overflows.
    """
    count("num_groups", num_groups, 1), count("degree", degree, 1)
    total = num_groups * degree
    if count("losses", losses, 0, total) == 0:
        return 1.0
    if losses > num_groups * (degree - 1):
        return 0.0
    share = losses / total
    kept = _power(binomial_pmf(degree, share)[:degree], num_groups, losses + 1)
    return float(min(1.0, max(0.0, kept[losses] / binomial_pmf(total, share)[losses])))


def _power(base: FloatArray, exponent: int, size: int) -> FloatArray:
    from scipy import signal  # slow to import, and rarely needed

    result, square = np.ones(1), base
    while exponent:
        if exponent & 1:
            result = signal.convolve(result, square)[:size]
        square = signal.convolve(square, square)[:size]
        exponent >>= 1
    return np.pad(result, (0, size - len(result)))


def mnfti(num_groups: int, degree: int = 2) -> float:
    """Mean number of failures to interruption when only running machines fail.

    The sum over m of P(survive m losses); with 1/C(n, m) as a Beta integral it is (n+1) int (1 - u^degree)^groups du.
    """
    total = count("num_groups", num_groups, 1) * count("degree", degree, 1)
    return float((total + 1) * special.beta(1 / degree, num_groups + 1) / degree)


def mtti(num_groups: int, degree: int, machine_mtbf: float) -> float:
    """Mean time to interruption, machines exponential: int (1 - (1 - e^(-t/M))^degree)^groups dt, in closed form."""
    count("num_groups", num_groups, 1), count("degree", degree, 1)
    parts = special.beta((np.arange(degree) + 1) / degree, num_groups) / degree
    return float(positive("machine_mtbf", machine_mtbf) * parts.sum())


def mnfti_hitting_dead(num_groups: int, degree: int = 2) -> float:
    """The same when failures strike all machines alike, the dead ones again too (they change nothing): by Wald."""
    return num_groups * degree * mtti(num_groups, degree, 1.0)
