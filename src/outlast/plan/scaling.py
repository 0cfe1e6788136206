"""What numbers do: the collapse of R^N, the checkpoint interval over N and c, the odds of copies in peers' memory.

Invariant: every number is `core.reliability`'s, in closed form; here are the words and the curves around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outlast.core import reliability as rel
from outlast.core.reliability.check import count, nonnegative, positive, probability
from outlast.errors import ConfigError

from .answers import Answer, Table
from .figures import Figure
from .number_words import duration, share, significant

__all__ = ["collapse_answer", "numbers", "placement_answer", "sweep_answer"]


def numbers(option: str, text: str) -> list[float]:
    """A comma-separated list; ConfigError names the option."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not a list of numbers", remedy="separate numbers by commas") from None


def _counts(option: str, text: str, least: int = 1) -> list[int]:
    return [int(count(option, int(n) if n == int(n) else n, least)) for n in numbers(option, text)]  # type: ignore[arg-type]


def collapse_answer(chance: float, nodes: str, node_mtbf_h: float, mttr_h: float) -> Answer:
    """R^N: each of N parts fails with `chance` in a job; each machine every `node_mtbf_h`, repaired in `mttr_h`."""
    p = float(probability("--chance", chance))
    positive("--node-mtbf-hours", node_mtbf_h), nonnegative("--mttr-hours", mttr_h)
    listed, up = _counts("--nodes", nodes), float(rel.availability(node_mtbf_h, mttr_h))
    rows = [
        {
            "nodes": n,
            "all_pass": float(rel.series_power(1 - p, n)),
            "any_fails": float(rel.any_of(p, n)),
            "expected_failures": n * p,
            "first_failure_min": 60 * node_mtbf_h / n,
            "all_up": float(rel.series_power(up, n)),
        }
        for n in listed
    ]
    cells = tuple(
        (
            f"{r['nodes']:,}",
            f"{r['all_pass']:.6f}",
            f"{r['any_fails']:.6f}",
            significant(r["expected_failures"]),
            duration(r["first_failure_min"] * 60),
            f"{r['all_up']:.6f}",
        )
        for r in rows
    )
    columns = ("N", "R^N: none fails", "any fails", "expected", "first failure after", "all up at once")
    grid = sorted({round(10**x) for x in np.linspace(0, np.log10(max(listed)), 60)})
    figure = Figure(
        title=f"The collapse: each part passes with {1 - p:g}",
        x_label="parts N",
        y_label="probability",
        log_x=True,
        series=(
            ("R^N: none fails", [(n, float(rel.series_power(1 - p, n))) for n in grid]),
            ("all up at once", [(n, float(rel.series_power(up, n))) for n in grid]),
        ),
    )
    title = f"N parts, each failing with {p:g} in a job, and every {duration(node_mtbf_h * 3600)}"
    notes = (f"One machine is up {up:.6f} of the time. Parts fail independently: the kindest case.",)
    data = {"chance": p, "node_mtbf_h": node_mtbf_h, "mttr_h": mttr_h, "node_availability": up, "rows": rows}
    return Answer(
        title=title, tables=(Table(title="", columns=columns, rows=cells),), data=data, notes=notes, figures=(figure,)
    )


def _two_levels(near_s: float, far_s: float, mtbf_s: float, near_share: float) -> tuple[float, int, float]:
    """(base interval, near writes to a far one, ETTR) of the best ladder of two."""
    rates = [near_share / mtbf_s, (1 - near_share) / mtbf_s]
    ladder, value = rel.optimal_ladder([near_s, far_s], rates, [0.0, 0.0])
    return ladder.interval, ladder.every[1], value


def _interval_row(
    c: float, mtbf_s: float, near_factor: float, near_share: float, verify_share: float, silent_share: float
) -> dict[str, Any]:
    """The best intervals where a write takes `c` seconds, each by its own formula, and the ETTR that it comes to."""
    best = float(rel.exact_interval(c, mtbf_s))
    young, daly = float(rel.young_interval(c, mtbf_s)), float(rel.daly_interval(c, mtbf_s))
    base, every, two = _two_levels(c / near_factor, c, mtbf_s, near_share)
    v, stop, silent = c * verify_share, (1 - silent_share) / mtbf_s, silent_share / mtbf_s
    verified = float(rel.silent_interval(c, v, stop, silent))
    return {
        "write_s": c,
        "mtbf_s": mtbf_s,
        "young_s": young,
        "daly_s": daly,
        "exact_s": best,
        "ettr": float(rel.ettr(best, c, mtbf_s)),
        "ettr_young": float(rel.ettr(young, c, mtbf_s)),
        "two_level_s": base,
        "two_level_every": every,
        "ettr_two_level": two,
        "verified_s": verified,
        "ettr_verified": float(1 / rel.silent_overhead(verified, c, v, stop, silent)),
    }


