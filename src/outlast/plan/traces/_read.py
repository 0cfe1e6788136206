"""Read a failure log whole: parse, pair downs with ups, count what cannot be used, and say so.

Invariant: rows read = used + skipped + problems. A log with more problems than usable rows is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from outlast.errors import ConfigError

from ._mapping import Mapping, load_mapping, preset
from ._parse import Parsed, expand_nodes, parse
from ._records import Failure, RawEvent, Trace, TraceProblem

__all__ = ["JournalReader", "read_trace", "rows_wanted", "trace_from_events", "trace_from_journal"]


class JournalReader(Protocol):
    """What this room needs of a run's journal: failures as (seconds from the start, host, kind, seconds down)."""

    def failures(self) -> Iterable[tuple[float, str, str, float | None]]: ...

    def span_s(self) -> float: ...

    def num_hosts(self) -> int: ...


def rows_wanted(pairs: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """What `--only COLUMN=VALUE`, given several times, keeps: values by column. ConfigError for no such pair."""
    found: dict[str, tuple[str, ...]] = {}
    for pair in pairs:
        column, sign, value = pair.partition("=")
        if not sign:
            raise ConfigError(f"--only {pair!r} is not COLUMN=VALUE", remedy="for example --only trace=p3")
        found[column] = (*found.get(column, ()), value)
    return found


def read_trace(
    path: str,
    *,
    preset_name: str = "",
    mapping_path: str = "",
    only: dict[str, tuple[str, ...]] | None = None,
    nodes: int = 0,
) -> Trace:
    """A trace from a file. Give a preset or a mapping TOML; `only` filters rows further, `nodes` is the true count."""
    if bool(preset_name) == bool(mapping_path):
        raise ConfigError(
            "a log needs one description of its columns", remedy="give --preset NAME or --mapping FILE.toml"
        )
    mapping = preset(preset_name) if preset_name else load_mapping(mapping_path)
    if mapping.format == "journal":
        from outlast.plan.run_journal import open_journal

        return trace_from_journal(Path(path).name, open_journal(path))
    try:
        text = Path(path).read_text(encoding="utf-8", errors="strict")
    except FileNotFoundError:
        raise ConfigError(f"no such file: {path}", remedy="give the path of a log") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"not UTF-8 text: {error.reason} at byte {error.start}", where=path, remedy="convert the log"
        ) from None
    parsed = parse(text, _narrowed(mapping, only or {}))
    if preset_name == "slurm":
        parsed = _spread(parsed)
    return trace_from_events(
        Path(path).name, parsed, nodes=nodes or mapping.nodes, hours=mapping.hours, joining=mapping.joining
    )


def _narrowed(mapping: Mapping, only: dict[str, tuple[str, ...]]) -> Mapping:
    import msgspec

    return msgspec.structs.replace(mapping, only={**mapping.only, **only}) if only else mapping


def _spread(parsed: Iterator[Parsed]) -> Iterator[Parsed]:
    """A Slurm job that failed on several nodes: the first of the list stands for it (the log does not say which)."""
    for item in parsed:
        if not isinstance(item, RawEvent):
            yield item
            continue
        try:
            first = expand_nodes(item.node)[0]
        except (ValueError, IndexError) as error:
            yield TraceProblem(row=item.row, column="NodeList", reason=str(error))
            continue
        yield RawEvent(row=item.row, time_h=item.time_h, node=first, what=item.what, kind=item.kind.split(" by ")[0])


