"""`outlast stop`: ask a run to save and stop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from outlast.cli._runs import DEFAULT_RUNS

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def stop(
    run: Annotated[Path, typer.Argument(help="A run directory, or one that holds runs (the newest is taken).")] = Path(
        DEFAULT_RUNS
    ),
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask whether it is meant.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The answer as JSON.")] = False,
) -> int:
    """Ask a run to save and stop, in order; started again with the same checkpoints it goes on from there."""
    from outlast.cli._asking import ask_and_tell
    from outlast.observe import find_run

    run_dir = find_run(run).run_dir
    if not yes and sys.stdin.isatty():
        typer.confirm(f"Stop the run in {run_dir}?", abort=True, err=True)
    return ask_and_tell(run_dir, "stop", as_json)
