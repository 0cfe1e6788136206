"""A run in the parts that the page is made of, each as JSON of its own.

Role: the shape of what goes over the wire, from the records of `outlast.observe`. Pure. A part is sent again only when
it has changed, so what changes often (`head`) is small, and what is large (`members`, `marks`) changes seldom. Curves
are large and change with every step, but at their end: of them the rows that changed are sent.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from outlast.observe.checkpoint_words import describe
from outlast.observe.page_picture import PageRow, RunFold
from outlast.observe.status_records import Process, Status
from outlast.observe.step_anatomy import Anatomy
from outlast.observe.timeline_rows import row_of

__all__ = ["CurveParts", "chosen", "head_part", "marks_part", "members_part", "row_data", "story_part"]

_BINS = 400
_LEVELS = {"info": 0, "warning": 1, "error": 2}
_CODES = {
    "training": "t", "forming": "f", "starting": "s", "joining": "j", "spare": "p", "stalled": "q", "suspected": "u",
    "leaving": "l", "ending": "e", "exited": "x", "ended": "o",
}  # fmt: skip
_NUM_SUSPECTS = 50
_NUM_MEMBERS = 32


def head_part(fold: RunFold, state: Status, now_s: float | None, share_read: float) -> dict[str, object]:
    """What changes all the time: the state in figures, the headline, the accounts and the clocks."""
    cost = fold.accounting(state, now_s)
    recovery = state.last_recovery
    return {
        "status": {
            name: getattr(state, name)
            for name in Status.__struct_fields__
            if name not in {"replicas", "agents", "coordinator", "last_recovery", "last_verdict", "last_save"}
        },
        "command": fold.started.command if fold.started else [],
        "ranks": fold.started.config.get("ranks", 1) if fold.started else 1,
        "coordinator": state.coordinator,
        "last_recovery": row_of(recovery, state.started_at_s or 0.0) if recovery else None,
        "last_save": state.last_save,
        "headline": fold.headline(state, now_s),
        "cost": cost,
        "ettr": cost.ettr,
        "ettr_95": fold.history.accounts.useful(cost).ettr_95,
        "clocks": fold.clocks(state, now_s),
        "num_saves": fold.num_saves,
        "num_rows": len(fold.rows),
        "share_read": share_read,
    }


def members_part(state: Status) -> dict[str, object]:
    """Everybody, under the agent that supervises them: name, state, process, detail. What a member's step is follows
    from its state: in the view, the run's; so does for how long a member of a stalled run is silent."""
    hosts: dict[str, list[list[object]]] = {agent.name: [] for agent in state.agents}
    for r in state.replicas:
        step = None if r.state in {"training", "stalled", "suspected", "ending"} else r.step
        detail = "" if r.state == "stalled" else r.detail
        hosts.setdefault(r.agent, []).append([r.replica, _CODES[r.state], r.pid, step, detail])
    known = {agent.name: agent for agent in state.agents}
    lost = {agent.name: agent.detail or "lost" for agent in state.agents if agent.state == "lost"}
    return {
        "codes": {code: name for name, code in _CODES.items()},
        "counts": Counter(replica.state for replica in state.replicas),
        "hosts": [
            {"agent": name, "lost": lost.get(name), "members": them, **_place(known.get(name))}
            for name, them in hosts.items()
        ],
    }


def _place(agent: Process | None) -> dict[str, object]:
    """Where an agent is, in a run on several hosts."""
    return {"host": agent.host, "address": agent.address, "slots": agent.slots} if agent is not None else {}