def trace_from_events(
    name: str, parsed: Iterable[Parsed], *, nodes: int = 0, hours: float = 0.0, joining: bool = False
) -> Trace:
    """Pair each machine's downs and ups in order of time. nodes, hours: 0 means as seen."""
    events: list[RawEvent] = []
    problems: list[TraceProblem] = []
    skipped = 0
    for item in parsed:
        if item is None:
            skipped += 1
        elif isinstance(item, TraceProblem):
            problems.append(item)
        else:
            events.append(item)
    rows = len(events) + len(problems) + skipped
    if not events:
        first = f"; first problem: {problems[0]}" if problems else ""
        raise ConfigError(
            f"no usable row among {rows}{first}", where=name, remedy="check the preset or mapping against the log"
        )
    events.sort(key=lambda e: (e.time_h, e.row))  # a log in order of time keeps its order among equals
    # absolute dates start at the first row; a log that counts from its own start keeps its zero
    zero = events[0].time_h if events[0].time_h > 24 * 365 * 20 else 0.0
    failures, bad = _pair(events, zero)
    problems += bad
    if len(problems) > len(events) - len(bad):
        raise ConfigError(
            f"{len(problems)} of {rows} rows cannot be used, more than the rest; first: {problems[0]}",
            where=name,
            remedy="mend the log or the mapping",
        )
    last = max(max(e.time_h - zero, float(e.detail) - zero if e.what == "span" else 0.0) for e in events)
    seen = len({e.node for e in events})
    present = _present_h(events, zero, max(hours, last)) if joining else 0.0
    first_up = {e.node: e.time_h - zero for e in reversed(events) if e.what == "up"} if joining else {}
    guess = f"machines watched: taken as the {seen} that appear; give their number if there are more"
    notes = () if nodes or joining else (guess,)
    return Trace(
        name=name,
        hours=max(hours, last, 1e-9),
        num_nodes=max(nodes, seen),
        problems=tuple(sorted(problems, key=lambda p: p.row)),
        failures=tuple(sorted(failures, key=lambda f: (f.down_h, f.node))),
        rows_read=rows,
        rows_used=len(events) - len(bad),
        rows_skipped=skipped,
        notes=notes,
        machine_hours=present,
        joined=tuple(sorted((at_h, node) for node, at_h in first_up.items())),
    )


def _present_h(events: list[RawEvent], zero: float, end_h: float) -> float:
    """Machine-hours between each machine's ups and its downs."""
    total = 0.0
    since: dict[str, float] = {}
    for event in events:
        if event.what == "up":
            since.setdefault(event.node, event.time_h - zero)
        elif event.node in since:
            total += event.time_h - zero - since.pop(event.node)
    return total + sum(end_h - start for start in since.values())


def _pair(events: list[RawEvent], zero: float) -> tuple[list[Failure], list[TraceProblem]]:
    failures: list[Failure] = []
    problems: list[TraceProblem] = []
    down: dict[str, RawEvent] = {}
    known: set[str] = set()
    for event in events:
        at = event.time_h - zero
        if event.what == "hit":
            failures.append(Failure(down_h=at, up_h=None, node=event.node, kind=event.kind, repair_known=False))
        elif event.what == "span":
            failures.append(Failure(down_h=at, up_h=float(event.detail) - zero, node=event.node, kind=event.kind))
        elif event.what == "down":
            if event.node in down:
                since = down[event.node].time_h - zero
                problems.append(
                    TraceProblem(row=event.row, column="", reason=f"{event.node} is down already, since {since:g} h")
                )
            else:
                down[event.node] = event
        elif event.node in down:
            first = down.pop(event.node)
            failures.append(Failure(down_h=first.time_h - zero, up_h=at, node=event.node, kind=first.kind))
        elif event.node in known:
            problems.append(TraceProblem(row=event.row, column="", reason=f"{event.node} comes up but was not down"))
        known.add(event.node)  # a first "up" is a machine that joins
    for first in down.values():
        failures.append(Failure(down_h=first.time_h - zero, up_h=None, node=first.node, kind=first.kind))
    return failures, problems


def trace_from_journal(name: str, journal: JournalReader) -> Trace:
    """A trace of outlast's own run."""
    failures = tuple(
        Failure(
            down_h=at / 3600,
            node=host,
            kind=kind,
            up_h=None if back is None else (at + back) / 3600,
            repair_known=back is not None,
        )
        for at, host, kind, back in sorted(journal.failures(), key=lambda item: item[0])
    )
    hosts = max(journal.num_hosts(), len({f.node for f in failures}), 1)
    num = len(failures)
    return Trace(
        name=name,
        hours=max(journal.span_s() / 3600, 1e-9),
        num_nodes=hosts,
        failures=failures,
        rows_read=num,
        rows_used=num,
    )
