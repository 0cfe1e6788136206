"""What prediction is worth to a job: the share of failures that alarms foretell, as measured, in hours saved and lost.

Nothing is assumed of a predictor: the share, its precision and its notice come from the diary of devices (or from the
command line, to ask what one would be worth), with their 95 % intervals. The job is that of every other plan command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ._analytic import analyse
from .answers import Answer, Table
from .designs import job_from_options
from .figures import Figure
from .number_words import duration, share, significant

if TYPE_CHECKING:
    from ._model import Job

__all__ = ["prediction_answer"]

_HOURS = 720.0


def _case(name: str, told: float, true: float, with_it: float, saved_h: float, vain_h: float) -> dict[str, Any]:
    """What a predictor of this share and precision saves and costs."""
    return {
        "case": name,
        "share": told,
        "precision": true,
        "ettr": with_it,
        "saved_h": saved_h,
        "false_alarms_h": vain_h,
        "worth_h": saved_h - vain_h,
    }


def _cells(case: dict[str, Any]) -> tuple[str, ...]:
    shares = share(case["share"], 1), share(case["precision"], 1), share(case["ettr"])
    return (case["case"], *shares, *(significant(case[name]) for name in ("saved_h", "false_alarms_h", "worth_h")))


def prediction_answer(
    *,
    shares: tuple[float, float, float],
    precisions: tuple[float, float, float],
    notice_s: float,
    seen: str,
    file: str,
    profile: str,
    params: float | None,
    accelerators: int | None,
) -> Answer:
    """`shares`, `precisions`: (value, low, high). `seen`: what they rest on."""
    job, sources = job_from_options(
        file or None, profile=profile, params=params, accelerators=accelerators, topology=""
    )
    without = _ettr(job, 0.0, 1.0, notice_s)
    given = len(set(shares)) == len(set(precisions)) == 1
    names = ("as given",) if given else ("as measured", "at worst (95 %)", "at best (95 %)")
    data = []
    for name, told, true in zip(names, shares, precisions, strict=False):
        true = max(true, 1e-3)
        with_it, free = _ettr(job, told, true, notice_s), _ettr(job, told, 1.0, notice_s)
        data.append(_case(name, told, true, with_it, (free - without) * _HOURS, (free - with_it) * _HOURS))
    table = Table(
        title=f"In {_HOURS:g} hours of the whole job",
        columns=("prediction", "foretold", "true alarms", "ETTR", "saved, h", "false alarms, h", "worth, h"),
        rows=tuple(_cells(case) for case in data),
    )
    notes = (
        seen, f"An alarm comes {duration(notice_s)} before its failure; one that comes later than a save takes helps "
        "nothing.",
        "An alarm that would cost more than it saves is not acted on, as in a run: it is worth nothing then.",
        "A false alarm stops the job as a true one does, for a planned stop. A fleet of replicas that outlasts deaths "
        "anyway loses less by both: outlast prove and outlast why measure what.",
    )  # fmt: skip
    return Answer(
        title=f"{job.name}: ETTR {share(without)} without prediction", tables=(table,),
        data={"job": job.name, "ettr_without": without, "notice_s": notice_s, "rows": data}, notes=(*notes, *sources),
        figures=(_curves(job, without, max(precisions[0], 1e-3), notice_s),),
    )  # fmt: skip


def _curves(job: Job, without: float, true: float, notice_s: float) -> Figure:
    """Hours that a predictor is worth, over the share of failures that it foretells."""
    shares = [k / 10 for k in range(11)]
    each = {share(true, 1): true, "100.0 %": 1.0}
    series = tuple(
        (f"alarms {name} true", [(x, (_ettr(job, x, precision, notice_s) - without) * _HOURS) for x in shares])
        for name, precision in each.items()
    )
    return Figure(
        title="What foretelling is worth", x_label="share of failures foretold",
        y_label=f"hours saved of {_HOURS:g}", series=series,
    )  # fmt: skip


def _ettr(job: Job, told: float, true: float, notice_s: float) -> float:
    """The ETTR of the job if this share of each class's failures were foretold; classes that are foretold by their
    nature (a notice of preemption) stay so."""
    changed: dict[str, Any] = {"predicted": told, "precision": true, "notice_s": max(notice_s, 0.0)}
    classes = tuple(c if c.predicted >= 1 else msgspec.structs.replace(c, **changed) for c in job.classes)
    return analyse(msgspec.structs.replace(job, classes=classes)).chain
