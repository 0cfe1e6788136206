"""`outlast prove gate`: as `run`, for a build server: a time limit, JUnit XML, an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outlast.cli._prove_report import exit_code, print_report, write_page
from outlast.cli._prove_run import Options, check_file, prove, script_of

__all__ = ["gate"]


def gate(
    script: Annotated[str | None, typer.Argument(help="the training script")] = None,
    args: Annotated[list[str] | None, typer.Argument(help="its own arguments")] = None,
    module: Annotated[str | None, typer.Option("-m", help="Run this module instead of a script.")] = None,
    junit: Annotated[Path, typer.Option(help="Where the JUnit XML goes.")] = Path("outlast-prove.xml"),
    report: Annotated[Path | None, typer.Option(help="Write a page with all of it here: one HTML file.")] = None,
    minutes: Annotated[float, typer.Option(help="Begin no further run after so long; one is always struck.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Fixes the strikes; -1 draws one, and says which.")] = -1,
    faults: Annotated[str, typer.Option(help="Kinds of faults, with commas between; all if not said.")] = "",
    replicas: Annotated[int, typer.Option(help="Replicas of each struck run.")] = 2,
    spares: Annotated[int, typer.Option(help="Spares of each struck run.")] = 1,
    hosts: Annotated[int, typer.Option(help="On so many hosts, 3 or more: network namespaces, as root.")] = 0,
    ranks: Annotated[int, typer.Option(help="Processes of each replica, as for outlast run.")] = 1,
    config: Annotated[Path | None, typer.Option(help="Settings for all runs, as for outlast run.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Untrue numbers of status and why fail it, too.")] = False,
) -> int:
    """Strike runs of SCRIPT for some minutes, with a fresh seed each time, and write JUnit XML: a case for the script
    undisturbed, one for each struck run. A failure has the command that strikes the same way again. Exit code 8 if
    anything does not hold."""
    from outlast.prove.script_page import junit_of

    options = Options(
        script=script_of(script, module, args or [], "gate"),
        faults=faults,
        runs=1_000_000,
        minutes=minutes,
        seed=seed,
        replicas=replicas,
        spares=spares,
        schedule="",
        agents=1,
        exchange="auto",
        checkpoints=True,
        config=config,
        keep=None,
        shrink=4,
        hosts=hosts,
        ranks=ranks,
    )
    for path in (junit, report):
        check_file(path)
    found = prove(options, quiet=False)
    junit.write_text(junit_of(found, strict), encoding="utf-8")
    write_page(found, report)
    print_report(found)
    return exit_code(found, strict)
