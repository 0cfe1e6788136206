"""`outlast status`: who is alive, in which view, at which step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outlast.cli._runs import DEFAULT_RUNS
from outlast.cli._show_status import show_status

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def status(
    run: Annotated[Path, typer.Argument(help="A run directory, or one that holds runs (the newest is taken).")] = Path(
        DEFAULT_RUNS
    ),
    follow: Annotated[bool, typer.Option("--follow", help="Again when it changes, until the run is over.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="With --follow: seconds between two looks.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object (a line each with --follow).")] = False,
) -> int:
    """Show a run's coordinator, agents and replicas: process, state, view and step of each."""
    return show_status(run, follow=follow, every=every, as_json=as_json)