class CurveParts:
    """Loss over steps, steps and uses over time, as rows from the row `first` on: of the whole part that is 0. Each row
    is made into JSON when it has changed and not again, so that a part costs what is new of it."""

    def __init__(self) -> None:
        self._rows: dict[str, list[bytes]] = {"losses": [], "times": []}

    def take(self, fold: RunFold) -> tuple[dict[str, object], dict[str, object]]:
        """Return the part, and what makes it of the part that was returned before."""
        whole: dict[str, object] = {}
        news: dict[str, object] = {}
        for name, curve in (("losses", fold.history.losses), ("times", fold.history.times)):
            first, changed = curve.news()
            rows = self._rows[name]
            rows[first:] = map(msgspec.json.encode, changed)
            whole[name] = {**curve.head, "first": 0, "rows": _listed(rows)}
            news[name] = {**curve.head, "first": first, "rows": _listed(rows[first:])}
        return whole, news


def _listed(rows: list[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(rows) + b"]")


def marks_part(fold: RunFold) -> dict[str, object]:
    """All rows as marks in at most a few hundred columns: [column, category, count, worst level]."""
    end_s = max((page.row.since_s for page in fold.rows), default=0.0)
    width_s = max(end_s, 1e-9) / _BINS
    cells: dict[tuple[int, str], list[int]] = {}
    for page in fold.rows:
        column = min(_BINS - 1, int(max(0.0, page.row.since_s) / width_s))
        cell = cells.setdefault((column, page.category), [0, 0])
        cell[0] += 1
        cell[1] = max(cell[1], _LEVELS[page.row.level])
    marks = [[column, category, *cell] for (column, category), cell in sorted(cells.items())]
    return {"end_s": end_s, "bins": _BINS, "marks": marks, "rows": len(fold.rows)}


def story_part(fold: RunFold, state: Status, now_s: float | None) -> dict[str, object]:
    """What it came to, what helps, the ladder of checkpoints, audits and suspects."""
    story = fold.why(state, now_s)
    return {
        "num_recoveries": story.num_recoveries,
        "lost_steps": story.lost_steps,
        "downtime_s": story.downtime_s,
        "microbatches_recomputed": story.microbatches_recomputed,
        "advice": story.advice,
        "anatomy": _shown_anatomy(story.anatomy),
        "alarms": story.alarms,
        "device_rows": [row_data(page) for page in fold.device_rows[-_NUM_SUSPECTS:][::-1]],
        "generations": list(fold.generations.values())[::-1],
        "failed_save": describe(state.failed_save) if state.failed_save else None,
        "num_failed_saves": state.num_failed_saves,
        "certified_step": state.certified_step,
        "num_audit_mismatches": state.num_audit_mismatches,
        "suspects": [row_data(page) for page in fold.suspects[-_NUM_SUSPECTS:][::-1]],
    }


def _shown_anatomy(anatomy: Anatomy) -> Anatomy:
    """The anatomy with those members alone that compute longest, in the order of their slots."""
    longest = sorted(anatomy.members, key=lambda member: -member.own_s)[:_NUM_MEMBERS]
    chosen = {member.replica for member in longest}
    kept = [member for member in anatomy.members if member.replica in chosen]
    return msgspec.structs.replace(anatomy, members=kept)


def row_data(page: PageRow) -> dict[str, object]:
    """One row as the page has it."""
    return {**msgspec.structs.asdict(page.row), "category": page.category, "step": page.step}


def chosen(fold: RunFold, wanted: str) -> list[PageRow]:
    """The rows of a choice: `story` (what `outlast why` tells, and the checkpoints), `all`, or one category."""
    if wanted == "all":
        return fold.rows
    if wanted != "story":
        return [page for page in fold.rows if page.category == wanted]
    told = {(row.at_s, row.kind, row.what) for row in fold.story_rows()}
    rows = {
        (page.row.at_s, page.row.kind, page.row.what): page for page in fold.rows if page.story or _told(page, told)
    }
    extra = [
        PageRow(row=row, category="run", step=None, story=True)
        for row in fold.story_rows()
        if (row.at_s, row.kind, row.what) not in rows
    ]
    return sorted([*rows.values(), *extra], key=lambda page: page.row.at_s)


def _told(page: PageRow, told: set[tuple[float, str, str]]) -> bool:
    return page.row.kind == "checkpoint_saved" or (page.row.at_s, page.row.kind, page.row.what) in told
