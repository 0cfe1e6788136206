"""When to checkpoint: Young, Daly, the exact optimum, overlap, prediction, silent errors, and what each costs.

All times in one unit (the caller's). M: mean time between interruptions of the whole job; c: time the job is blocked by
one write; r: time from an interruption until work goes on. Interval T: work between the ends of two writes.
Invariant: the exact optimum minimises `expected_segment`(T) / T for exponential interruptions that also strike during
writes and recoveries. Sources: Young, CACM 17(9) (1974); Daly, FGCS 22(3) (2006); Aupy, Robert, Vivien & Zaidouni, JPDC
74(2) (2014) (prediction); Benoit, Cavelan, Robert & Sun, TOPC 3(2) (2016) (silent errors).
"""

from __future__ import annotations

from collections.abc import Callable
from math import e

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from ._lifetimes import Lifetime
from .check import FloatArray, nonnegative, positive, probability

__all__ = [
    "async_interval", "daly_interval", "ettr", "ettr_cluster", "exact_interval", "expected_segment",
    "first_order_waste", "general_ettr", "general_interval", "predicted_interval", "predicted_waste", "silent_interval",
    "silent_overhead", "young_interval",
]  # fmt: skip


def young_interval(write: ArrayLike, mtbi: ArrayLike) -> FloatArray:
    """sqrt(2 c M)."""
    return np.asarray(np.sqrt(2 * positive("write time", write) * positive("MTBF", mtbi)))


def daly_interval(write: ArrayLike, mtbi: ArrayLike) -> FloatArray:
    """sqrt(2cM)(1 + sqrt(c/2M)/3 + (c/2M)/9) - c for c < 2M, else M (Daly 2006, eq. 37)."""
    c, m = positive("write time", write), positive("MTBF", mtbi)
    x = c / (2 * m)
    return np.where(c < 2 * m, np.sqrt(2 * c * m) * (1 + np.sqrt(x) / 3 + x / 9) - c, m)


def exact_interval(write: ArrayLike, mtbi: ArrayLike) -> FloatArray:
    """M (1 + W(-exp(-c/M - 1))): the minimiser of `expected_segment` / T; independent of the recovery time."""
    c, m = positive("write time", write), positive("MTBF", mtbi)
    x = c / m
    # Near the branch point -1/e the argument loses the digits of c/M: there the series of W in p = sqrt(2(1 - e^-x)).
    p = np.sqrt(-2 * np.expm1(-x))
    near = p - p**2 / 3 + 11 * p**3 / 72 - 43 * p**4 / 540 + 769 * p**5 / 17280
    far = 1 + np.real(special.lambertw(-np.exp(-x) / e))
    return np.asarray(m * np.where(x < 1e-4, near, far))


def expected_segment(interval: ArrayLike, write: ArrayLike, mtbi: ArrayLike, recovery: ArrayLike = 0.0) -> FloatArray:
    """Expected wall time to bank one interval: M e^(r/M) (e^((T+c)/M) - 1) (Daly 2006, eq. 20)."""
    t, c, m, r = (
        positive("interval", interval),
        nonnegative("write time", write),
        positive("MTBF", mtbi),
        nonnegative("recovery", recovery),
    )
    with np.errstate(over="ignore"):
        return np.asarray(m * np.exp(r / m) * np.expm1((t + c) / m))


def ettr(interval: ArrayLike, write: ArrayLike, mtbi: ArrayLike, recovery: ArrayLike = 0.0) -> FloatArray:
    """Effective training time ratio in the long run, exact for exponential interruptions: T / expected_segment."""
    return np.asarray(np.asarray(interval, dtype=float) / expected_segment(interval, write, mtbi, recovery))


def first_order_waste(interval: ArrayLike, write: ArrayLike, mtbi: ArrayLike, recovery: ArrayLike = 0.0) -> FloatArray:
    """c/T + T/2M + r/M: what Young minimises; valid while c, T and r are all far below M."""
    t, m = positive("interval", interval), positive("MTBF", mtbi)
    return np.asarray(nonnegative("write time", write) / t + (t / 2 + nonnegative("recovery", recovery)) / m)


def ettr_cluster(
    num_nodes: ArrayLike, rate: ArrayLike, restart: ArrayLike, interval: ArrayLike, write: ArrayLike
) -> FloatArray:
    """E[ETTR] = (1 - N r (u0 + dt/2)) / (1 + w/dt), clipped at 0 (arXiv 2410.21680, section III; queueing left out)."""
    loss = (
        nonnegative("num_nodes", num_nodes)
        * nonnegative("rate", rate)
        * (nonnegative("restart", restart) + positive("interval", interval) / 2)
    )
    return np.asarray(np.maximum(0.0, 1 - loss) / (1 + nonnegative("write", write) / np.asarray(interval)))


def async_interval(blocked: ArrayLike, durable: ArrayLike, mtbi: ArrayLike, slowdown: float = 0.0) -> FloatArray:
    """Overlapped writes: blocked b, durable d after the snapshot, training slowed by `slowdown` meanwhile.

    Each write costs c = b + slowdown (d - b); work at risk grows by the constant d, which moves the waste, not the
    optimum. Never shorter than d: one write in flight at a time.
    """
    b, d = nonnegative("blocked", blocked), positive("durable", durable)
    nonnegative("durable - blocked", d - b), probability("slowdown", slowdown)
    cost = np.maximum(b + slowdown * (d - b), 1e-12 * d)
    return np.maximum(exact_interval(cost, mtbi), d)


