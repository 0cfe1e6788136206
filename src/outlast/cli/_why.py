"""`outlast why`: what happened to a run, what it cost, and what to do next."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from outlast.cli._runs import DEFAULT_RUNS, print_json, read_run

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def why(
    run: Annotated[Path, typer.Argument(help="A run directory, or one that holds runs (the newest is taken).")] = Path(
        DEFAULT_RUNS
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the story.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Show views, starts and exits in the timeline too.")] = False,
) -> int:
    """Tell a run's story: what happened, what it cost, and a remedy for each cause."""
    from outlast import observe
    from outlast.plan._beside import beside_data, beside_note, beside_of_events, beside_table

    events, held, run_dir = read_run(run)
    story = observe.why(events, held=held, now_s=time.time() if held else None, everything=every)
    beside = beside_of_events(events)
    if as_json:
        print_json(story, run_dir=run_dir, predicted=beside_data(beside))
    else:
        print(observe.render_why(story))
        if any(row.tells for row in beside):  # in a short run any number of failures says nothing of the prediction
            print(f"\n{beside_table(beside).text()}\n{beside_note(beside)}")
            print("outlast plan --from-run re-plans with what was seen.")
        points = observe.losses(events)
        if points:
            print(f"\nLoss\n{observe.plot(points)}")
    return 0
