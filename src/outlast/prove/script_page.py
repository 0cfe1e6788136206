"""A campaign on a script as one HTML page that needs nothing else, and as JUnit XML for a build server. Pure."""

from __future__ import annotations

import html
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from xml.sax import saxutils

import msgspec

from outlast.plan.replay_comparison import ReplayComparison
from outlast.prove.script_figures import CountGrid
from outlast.prove.script_report import ProofReport, command_of

__all__ = ["junit_of", "page_of"]

_WORDS = {
    "held": ("It held.", "Every struck run ended with the bits of the undisturbed one, or was truly lost."),
    "script": (
        "The script itself cannot be repeated.",
        "Two runs to which nothing was done differ; none was struck.",
    ),
    "failed": ("Something did not hold.", "Not every struck run ended as it should. Each that did not is told below."),
    "nothing": ("Nothing was shown.", "No run was struck."),
}
_STYLE = """
:root { color-scheme: light dark; --ink: #1a1d21; --soft: #5c6570; --line: #d9dee3; --page: #fff; --good: #1b7f4b;
  --bad: #b3261e; --bar: #4a7fb5; --panel: #f5f7f9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #9aa4ae; --line: #353c44; --page: #15181b;
  --good: #5cc98f; --bad: #ff8a80; --bar: #7fb2e5; --panel: #1d2125; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 64rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top }
th { color: var(--soft); font-weight: 600 } td.n, th.n { text-align: right }
code, pre { font: 13px/1.45 ui-monospace, monospace; background: var(--panel); border-radius: 4px }
pre { padding: .7rem; white-space: pre-wrap; overflow-wrap: anywhere } code { padding: .1rem .25rem;
  overflow-wrap: anywhere }
.held { color: var(--good) } .failed, .script, .wrong { color: var(--bad) } .soft { color: var(--soft) }
.grid td[style] { background: color-mix(in srgb, var(--bar) var(--heat), transparent) }
th.v { vertical-align: bottom; padding: .3rem } th.v span { writing-mode: vertical-rl; transform: rotate(180deg) }
.wide { overflow-x: auto } rect { fill: var(--bar) } text { fill: var(--soft); font-size: 11px }
"""


def page_of(report: ProofReport) -> str:
    """The page. It loads nothing and runs no script; the record that it was made from is in it."""
    title, sentence = _WORDS[report.verdict]
    parts = [
        f"<h1 class='{report.verdict}'>{title}</h1><p>{sentence}</p>",
        _what_was_run(report),
        _list("What is wrong in the script", [f"{f.check}: {f.detail}" for f in report.script_faults]),
        _failures(report),
        _coverage(report),
        _grid("Strikes from outside, by what the run was doing", "strike", report.moments),
        _grid("Faults from inside, by the phase of a step", "fault", report.phases),
        _downtimes(report.downtimes_s),
        _spreads(report),
        _foreseen(report),
        *(_replayed(result.replayed) for result in report.results if result.replayed is not None),
        _runs(report),
        _list("Numbers of status and why that were not so", report.numbers),
        _list("Worth a look", report.notes),
        _not_tested(report),
    ]
    record = json.dumps(msgspec.to_builtins(report)).replace("<", "\\u003c")
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' "
        f"content='width=device-width'><title>outlast prove: {_text(' '.join(report.script))}</title>"
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}"
        f"<script type='application/json' id='record'>{record}</script></body></html>\n"
    )


def _what_was_run(report: ProofReport) -> str:
    shape = report.shape
    rows = [
        ("script", f"<code>{_text(' '.join(report.script))}</code>"),
        ("undisturbed", f"{report.steps} steps of {report.microbatches} microbatches in {shape.length_s:.1f} s"),
        ("fleet", f"{shape.replicas} replicas, {shape.spares} spares"),
        ("runs", f"{report.runs}: {report.same_bits} with the same bits, {report.fleet_lost} truly lost, "
                 f"{report.wrong} wrong"),
        ("strikes", f"{report.strikes}"),
        ("ends with", f"<code>{_text(report.fingerprint)}</code>"),
        ("seed", f"{report.seed}"),
    ]  # fmt: skip
    return "<table>" + "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows) + "</table>"


