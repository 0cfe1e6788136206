"""Status, timeline and story as plain text for a terminal or a log.

Role: columns and words from records. Pure, and without rich, so that `outlast status` and `why` answer at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outlast.observe._curve import sparkline
from outlast.observe.checkpoint_words import last_save
from outlast.observe.rounding import counted, format_number, format_s, format_share

if TYPE_CHECKING:  # a status needs no word of a story, and is not to wait until one can be told
    from outlast.observe._accounting import Accounting
    from outlast.observe._clocks import Clock
    from outlast.observe._why import Why
    from outlast.observe.status_records import Process, ReplicaStatus, Status
    from outlast.observe.step_anatomy import Anatomy
    from outlast.observe.timeline_rows import Row

__all__ = [
    "render_accounting", "render_anatomy", "render_clocks", "render_losses", "render_people", "render_run",
    "render_status", "render_timeline", "render_why", "table",
]  # fmt: skip


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two spaces apart; the last is as long as it likes."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows))
    return "\n".join(line.rstrip() for line in lines)


def render_status(state: Status, *, curve: Sequence[float] = ()) -> str:
    """The whole status; `curve`: losses to draw in one line."""
    return "\n".join([render_run(state), *render_losses(curve), "", render_people(state)])


def render_run(state: Status) -> str:
    """What a status begins with: the run as a whole, without its losses and who is in it."""
    lines = [f"run {state.run_id or '?'}: {state.state}" + (f" ({state.detail})" if state.detail else "")]
    age = f", {format_s(state.step_age_s)} ago" if state.step_age_s is not None else ""
    facts = [f"step {_or_dash(state.step)}{age}", f"view {_view(state.view)}"]
    facts += [f"{format_s(state.step_s)} a step"] if state.step_s else []
    facts += [f"loss {format_number(state.loss)}"] if state.loss is not None else []
    facts += [f"recoveries {state.num_recoveries}"]
    facts += [f"audit mismatches {state.num_audit_mismatches}"] if state.num_audit_mismatches else []
    facts += [f"certified {state.certified_step}"] if state.certified_step is not None else []
    facts += [f"guards' verdicts {state.num_verdicts}"] if state.num_verdicts else []
    lines += [", ".join(facts)]
    if state.last_verdict is not None:
        from outlast.observe.timeline_rows import row_of

        lines += [f"last verdict: {row_of(state.last_verdict, 0.0).what}"]
    save = last_save(state)
    lines += [save] if save else []
    return "\n".join(lines)


def render_losses(curve: Sequence[float]) -> list[str]:
    """One line that draws losses; none where there is nothing to draw."""
    return [f"loss {sparkline(curve)}"] if curve else []


def render_people(state: Status) -> str:
    """Coordinator, agents and replicas, a line each."""
    people = [state.coordinator, *state.agents] if state.coordinator else state.agents
    rows = [_process_cells(process) for process in people] + [_replica_cells(replica) for replica in state.replicas]
    head: tuple[str, ...] = ("WHO", "PID", "STATE", "VIEW", "STEP", "")
    if any(agent.host for agent in state.agents):  # several hosts: who is where
        host_of = {agent.name: agent.host for agent in state.agents}
        hosts = [host_of.get(process.name, "") for process in people]
        hosts += [host_of.get(replica.agent, "") for replica in state.replicas]
        rows = [(row[0], host, *row[1:]) for row, host in zip(rows, hosts, strict=True)]
        head = ("WHO", "HOST", *head[1:])
    return table(head, rows)


def render_timeline(rows: Sequence[Row]) -> str:
    """One line a row: when, what, who noticed, how fast, what was computed again, how long nobody trained."""
    cells = [
        (
            f"+{row.since_s:.3f} s",
            row.noticed_by or "",
            _seconds(row.detect_s),
            "" if row.microbatches_recomputed is None else str(row.microbatches_recomputed),
            _seconds(row.downtime_s),
            {"info": "", "warning": "! ", "error": "!! "}[row.level] + row.what,
        )
        for row in rows
    ]
    return table(("WHEN", "NOTICED BY", "AFTER", "RECOMPUTED", "DOWNTIME", "WHAT"), cells)


def render_accounting(account: Accounting) -> str:
    """The identity as a table, largest part first."""
    parts = {name: value for name, value in account.seconds().items() if name != "wall"}
    wall, largest_first = account.wall_s or 1.0, sorted(parts.items(), key=lambda part: -part[1])
    rows = [(name, format_s(value), format_share(value / wall)) for name, value in largest_first]
    return table(("TIME", "SECONDS", "SHARE"), [*rows, ("wall", format_s(account.wall_s), "100.0%")])


def render_clocks(clocks: Sequence[Clock]) -> str:
    """The three clocks as a table."""
    rows = [
        (
            clock.name,
            f"{clock.count:,}",
            "-" if clock.mean_s is None else format_s(clock.mean_s),
            f"{format_s(clock.low_s)} to {'no bound' if clock.high_s is None else format_s(clock.high_s)}",
            clock.meaning,
        )
        for clock in clocks
    ]
    return table(("CLOCK", "SEEN", "MEAN TIME BETWEEN", "95 % INTERVAL", "WHAT IT COUNTS"), rows)


_MOST_MEMBERS = 16


def render_anatomy(anatomy: Anatomy) -> list[str]:
    """A member's mean step by what it spends it on; of many members those that compute longest."""
    shown = anatomy.members
    if len(shown) > _MOST_MEMBERS:
        longest = sorted(shown, key=lambda member: -member.own_s)[:_MOST_MEMBERS]
        shown = [member for member in shown if member in longest]
    if not shown:
        return []
    rows = [
        (
            member.replica,
            f"{member.steps:,}",
            f"{member.microbatches:g}",
            *(format_s(seconds) for seconds in (member.load_s, member.compute_s, member.exchange_s, member.wait_s)),
            member.waits_for,
        )
        for member in shown
    ]
    hidden = len(anatomy.members) - len(shown)
    lines = ["", f"A step, by member{f' (those that compute longest; {hidden:,} more)' if hidden else ''}"]
    lines += [table(("MEMBER", "STEPS", "SHARE", "LOAD", "COMPUTE", "EXCHANGE", "WAIT", "MOST FOR"), rows)]
    return lines + [f"- {said}" for said in anatomy.said]