def predicted_interval(write: ArrayLike, mtbi: ArrayLike, recall: ArrayLike) -> FloatArray:
    """sqrt(2 c M / (1 - recall)): only unpredicted failures lose work (Aupy et al. 2014, eq. 14 with exact dates)."""
    unseen = positive("1 - recall", 1 - probability("recall", recall))
    return young_interval(write, np.asarray(mtbi) / unseen)


def predicted_waste(
    interval: ArrayLike,
    write: ArrayLike,
    mtbi: ArrayLike,
    recovery: ArrayLike,
    recall: ArrayLike,
    precision: ArrayLike,
    planned: ArrayLike,
) -> FloatArray:
    """First-order waste with a predictor: the predicted share costs a `planned` stop, false alarms cost one too.

    False alarms come at rate recall (1 - precision) / (precision M).
    """
    r, p = probability("recall", recall), positive("precision", probability("precision", precision))
    t, m = positive("interval", interval), positive("MTBF", mtbi)
    stops = r / (p * m) * nonnegative("planned", planned)
    return np.asarray(np.asarray(write) / t + (1 - r) * (t / 2 + np.asarray(recovery)) / m + stops)


def silent_interval(write: ArrayLike, verify: ArrayLike, fail_rate: ArrayLike, silent_rate: ArrayLike) -> FloatArray:
    """sqrt((V + C) / (ls + lf/2)): a verification before each write; silent errors lose the whole interval."""
    hazard = positive(
        "silent_rate + fail_rate", nonnegative("silent_rate", silent_rate) + nonnegative("fail_rate", fail_rate) / 2
    )
    return np.asarray(np.sqrt((nonnegative("verify", verify) + positive("write time", write)) / hazard))


def silent_overhead(
    interval: ArrayLike,
    write: ArrayLike,
    verify: ArrayLike,
    fail_rate: ArrayLike,
    silent_rate: ArrayLike,
    recovery: ArrayLike = 0.0,
) -> FloatArray:
    """Expected wall time over work, exact: pattern (T work, V verify, C write), fail-stop at lf, silent at ls in work.

    Each try of T+V lasts min(F, T+V); the write is struck by fail-stop errors only (Benoit et al. 2016, prop. 1). With
    no errors it is 1 + (V + C)/T. Recoveries are struck by fail-stop errors too.
    """
    t, c, v, r = (np.asarray(x, dtype=float) for x in (interval, write, verify, recovery))
    lf, ls = nonnegative("fail_rate", fail_rate), nonnegative("silent_rate", silent_rate)

    def span(length: FloatArray) -> FloatArray:  # E[min(F, length)]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(lf > 0, -np.expm1(-lf * length) / np.where(lf > 0, lf, 1.0), length)

    recover = np.exp(lf * r) * span(r)
    good_try = np.exp(-lf * (t + v) - ls * t)
    one_try = span(t + v) + recover * (1 - good_try)
    work = one_try / good_try  # expected time until one verified interval
    write_ok = np.exp(-lf * c)
    return np.asarray((work + span(c) + recover * (1 - write_ok)) / write_ok / t)


def general_ettr(lifetime: Lifetime, interval: float, write: float, recovery: float, cycles: int = 4000) -> float:
    """ETTR when interruptions renew: time since the last restart follows `lifetime`, recoveries are not struck.

    Renewal reward: banked work per life = T sum_k S(k (T + c)), over mean life + recovery. The sum stops when the tail
    is below 1e-12 of it, or after `cycles` (then the tail is integrated).
    """
    positive("interval", interval), nonnegative("write time", write), nonnegative("recovery", recovery)
    period = interval + write
    needed = int(min(cycles, np.ceil(float(lifetime.quantile(1 - 1e-13)) / period) + 1))
    banked = float(lifetime.sf(np.arange(1, needed + 1) * period).sum())
    if needed == cycles:
        from scipy.integrate import quad

        banked += float(quad(lambda t: float(lifetime.sf(t)), (cycles + 0.5) * period, np.inf, limit=200)[0]) / period
    return interval * banked / (lifetime.mean() + recovery)


def general_interval(lifetime: Lifetime, write: float, recovery: float = 0.0) -> float:
    """The constant interval that maximises `general_ettr`: golden section in log T around Young's."""
    start = float(young_interval(write, lifetime.mean()))
    return _golden(lambda t: -general_ettr(lifetime, t, write, recovery), start / 30, start * 30)


def _golden(cost: Callable[[float], float], low: float, high: float) -> float:
    ratio = (5**0.5 - 1) / 2
    a, b = np.log(low), np.log(high)
    c, d = b - ratio * (b - a), a + ratio * (b - a)
    at_c, at_d = cost(float(np.exp(c))), cost(float(np.exp(d)))
    while b - a > 1e-7:
        if at_c <= at_d:
            b, d, at_d = d, c, at_c
            c = b - ratio * (b - a)
            at_c = cost(float(np.exp(c)))
        else:
            a, c, at_c = c, d, at_d
            d = a + ratio * (b - a)
            at_d = cost(float(np.exp(d)))
    return float(np.exp((a + b) / 2))
