"""`outlast status`: who is alive, in which view, at which step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from outlast.cli._runs import DEFAULT_RUNS, open_run, print_json

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def status(
    run: Annotated[Path, typer.Argument(help="A run directory, or one that holds runs (the newest is taken).")] = Path(
        DEFAULT_RUNS
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> int:
    """Show a run's coordinator, agents and replicas: process, state, view and step of each."""
    from outlast import journal, observe

    with open_run(run) as (reader, run_dir):
        events, losses = observe.read_state(reader), observe.sample_losses(reader)
    held = journal.is_held(run_dir)
    state = observe.status(events, held=held, now_s=time.time() if held else None)
    if as_json:
        print_json(state, run_dir=run_dir)
    else:
        print(observe.render_status(state, curve=losses))
    return 0
