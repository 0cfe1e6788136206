"""Rows of a log as raw events or problems, one function a format. Reads only the text or file it is handed.

Invariant: every row gives exactly one of: a RawEvent, a Problem, or None (skipped by the mapping's own filter).
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from outlast.errors import ConfigError

from ._mapping import Mapping
from ._records import RawEvent, TraceProblem

__all__ = ["Parsed", "expand_nodes", "parse"]

Parsed = RawEvent | TraceProblem | None


def parse(text: str, mapping: Mapping) -> Iterator[Parsed]:
    """The rows of a log in `mapping.format`."""
    readers = {"csv": _csv, "jsonl": _jsonl, "k8s": _k8s, "xid": _xid, "philly": _philly}
    if mapping.format not in readers:
        raise ConfigError(f"{mapping.format} is not read from text", remedy="give the run's directory or SQLite file")
    return readers[mapping.format](text, mapping)


def _csv(text: str, mapping: Mapping) -> Iterator[Parsed]:
    reader = csv.DictReader(io.StringIO(text), mapping.columns or None, delimiter=mapping.delimiter)
    header = reader.fieldnames or []
    wanted = [mapping.time, mapping.node, *filter(None, (mapping.event, mapping.end)), *mapping.kind, *mapping.only]
    missing = [name for name in wanted if name not in header]
    if missing:
        raise ConfigError(
            f"no column {missing[0]!r} in the header",
            where=f"columns: {', '.join(header) or 'none'}",
            remedy="name the log's own columns in the mapping, or choose another preset",
        )
    for number, row in enumerate(reader, 1 if mapping.columns else 2):
        yield from _row(number, {k: v for k, v in row.items() if k is not None}, mapping)


def _jsonl(text: str, mapping: Mapping) -> Iterator[Parsed]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            yield TraceProblem(row=number, column="", reason=f"not JSON: {error.msg}")
            continue
        if not isinstance(data, dict):
            yield TraceProblem(row=number, column="", reason="not a JSON object")
            continue
        yield from _row(number, data, mapping)


def _get(row: dict[str, Any], name: str) -> Any:
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _time_h(value: Any, mapping: Mapping) -> float:
    """Hours; ISO dates count from 1970 and are shifted to the first row later. ValueError says what is wrong."""
    if value is None or value == "":
        raise ValueError("is empty")
    if mapping.unit == "iso":
        text = str(value).replace("Z", "+00:00")
        try:
            return _hours_of(datetime.fromisoformat(text))
        except ValueError:
            raise ValueError(f"{value!r} is not an ISO 8601 time") from None
    if "%" in mapping.unit:
        try:
            return _hours_of(datetime.strptime(str(value), mapping.unit))
        except ValueError:
            raise ValueError(f"{value!r} is not a time as {mapping.unit}") from None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not a number") from None
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{value!r} is not a time: it must be zero or more")
    return number * mapping.hours_per_unit


def _hours_of(moment: datetime) -> float:
    """Since 1970; a time without a zone is taken as UTC."""
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() / 3600


def _row(number: int, row: dict[str, Any], mapping: Mapping) -> Iterator[Parsed]:
    for column, values in mapping.only.items():
        if not _is_one_of(str(_get(row, column) or ""), values):
            yield None
            return
    try:
        time_h = _time_h(_get(row, mapping.time), mapping)
    except ValueError as error:
        yield TraceProblem(row=number, column=mapping.time, reason=str(error))
        return
    node = str(_get(row, mapping.node) or "").strip()
    if not node or node in {"None assigned", "Unknown"}:
        yield TraceProblem(row=number, column=mapping.node, reason="names no machine")
        return
    kind = " / ".join(_kinds(row, mapping.kind)) or "failure"
    what = "hit"
    if mapping.event:
        value = str(_get(row, mapping.event) or "")
        what = "down" if value in mapping.down else "up" if value in mapping.up else ""
        if not what:
            reason = f"{value!r} is neither down ({', '.join(mapping.down)}) nor up ({', '.join(mapping.up)})"
            yield TraceProblem(row=number, column=mapping.event, reason=reason)
            return
    yield from _finish(number, row, mapping, RawEvent(row=number, time_h=time_h, node=node, what=what, kind=kind))


def _is_one_of(said: str, values: tuple[str, ...]) -> bool:
    """Or begins with one as a word of its own: `FAILED by 1000` is FAILED, and system 20 is not system 2."""
    return any(said.startswith(value) and not said[len(value) :][:1].isalnum() for value in values)


def _kinds(row: dict[str, Any], columns: tuple[str, ...]) -> list[str]:
    """What the columns say; of several, those that are empty say nothing."""
    said = [str(value) for value in (_get(row, name) for name in columns) if value not in (None, "")]
    return said or (["unknown"] if columns else [])


def _finish(number: int, row: dict[str, Any], mapping: Mapping, event: RawEvent) -> Iterator[Parsed]:
    if not mapping.end:
        yield event
        return
    value = _get(row, mapping.end)
    if value in (None, ""):  # still down
        yield RawEvent(row=number, time_h=event.time_h, node=event.node, what="down", kind=event.kind)
        return
    try:
        end_h = _time_h(value, mapping)
    except ValueError as error:
        yield TraceProblem(row=number, column=mapping.end, reason=str(error))
        return
    if end_h < event.time_h:
        yield TraceProblem(row=number, column=mapping.end, reason="ends before it starts")
        return
    yield RawEvent(row=number, time_h=event.time_h, node=event.node, what="span", kind=event.kind, detail=repr(end_h))


# a node condition that means the machine is gone, and the one that means it is back
_K8S_DOWN = {"NodeNotReady", "KubeletNotReady", "NodeNotSchedulable", "Shutdown"}
_K8S_UP = {"NodeReady", "Starting", "NodeSchedulable"}
_K8S_HIT = {
    "OOMKilling",
    "SystemOOM",
    "Evicted",
    "TaintManagerEviction",
    "Preempted",
    "FailedMount",
    "BackOff",
    "KernelDeadlock",
}


def _k8s(text: str, mapping: Mapping) -> Iterator[Parsed]:
    """An EventList (kubectl -o json) or one event a line."""
    try:
        whole = json.loads(text)
        items = whole.get("items", [whole]) if isinstance(whole, dict) else whole
    except json.JSONDecodeError:
        items = None
    if items is None:
        lines = [line for line in text.splitlines() if line.strip()]
        for number, line in enumerate(lines, 1):
            try:
                yield from _k8s_item(number, json.loads(line), mapping)
            except json.JSONDecodeError as error:
                yield TraceProblem(row=number, column="", reason=f"not JSON: {error.msg}")
        return
    for number, item in enumerate(items, 1):
        yield from _k8s_item(number, item, mapping)


def _k8s_item(number: int, item: Any, mapping: Mapping) -> Iterator[Parsed]:
    if not isinstance(item, dict):
        yield TraceProblem(row=number, column="", reason="not an event object")
        return
    reason = str(item.get("reason") or "")
    if reason not in _K8S_DOWN | _K8S_UP | _K8S_HIT:
        yield None
        return
    on_node = _get(item, "involvedObject.kind") == "Node"
    node = (
        _get(item, "involvedObject.name") if on_node else _get(item, "source.host") or _get(item, "reportingInstance")
    )
    moment = item.get(mapping.time) or item.get("eventTime") or item.get("firstTimestamp")
    try:
        time_h = _time_h(moment, mapping)
    except ValueError as error:
        yield TraceProblem(row=number, column=mapping.time, reason=str(error))
        return
    if not node:
        yield TraceProblem(row=number, column="source.host", reason="names no machine")
        return
    what = "down" if reason in _K8S_DOWN else "up" if reason in _K8S_UP else "hit"
    yield RawEvent(row=number, time_h=time_h, node=str(node), what=what, kind=reason)


def _philly(text: str, mapping: Mapping) -> Iterator[Parsed]:
    """A list of jobs; each of their attempts is a row. One that another followed has failed, and the last one of a job
    that did; the first machine of several stands for them (the log does not say which)."""
    try:
        jobs = msgspec.json.decode(text, type=list[_PhillyJob])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"no list of jobs: {error}", remedy="give cluster_job_log as it was published") from None
    rows = (
        (attempt, number < len(job.attempts) or job.status == "Failed")
        for job in jobs
        for number, attempt in enumerate(job.attempts, 1)
    )
    for number, (attempt, failed) in enumerate(rows, 1):
        machine = attempt.detail[0].ip if attempt.detail else ""
        found = _row(number, {"end_time": attempt.end_time, "ip": machine}, mapping)
        yield from found if failed else [None]


class _PhillyMachine(msgspec.Struct):
    ip: str


class _PhillyAttempt(msgspec.Struct):
    end_time: str | None = None
    detail: list[_PhillyMachine] = []


class _PhillyJob(msgspec.Struct):
    status: str
    attempts: list[_PhillyAttempt] = []


_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<device>[0-9a-fA-F:.]+)\): (?P<code>\d+)")
_STAMP = re.compile(
    r"^(?:\[\s*(?P<seconds>\d+\.\d+)\]|\[(?P<ctime>\w{3} \w{3}\s+\d+ [\d:]+ \d{4})\]"
    r"|(?P<iso>\d{4}-\d\d-\d\dT[\d:.,]+(?:Z|[+-]\d\d:?\d\d)?))"
    r"\s*(?:(?P<host>[\w.-]+)\s+kernel:)?"
)
# NVIDIA's XID catalogue: what the common codes mean, in a word or two
XID_NAMES = {
    "13": "graphics exception", "31": "MMU fault", "43": "stopped processing", "45": "preemptive cleanup",
    "48": "double-bit ECC", "61": "microcontroller breakpoint", "62": "microcontroller halt", "63": "row remapping",
    "64": "row remapping failure", "68": "video processor exception", "74": "NVLink error", "79": "fallen off the bus",
    "92": "high single-bit ECC rate", "94": "contained ECC error", "95": "uncontained ECC error",
    "119": "GSP timeout", "120": "GSP error",
}  # fmt: skip


def _xid(text: str, mapping: Mapping) -> Iterator[Parsed]:
    """Kernel log lines; the ones without an XID are skipped, those without a time are problems."""
    for number, line in enumerate(text.splitlines(), 1):
        found = _XID.search(line)
        if not found:
            if line.strip():
                yield None
            continue
        stamp = _STAMP.match(line)
        if not stamp:
            yield TraceProblem(row=number, column="time", reason="no time at the start of the line")
            continue
        code = found["code"]
        kind = f"xid {code}" + (f" {XID_NAMES[code]}" if code in XID_NAMES else "")
        node = stamp["host"] or "this host"
        yield RawEvent(row=number, time_h=_stamp_h(stamp), node=node, what="hit", kind=kind, detail=found["device"])


def _stamp_h(stamp: re.Match[str]) -> float:
    if stamp["seconds"]:
        return float(stamp["seconds"]) / 3600
    if stamp["ctime"]:
        return datetime.strptime(stamp["ctime"], "%a %b %d %H:%M:%S %Y").replace(tzinfo=UTC).timestamp() / 3600
    text = re.sub(r"([+-]\d\d)(\d\d)$", r"\1:\2", stamp["iso"].replace(",", ".").replace("Z", "+00:00"))
    return _hours_of(datetime.fromisoformat(text))


def expand_nodes(text: str) -> list[str]:
    """Slurm's compressed host lists: `a[1-3,07],b` is a1 a2 a3 a07 b (zero padding kept). ValueError if malformed."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text + ","):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if depth:
        raise ValueError(f"unbalanced brackets in {text!r}")
    names: list[str] = []
    for part in filter(None, parts):
        match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]+)\]([^\[\]]*)", part)
        if not match:
            names.append(part)
            continue
        for piece in match[2].split(","):
            low, _, high = piece.partition("-")
            if not low.isdigit() or (high and not high.isdigit()):
                raise ValueError(f"{piece!r} is not a range")
            names += [f"{match[1]}{n:0{len(low)}d}{match[3]}" for n in range(int(low), int(high or low) + 1)]
    return names