def _failures(report: ProofReport) -> str:
    parts = []
    for failure in report.failures:
        rows = "".join(f"<li><b>{_text(f.check)}</b>: {_text(f.detail)}</li>" for f in failure.findings)
        how = "The shortest schedule that still failed" if failure.shrunk else "Strike it the same way again"
        parts.append(
            f"<h3 class='wrong'>Run {failure.number}</h3><ul>{rows}</ul><p>{how}:</p>"
            f"<pre>{_text(failure.command)}</pre>"
        )
    return f"<h2>What failed</h2>{''.join(parts)}" if parts else ""


def _coverage(report: ProofReport) -> str:
    head = ("strike", "at", "number", "same bits", "truly lost", "wrong")
    rows = [(r.kind, r.target, r.strikes, r.same_bits, r.fleet_lost, r.wrong) for r in report.table]
    return f"<h2>What was tested, and how often</h2>{_table(head, rows, 2)}" if rows else ""


def _grid(title: str, what: str, grid: CountGrid) -> str:
    """Counts as a heat map: the darker a cell, the more often; none is told by a dash."""
    most = max((count for row in grid.counts for count in row), default=0)
    if not most:
        return ""
    head = "".join(f"<th class=v><span>{_text(name)}</span></th>" for name in grid.columns)
    rows = []
    for name, counts in zip(grid.rows, grid.counts, strict=True):
        cells = "".join(
            f"<td class=n style='--heat:{round(12 + 58 * count / most)}%'>{count}</td>"
            if count
            else "<td class=n>-</td>"
            for count in counts
        )
        rows.append(f"<tr><th>{_text(name)}</th>{cells}<td class=n>{sum(counts)}</td></tr>")
    body = f"<tr><th>{what}</th>{head}<th class=n>all</th></tr>{''.join(rows)}"
    return f"<h2>{title}</h2><div class='wide'><table class=grid>{body}</table></div>"


def _spreads(report: ProofReport) -> str:
    head = ("", "cause", "faults", "least, s", "median, s", "95 %, s", "longest, s")
    rows = [
        (r.what, r.cause, r.count, *(f"{s:.3f}" for s in (r.least_s, r.middle_s, r.most_of_95_s, r.longest_s)))
        for r in report.spreads
    ]
    return f"<h2>How long, by cause</h2>{_table(head, rows, 2)}" if rows else ""


def _foreseen(report: ProofReport) -> str:
    found = report.foreseen
    if found is None:
        return ""
    off = 100.0 * (found.predicted - found.observed)
    return (
        "<h2>Predicted beside observed</h2><p>Useful time, as a share of all: "
        f"<b>{100 * found.predicted:.1f} %</b> predicted for the {found.held_against} runs with odd numbers, from what "
        f"faults cost in the {found.learnt_from} with even ones; <b>{100 * found.observed:.1f} %</b> observed "
        f"({off:+.1f} points).</p>"
    )


def _replayed(found: ReplayComparison) -> str:
    """A trace's useful time beside the plan's, account by account."""
    rows = [
        (name, f"{100 * seen:.1f} %", f"{100 * found.predicted_shares.get(name, 0.0):.1f} %")
        for name, seen in found.measured_shares.items()
    ]
    return (
        f"<h2>Beside the plan</h2><p>Useful time of {found.seconds:.1f} s: <b>{100 * found.measured:.1f} %</b> "
        f"measured, <b>{100 * found.predicted:.1f} %</b> by outlast plan for the same {found.outages} outages at what "
        f"they cost this run: {found.points:+.1f} points, {100 * found.apart:+.1f} %, "
        f"{'' if found.within else 'not '}within "
        f"{100 * found.bound:g} %.</p>{_table(('account', 'run', 'plan'), rows, 1)}"
    )


def _runs(report: ProofReport) -> str:
    head = ("run", "end", "strikes", "seconds", "longest wait, s", "to strike it the same way again")
    rows = [
        (
            r.number,
            r.outcome,
            len(r.done) + len(r.phases),
            f"{r.seconds:.1f}",
            f"{r.longest_s:.1f}",
            command_of(report.script, r, report.shape),
        )
        for r in report.results
    ]
    return f"<h2>Each run</h2>{_table(head, rows, 2, code=5)}" if rows else ""


def _not_tested(report: ProofReport) -> str:
    rows = [(what, why) for what, why in report.untested]
    return f"<h2>What was not tested, and why</h2>{_table(('fault', 'why not'), rows, 9)}" if rows else ""


