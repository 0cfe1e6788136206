"""`outlast prove`: put the claims to the test. `protocol` needs no torch and no processes: virtual time; `faults`,
`strikes`, `attacks` and `corruption` have real fleets, and `run` has those of anybody's script (`_prove_*.py`)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli._prove_attacks import attacks
from outlast.cli._prove_catalogue import catalogue
from outlast.cli._prove_faults import faults
from outlast.cli._prove_gate import gate
from outlast.cli._prove_run import run
from outlast.cli._prove_strikes import strikes
from outlast.cli._prove_trace import trace
from outlast.cli._prove_weekend import lost_weekend
from outlast.cli._script_command import ScriptCommand
from outlast.errors import ConfigError

if TYPE_CHECKING:
    from outlast.prove.adversary import Domain, Scenario, Tally

__all__ = ["app"]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    suggest_commands=False,
    no_args_is_help=True,
    help="Put the claims to the test.",
)


app.command()(faults)
app.command()(attacks)
app.command()(strikes)
app.command()(catalogue)
app.command("lost-weekend")(lost_weekend)
app.command(cls=ScriptCommand, context_settings={"allow_interspersed_args": False})(run)
app.command(cls=ScriptCommand, context_settings={"allow_interspersed_args": False})(gate)
app.command(cls=ScriptCommand, context_settings={"allow_interspersed_args": False})(trace)


@app.callback()
def _group() -> None:
    """Put the claims to the test."""


@app.command()
def protocol(
    schedules: Annotated[int, typer.Option(help="How many schedules to try.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Number of the first schedule.")] = 0,
    jobs: Annotated[int, typer.Option(help="Processes; 0: one a core. The result does not depend on it.")] = 0,
    replay: Annotated[str, typer.Option(help="Play one schedule again, as a violation printed it.")] = "",
    variant: Annotated[str, typer.Option(help="A deliberately broken protocol, to see it caught.")] = "",
    fault_domain: Annotated[
        str, typer.Option(help="What lies together under a robust rule: replica, or host: other schedules, all so.")
    ] = "replica",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Seeded schedules of delays, crashes, stops, cuts and restarts against the protocol; every invariant checked."""
    from outlast.prove import adversary

    if schedules < 1 or seed < 0 or jobs < 0:
        raise ConfigError(
            f"--schedules {schedules} --seed {seed} --jobs {jobs} cannot be",
            remedy="--schedules 1 or more, --seed and --jobs 0 or more",
        )
    if variant and variant not in adversary.BROKEN:
        raise ConfigError(f"no variant {variant!r}", remedy=f"one of {', '.join(adversary.BROKEN)}")
    if fault_domain not in ("replica", "host"):
        raise ConfigError(f"--fault-domain {fault_domain} cannot be", remedy="replica or host")
    domain: Domain = "host" if fault_domain == "host" else "replica"
    if replay:
        return _replay(adversary.replayed(replay, domain), variant, as_json)
    with _progress(schedules) as progress:
        tally = adversary.search(
            schedules, seed, jobs=jobs or os.cpu_count() or 1, variant=variant, domain=domain, progress=progress
        )
    findings = [adversary.shrink(min(tally.violations)[0], variant, domain)] if tally.violations else []
    report = {
        "schedules": tally.num_schedules, "seed": seed, "events": tally.num_events, "views": tally.num_views,
        "endings": dict(sorted(tally.endings.items())), "violations": len(findings),
        "findings": [
            {
                "seed": f.seed, "invariant": f.violation.invariant, "what": f.violation.what, "at_s": f.violation.at_s,
                "faults": list(f.faults), "command": f.command,
            }
            for f in findings
        ],
    }  # fmt: skip
    if as_json:
        print(json.dumps(report))
    else:
        _print(report)
    return 8 if findings else 0


@app.command()
def corruption(
    flips: Annotated[int, typer.Option(help="How many bits to flip, three to a fleet.")] = 18,
    seed: Annotated[int, typer.Option(help="Draws places; bits are spread evenly.")] = 0,
    guards: Annotated[str, typer.Option(help="What the fleets watch: default, full or off.")] = "full",
    audit: Annotated[
        str, typer.Option(metavar="SHARE", help="Share of microbatches and reductions computed twice, 0 to 1.")
    ] = "0",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or both with a comma between.")] = "float32,bfloat16",
    base: Annotated[str, typer.Option("--dir", help="Keep the runs here, in a new directory.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Flip single bits of gradients, parameters and moments in real fleets, with audits also of sums and of what is
    reduced; who notices, how fast, and who is named."""
    from outlast.cli._prove_corruption import campaign

    return campaign(flips, seed, guards, audit, dtype, base, as_json)


def _print(report: dict[str, Any]) -> None:
    endings = ", ".join(f"{count} {name}" for name, count in report["endings"].items())
    last = report["seed"] + report["schedules"] - 1
    print(f"{report['schedules']} schedules (seeds {report['seed']} to {last}), {report['events']} events: {endings}")
    for finding in report["findings"]:
        print(f"VIOLATED {finding['invariant']}, schedule {finding['seed']}: {finding['what']}")
        for fault in finding["faults"]:
            print(f"  needs {fault}")
        print(f"  replay: {finding['command']}")
    if not report["findings"]:
        print("no invariant was violated")


def _replay(scenario: Scenario, variant: str, as_json: bool) -> int:
    """Play one schedule and show what happens in it."""
    from outlast.prove import adversary

    lines: list[tuple[float, str]] = []
    outcome = adversary.play(scenario, variant, lambda at_s, text: lines.append((at_s, text)))
    found = outcome.violation
    if as_json:
        what = {"invariant": found.invariant, "what": found.what, "at_s": found.at_s} if found else None
        print(json.dumps({"events": outcome.events, "seconds": outcome.seconds, "violation": what, "trace": lines}))
    else:
        for at_s, text in lines:
            print(f"{at_s:9.4f} {text}")
        print(f"VIOLATED {found.invariant}: {found.what}" if found else "no invariant was violated")
    return 8 if found else 0


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Tally], None]]:
    """A bar on a terminal, plain lines elsewhere; always on standard error."""
    if not sys.stderr.isatty():
        tenth = [0]

        def line(tally: Tally) -> None:
            if tally.num_schedules * 10 // total > tenth[0]:
                tenth[0] = tally.num_schedules * 10 // total
                print(f"{tally.num_schedules} of {total} schedules", file=sys.stderr)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("schedules"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("schedules", total=total)
        yield lambda tally: bar.update(task, completed=tally.num_schedules)
