"""`outlast status`: who is alive, in which view, at which step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from outlast.cli._runs import DEFAULT_RUNS, print_json, read_run

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def status(
    run: Annotated[Path, typer.Argument(help="A run directory, or one that holds runs (the newest is taken).")] = Path(
        DEFAULT_RUNS
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> int:
    """Show a run's coordinator, agents and replicas: process, state, view and step of each."""
    from outlast import observe

    events, held, run_dir = read_run(run)
    state = observe.status(events, held=held, now_s=time.time() if held else None)
    if as_json:
        print_json(state, run_dir=run_dir)
    else:
        print(observe.render_status(state, curve=[loss for _, loss in observe.losses(events)]))
    return 0