def sweep_answer(
    nodes: str,
    writes: str,
    node_mtbf_h: float,
    *,
    near_factor: float = 10.0,
    near_share: float = 0.9,
    verify_share: float = 0.1,
    silent_share: float = 0.05,
) -> Answer:
    """The best interval over N and the cost of a write: Young, Daly, exact, two levels, verified."""
    listed, costs = _counts("--nodes", nodes), [float(positive("--writes", c)) for c in numbers("--writes", writes)]
    positive("--node-mtbf-hours", node_mtbf_h), positive("--near-factor", near_factor)
    for option, value in (("--near-share", near_share), ("--silent-share", silent_share)):
        probability(option, value)
    nonnegative("--verify-share", verify_share)
    rows = [
        {"nodes": n, **_interval_row(c, node_mtbf_h * 3600 / n, near_factor, near_share, verify_share, silent_share)}
        for n in listed
        for c in costs
    ]
    cells = tuple(
        (f"{r['nodes']:,} x {r['write_s']:g} s", *(duration(r[k]) for k in ("young_s", "daly_s", "exact_s")),
         share(r["ettr"]), f"{duration(r['two_level_s'])} x {r['two_level_every']}", share(r["ettr_two_level"]),
         duration(r["verified_s"]), share(r["ettr_verified"]))
        for r in rows
    )  # fmt: skip
    columns = ("N x write", "Young", "Daly", "exact", "ETTR", "two levels", "ETTR", "verified", "ETTR")
    notes = (
        f"Two levels: a near write costs {1 / near_factor:g} of a far one and survives {near_share:.0%} of failures; "
        f"verified: a check of {verify_share:g} writes before each, {silent_share:.0%} of errors are silent.",
        "Young's and Daly's are approximations; they leave the optimum where writes take much of the time.",
    )
    title = f"The checkpoint interval over N: a node fails every {duration(node_mtbf_h * 3600)}"
    return Answer(
        title=title, tables=(Table(title="", columns=columns, rows=cells),),
        data={"node_mtbf_h": node_mtbf_h, "rows": rows}, notes=notes, figures=_sweep_figures(rows, costs),
    )  # fmt: skip


def _sweep_figures(rows: Sequence[dict[str, float]], costs: Sequence[float]) -> tuple[Figure, ...]:
    def of(c: float, key: str) -> list[tuple[float, float]]:
        return [(r["nodes"], r[key]) for r in rows if r["write_s"] == c]

    last = costs[-1]
    interval = Figure(
        title=f"Best interval, a write of {last:g} s",
        x_label="nodes",
        y_label="seconds",
        log_x=True,
        log_y=True,
        series=tuple(
            (name, of(last, key))
            for name, key in (
                ("Young", "young_s"),
                ("Daly", "daly_s"),
                ("exact", "exact_s"),
                ("verified", "verified_s"),
            )
        ),
    )
    useful = Figure(
        title="Useful time at the best interval",
        x_label="nodes",
        y_label="ETTR",
        log_x=True,
        series=(*((f"{c:g} s", of(c, "ettr")) for c in costs), (f"{last:g} s, two levels", of(last, "ettr_two_level"))),
    )
    return interval, useful


def placement_answer(nodes: int, copies: int, losses: str, parity: str, group: int) -> Answer:
    """Odds that all state survives the loss of so many machines (or groups of machines), by placement. Exact."""
    n, m = count("--nodes", nodes, 2), count("--copies", copies, 2, nodes)
    data_parts, spare_parts = (*_counts("--parity", parity), 0)[:2]
    size = count("--group", group, 1, nodes)
    domains = [i // size for i in range(n)]
    listed = [int(count("--losses", k, 0, max(domains) + 1)) for k in _counts("--losses", losses, 0)]

    def grouped(placement: rel.Placement, k: int) -> float:
        return rel.survival(placement, k, domains)

    if size == 1:
        kinds: dict[str, Callable[[int], float]] = {
            f"mixed x{m}": lambda k: rel.copies_survival(n, m, k),
            f"ring x{m}": lambda k: rel.copies_survival(n, m, k, ring=True),
            f"rs({data_parts},{spare_parts})": lambda k: rel.parity_survival(n, data_parts, spare_parts, k),
        }
    else:
        mixed, ringed = rel.copies_mixed(n, m), rel.copies_ring(n, m)
        apart = [i % (max(domains) + 1) for i in range(n)]
        kinds = {
            f"spread x{m}": lambda k: rel.survival(mixed, k, apart),
            f"mixed x{m}": lambda k: grouped(mixed, k),
            f"ring x{m}": lambda k: grouped(ringed, k),
        }
    found = {name: [float(survive(k)) for k in listed] for name, survive in kinds.items()}
    rows = tuple((name, *(f"{value:.6f}" for value in values)) for name, values in found.items())
    lost = "machines" if size == 1 else f"groups of {size}"
    table = Table(title="", columns=("placement", *(f"{k} lost" for k in listed)), rows=rows)
    figure = Figure(
        title=f"Odds that the state survives, {n:,} machines",
        x_label=f"{lost} lost",
        y_label="probability",
        series=tuple((name, list(zip(map(float, listed), values, strict=True))) for name, values in found.items()),
    )
    title = f"State of {n:,} machines kept in peers' memory: odds that all of it survives, by {lost} lost at once"
    notes = (
        "Counted exactly, for any number of machines. Mixed: groups of copies, the rest a ring (GEMINI, SOSP'23).",
        *(("Spread: copies lie in different groups.",) if size > 1 else ()),
    )
    data = {"nodes": n, "copies": m, "group": size, "losses": listed, "survive": found}
    return Answer(title=title, tables=(table,), data=data, notes=notes, figures=(figure,))
