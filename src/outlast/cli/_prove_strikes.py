"""`outlast prove strikes`: real fleets that are struck from outside at random moments."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.errors import ConfigError

if TYPE_CHECKING:
    from outlast.prove import Struck
    from outlast.prove.strike_findings import Outcome
    from outlast.prove.strike_plan import StruckFleet
    from outlast.prove.striker import StrikeRecord

__all__ = ["strikes"]

_OUTCOMES: tuple[Outcome, ...] = ("same bits", "fleet lost", "wrong")


def strikes(
    fleets: Annotated[int, typer.Option(help="How many fleets at least.")] = 3,
    strikes: Annotated[int, typer.Option("--strikes", help="How many strikes at least; fleets follow until then.")] = 0,
    minutes: Annotated[float, typer.Option(help="Begin no fleet after so long; 0: no limit.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Fixes fleets and strikes; -1 draws one, and says which.")] = -1,
    only: Annotated[int, typer.Option(help="One fleet of the campaign, by its number.")] = -1,
    resume: Annotated[
        Path | None, typer.Option(help="Keep results in this file, and go on after those that it has.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Where all runs are kept; else only those with findings.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Strike fleets from outside with SIGKILL, SIGSEGV, SIGTERM and SIGSTOP, at replicas, spares, agents, coordinator
    and the process that replicas are forked from, at random moments from the first process to the last. Each must end,
    with the bits of an undisturbed run or truly lost, and what status and why print must agree with what was done.
    Exit code 8 if anything does not."""
    from outlast.cli._campaign_file import campaign_file
    from outlast.prove import StrikeCampaign, Struck

    if fleets < 1 or strikes < 0 or minutes < 0 or seed < -1 or only < -1:
        raise ConfigError(
            f"--fleets {fleets} --strikes {strikes} --minutes {minutes:g} --seed {seed} --only {only} cannot be",
            remedy="--fleets 1 or more, the others 0 or more",
        )
    base = keep or (resume.with_name(resume.name + ".runs") if resume else Path(tempfile.mkdtemp(prefix="outlast-")))
    base.mkdir(parents=True, exist_ok=True)
    with campaign_file(resume, Struck, lambda result: result.fleet.seed, seed) as results:
        found, seed = results.found, results.seed
        if not as_json:
            print(f"seed {seed}; runs with findings are kept in {base}", file=sys.stderr)
        campaign, end_s = StrikeCampaign(base, seed, keep is not None), time.monotonic() + (minutes * 60.0 or 1e9)
        with _progress(fleets, as_json) as (watch, done):
            for number in [only] if only >= 0 else _numbers(found, fleets, strikes):
                if time.monotonic() > end_s:
                    break
                results.add(campaign.attempt(number, watch))
                done(found[-1], len(found), sum(len(result.done) for result in found))
    bad = [result for result in found if result.findings]
    if not (bad or keep or resume):
        shutil.rmtree(base, ignore_errors=True)
    if as_json:
        print(json.dumps(_report(found, seed)))
    else:
        _print(found, seed)
    return 8 if bad else 0


def _numbers(found: list[Struck], fleets: int, strikes: int) -> Iterator[int]:
    """Those that are still wanted, until there are enough."""
    known = {result.fleet.number for result in found}
    number = 0
    while len(found) < fleets or sum(len(result.done) for result in found) < strikes:
        if number not in known:
            yield number
        number += 1


# --- what is shown ---------------------------------------------------------------------------------------------------
def _report(found: list[Struck], seed: int) -> dict[str, Any]:
    import msgspec

    counts = Counter(result.outcome for result in found)
    return {
        "seed": seed,
        "fleets": len(found),
        "strikes": sum(len(result.done) for result in found),
        "outcomes": {name: counts[name] for name in _OUTCOMES},
        "checks": dict(_checks(found)),
        "longest_s": max((result.longest_s for result in found), default=0.0),
        "table": [
            {"kind": kind, "target": role, **{name: row[name] for name in _OUTCOMES}}
            for (kind, role), row in sorted(_table(found).items())
        ],
        "results": [msgspec.to_builtins(result) | {"command": result.again} for result in found],
    }


def _table(found: list[Struck]) -> dict[tuple[str, str], Counter[Outcome]]:
    """Strikes by kind and target: how the fleets ended that they struck."""
    table: dict[tuple[str, str], Counter[Outcome]] = {}
    for result in found:
        for done in result.done:
            table.setdefault((done.kind, done.role), Counter())[result.outcome] += 1
    return table


def _checks(found: list[Struck]) -> Counter[str]:
    """In how many fleets each check failed."""
    return Counter(check for result in found for check in {finding.check for finding in result.findings})


def _print(found: list[Struck], seed: int) -> None:
    table = _table(found)
    print(f"\n{'strike':18}{'target':13}{'number':>8}" + "".join(f"{name:>12}" for name in _OUTCOMES))
    for (kind, role), row in sorted(table.items()):
        print(f"{kind:18}{role:13}{row.total():8}" + "".join(f"{row[name] or '':>12}" for name in _OUTCOMES))
    total: Counter[Outcome] = sum(table.values(), Counter())
    print(f"{'all':31}{total.total():8}" + "".join(f"{total[name]:12}" for name in _OUTCOMES))
    ends = Counter(result.outcome for result in found)
    print(f"{'fleets':31}{len(found):8}" + "".join(f"{ends[name]:12}" for name in _OUTCOMES))
    checks = ", ".join(f"{check}: {count}" for check, count in _checks(found).most_common()) or "none"
    longest = max((result.longest_s for result in found), default=0.0)
    print(f"\nlongest wait for a step after a strike: {longest:.1f} s")
    print(f"seed {seed}; fleets in which a check failed: {checks}")
    for result in found:
        if result.findings:
            print(f"\nfleet {result.fleet.number} ({result.fleet}), {len(result.done)} strikes: {result.outcome}")
            for finding in result.findings[:8]:
                print(f"  {finding.check}: {finding.detail}")
            if len(result.findings) > 8:
                print(f"  and {len(result.findings) - 8} more")
            print(f"  again: {result.again}\n  kept:  {result.folder}")


@contextmanager
def _progress(
    fleets: int, quiet: bool
) -> Iterator[tuple[Callable[[StruckFleet, StrikeRecord], None], Callable[[Struck, int, int], None]]]:
    """What is called as a fleet runs, and when one has ended. A bar on a terminal, a line a fleet elsewhere; always on
    standard error."""
    if not sys.stderr.isatty():

        def line(result: Struck, count: int, strikes: int) -> None:
            if not quiet:
                text = f"{count} of {fleets} fleets, {strikes} strikes: {result.fleet}: {result.outcome}"
                failed = ", ".join(sorted({finding.check for finding in result.findings}))
                print(f"{text}{f' ({failed})' if failed else ''}", file=sys.stderr, flush=True)

        yield (lambda *_: None), line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("fleets"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("fleets", total=fleets, now="an undisturbed run first")

        def now(fleet: StruckFleet, record: StrikeRecord) -> None:
            bar.update(task, now=f"{fleet}: {len(record.done)} strikes")

        def ended(result: Struck, count: int, strikes: int) -> None:
            bar.update(task, completed=count, total=max(fleets, count), now=f"{strikes} strikes; {result.outcome}")

        yield now, ended