def render_why(story: Why) -> str:
    """The story: what happened, what it cost, what to do next."""
    parts = [story.headline, "", "What happened", render_timeline(story.timeline), "", "What it cost"]
    parts += [
        f"{counted(story.lost_steps, 'step')} lost, "
        f"{counted(story.microbatches_recomputed, 'microbatch', 'microbatches')} computed again, "
        f"{format_s(story.downtime_s)} of downtime; useful time {format_share(story.ettr)}",
        render_accounting(story.cost),
        *(["", render_clocks(story.clocks)] if story.clocks else []),
        *(["", f"Alarms: {story.alarms}."] if story.alarms else []),
        *render_anatomy(story.anatomy),
        "",
        "What to do next",
    ]
    parts += [f"- {a.cause} ({a.count}x: {', '.join(a.who)}): {a.remedy}" for a in story.advice]
    return "\n".join(parts if story.advice else [*parts, "Nothing: no fault is on record."])


def _process_cells(process: Process) -> tuple[str, ...]:
    return (
        process.name,
        str(process.pid),
        process.state,
        _view(process.view),
        _or_dash(process.step),
        ", ".join(part for part in (_place(process), process.detail) if part),
    )


def _place(process: Process) -> str:
    slots = "" if not process.slots else f", {process.slots} slot{'s' * (process.slots != 1)}"
    return f"at {process.address}{slots}" if process.address else ""


def _replica_cells(replica: ReplicaStatus) -> tuple[str, ...]:
    return (
        replica.replica,
        str(replica.pid),
        replica.state,
        _view(replica.view),
        _or_dash(replica.step),
        replica.detail,
    )


def _view(view: tuple[int, int] | None) -> str:
    return "-" if view is None else f"{view[0]}.{view[1]}"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _seconds(value: float | None) -> str:
    return "" if value is None else format_s(value)
