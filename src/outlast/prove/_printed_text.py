"""The numbers in what `outlast status` and `outlast why` print for people, read back from the words alone. Pure.

What is printed beside them as JSON is held against the same moment; nothing here asks how either was made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["Duration", "StatusText", "duration_of", "status_text", "text_findings"]

_FACTS = re.compile(r"^step (\d+|-)(?:, ([^,]+) ago)?, view (\d+\.\d+|-)(.*)$", re.MULTILINE)
_COST = re.compile(
    r"^([\d,]+) steps? lost, ([\d,]+) microbatch(?:es)? computed again, (.+) of downtime; useful time ([\d.]+)%$",
    re.MULTILINE,
)
_PARAGRAPH = re.compile(
    r"Lost: ([\d,]+) steps?(?:, ([\d,]+) microbatch(?:es)? computed again)?; "
    r"(?:no step was committed for (.+?)|training never waited for that)\. "
)
_COLUMNS = ("WHEN", "NOTICED BY", "AFTER", "RECOMPUTED", "DOWNTIME", "WHAT")


class Duration(NamedTuple):
    """Seconds as they were printed; rounding may have moved them by up to `off_s`."""

    seconds: float
    off_s: float

    def holds(self, seconds: float) -> bool:
        return abs(self.seconds - seconds) <= self.off_s * 1.001 + 1e-9


class StatusText(NamedTuple):
    """A printed status. `rows`: (state, step) by who; None where a dash or nothing stands."""

    state: str
    detail: str
    step: int | None
    age: Duration | None
    step_s: Duration | None
    recoveries: int
    rows: Mapping[str, tuple[str, int | None]]


def duration_of(text: str) -> Duration | None:
    """`53 ms`, `1.25 s`, `2 min 03 s`, `1 h 05 min`; None if it is none of these."""
    found = re.fullmatch(r"(?:(\d+) h )?(?:(\d+) min)?(?: ?([\d.]+) (ms|s))?", text.strip())
    if found is None or not any(found.groups()):
        return None
    hours, minutes, number, unit = found.groups()
    if hours:
        return Duration(3600.0 * int(hours) + 60.0 * int(minutes or 0), 60.5)  # what is beyond the minute is left out
    if minutes:
        return Duration(60.0 * int(minutes) + float(number or 0), 0.5)
    if unit == "ms":
        return Duration(float(number) / 1e3, 0.0005)
    digits = math.floor(math.log10(float(number))) if float(number) else 0
    return Duration(float(number), 0.5 * 10.0 ** (digits - 2))


def status_text(text: str) -> StatusText | None:
    """None where it has not the form of a status."""
    head = re.match(r"run \S+: (\w+)(?: \((.*)\))?", text)
    facts = _FACTS.search(text)
    if head is None or facts is None:
        return None
    pace = re.search(r", ([^,]+) a step", facts[4])
    many = re.search(r", recoveries (\d+)", facts[4])
    rows: dict[str, tuple[str, int | None]] = {}
    for line in text[facts.end() :].partition("\nWHO ")[2].splitlines()[1:]:
        found = re.match(r"(\S+) +(?:\S+ +)?\d+ +([a-z]+) +(?:\d+\.\d+|-) +(\d+|-)(?: |$)", line)
        if found:
            rows[found[1]] = found[2], _count(found[3])
    return StatusText(
        state=head[1],
        detail=head[2] or "",
        step=_count(facts[1]),
        age=duration_of(facts[2]) if facts[2] else None,
        step_s=duration_of(pace[1]) if pace else None,
        recoveries=int(many[1]) if many else 0,
        rows=rows,
    )


def text_findings(
    why: Mapping[str, Any], why_said: str | None, status: Mapping[str, Any], said: str | None
) -> Iterator[tuple[str, str]]:
    """Numbers of a run that is over which are one thing in JSON and another one in words. None: nobody asked."""
    if said is not None:
        yield from (("status: text", each) for each in _status_differs(status, said))
    if why_said is not None:
        yield from (("why: text", each) for each in _why_differs(why, why_said))


def _status_differs(status: Mapping[str, Any], text: str) -> Iterator[str]:
    told = status_text(text)
    if told is None:
        yield f"no status: {text[:200]!r}"
        return
    rows = {row["replica"]: (row["state"], row["step"]) for row in status["replicas"]}
    words = {name: row for name, row in told.rows.items() if name in rows}
    for name, word, number in (
        ("state", told.state, status["state"]), ("step", told.step, status["step"]),
        ("recoveries", told.recoveries, status["num_recoveries"]), ("replicas", words, rows),
    ):  # fmt: skip
        if word != number:
            yield f"{name}: {word}, and {number} in JSON"
    yield from _unlike("a step", told.step_s, status["step_s"] or None)
    yield from _unlike("age", told.age, status["step_age_s"])


def _why_differs(why: Mapping[str, Any], text: str) -> Iterator[str]:
    cost = _COST.search(text)
    if cost is None:
        yield f"no costs: {text[:200]!r}"
        return
    yield from _counts("lost", cost[1], cost[2], why)
    yield from _unlike("downtime", duration_of(cost[3]), why["downtime_s"])
    if abs(float(cost[4]) / 100 - why["ettr"]) > 0.00051:
        yield f"useful time: {cost[4]} %, and {why['ettr']} in JSON"
    if paragraph := _PARAGRAPH.search(text.partition("\n")[0] + " "):
        yield from _counts("lost, in the paragraph", paragraph[1], paragraph[2] or "0", why)
        still = duration_of(paragraph[3]) if paragraph[3] else Duration(0.0, 0.0)
        yield from _unlike("downtime, in the paragraph", still, why["downtime_s"])
    account = text.partition("\nTIME ")[2].partition("\n\n")[0]
    found = re.finditer(r"^([a-z]+) +(\S.*?) {2,}[\d.]+%$", account, re.MULTILINE)
    table = {row[1]: duration_of(row[2]) for row in found}
    for name, seconds in why["cost"].items():
        yield from _unlike(name.removesuffix("_s"), table.get(name.removesuffix("_s")), seconds)
    yield from _rows_differ(why["timeline"], text)


def _rows_differ(timeline: list[dict[str, Any]], text: str) -> Iterator[str]:
    lines = text.splitlines()
    at = next((n for n, line in enumerate(lines) if line.startswith("WHEN ")), len(lines) - 1)
    places = [lines[at].find(name) for name in _COLUMNS]
    rows = []
    for line in lines[at + 1 :]:
        if not line:
            break
        if re.match(r"\+-?\d+\.\d{3} s", line):
            rows.append([line[a:b].strip() for a, b in zip(places, [*places[1:], None], strict=True)])
    if len(rows) != len(timeline):
        yield f"{len(rows)} rows, and {len(timeline)} in JSON"
        return
    for (when, _, after, again, still, _), row in zip(rows, timeline, strict=True):
        if abs(float(when.removesuffix(" s")) - row["since_s"]) > 0.00051:
            yield f"a row at {when}, and at {row['since_s']} in JSON"
        yield from _unlike(f"detection at {when}", duration_of(after), row["detect_s"])
        yield from _unlike(f"downtime at {when}", duration_of(still), row["downtime_s"])
        if _count(again or "-") != row["microbatches_recomputed"]:
            yield f"recomputed at {when}: {again}, and {row['microbatches_recomputed']} in JSON"


def _counts(name: str, steps: str, again: str, why: Mapping[str, Any]) -> Iterator[str]:
    told = _count(steps), _count(again)
    if told != (why["lost_steps"], why["microbatches_recomputed"]):
        yield f"{name}: {told}, and {why['lost_steps'], why['microbatches_recomputed']} in JSON"


def _unlike(name: str, told: Duration | None, seconds: float | None) -> Iterator[str]:
    if (told is None) != (seconds is None) or (told is not None and not told.holds(seconds or 0.0)):
        yield f"{name}: {told.seconds if told else None} s, and {seconds} in JSON"


def _count(text: str) -> int | None:
    return None if text == "-" else int(text.replace(",", ""))