def _downtimes(seconds: Sequence[float]) -> str:
    """A histogram whose classes double in width, as downtimes spread over orders of magnitude."""
    if not seconds:
        return ""
    edges = [0.0, *(0.01 * 2**power for power in range(14))]
    counts = [sum(low <= each < high for each in seconds) for low, high in itertools.pairwise(edges)]
    counts.append(sum(each >= edges[-1] for each in seconds))
    last = max(index for index, count in enumerate(counts) if count)
    bars, width, most = [], 44, max(counts)
    for index in range(last + 1):
        tall, left = 72 * counts[index] / most, 4 + index * width
        label = f"{edges[index]:.2g}"
        bars.append(
            f"<rect x='{left}' y='{90 - tall:.1f}' width='{width - 4}' height='{tall:.1f}'/>"
            f"<text x='{left}' y='104'>{label} s</text>"
            + (f"<text x='{left}' y='{86 - tall:.1f}'>{counts[index]}</text>" if counts[index] else "")
        )
    middle = seconds[len(seconds) // 2]
    return (
        f"<h2>Downtime of each fault</h2><p>Median {middle:.3f} s, longest {max(seconds):.3f} s: from the last step "
        f"before it to the first after it.</p><div class='wide'><svg width='{8 + width * (last + 1)}' height='110' "
        f"role='img' aria-label='histogram of downtimes'>{''.join(bars)}</svg></div>"
    )


def _list(title: str, lines: Sequence[str]) -> str:
    rows = "".join(f"<li>{_text(line)}</li>" for line in lines)
    return f"<h2>{title}</h2><ul>{rows}</ul>" if rows else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], numbers_from: int, code: int = -1) -> str:
    def cell(tag: str, index: int, value: object) -> str:
        text = _text(str(value))
        if tag == "td" and index == code:
            return f"<td><code>{text}</code></td>"
        return f"<{tag}{' class=n' if index >= numbers_from and index != code else ''}>{text}</{tag}>"

    lines = [("th", head), *(("td", row) for row in rows)]
    body = "".join(f"<tr>{''.join(cell(tag, i, v) for i, v in enumerate(row))}</tr>" for tag, row in lines)
    return f"<div class='wide'><table>{body}</table></div>"


def _text(value: str) -> str:
    return html.escape(value)


# --- for a build server ----------------------------------------------------------------------------------------------
def junit_of(report: ProofReport, strict: bool) -> str:
    """JUnit XML: a case for the script undisturbed, one for each struck run, one for the numbers."""
    wrong = {failure.number: failure for failure in report.failures}
    cases = [_case("the script can be repeated", 0.0, [f"{f.check}: {f.detail}" for f in report.script_faults])]
    for result in report.results:
        failure = wrong.get(result.number)
        words = [f"{f.check}: {f.detail}" for f in failure.findings] if failure is not None else []
        more = [f"again: {failure.command}"] if failure is not None else []
        cases.append(_case(f"run {result.number}: {result.schedule}", result.seconds, words, more))
    if not report.script_faults and not report.results:
        cases.append(_case("a run is struck", 0.0, ["no run was struck, so nothing was shown"]))
    cases.append(_case("status and why tell the truth", 0.0, report.numbers if strict else []))
    failed = sum("<failure" in case for case in cases)
    seconds = sum(result.seconds for result in report.results)
    return (
        "<?xml version='1.0' encoding='utf-8'?>\n"
        f"<testsuite name='outlast prove' tests='{len(cases)}' failures='{failed}' errors='0' time='{seconds:.3f}'>\n"
        + "".join(cases)
        + "</testsuite>\n"
    )


def _case(name: str, seconds: float, words: Sequence[str], more: Sequence[str] = ()) -> str:
    opened = f"<testcase classname='outlast.prove' name={saxutils.quoteattr(name)} time='{seconds:.3f}'"
    if not words:
        return f"{opened}/>\n"
    text = _in_xml("\n".join([*words, *more]))
    message = saxutils.quoteattr(_in_xml(words[0], escape=False))
    return f"{opened}>\n<failure message={message}>{text}</failure>\n</testcase>\n"


def _in_xml(text: str, *, escape: bool = True) -> str:
    """Without what XML has no character for: a script's output may hold anything."""
    known = re.compile("[^\\t\\n\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")
    kept = known.sub("?", text)
    return saxutils.escape(kept) if escape else kept
