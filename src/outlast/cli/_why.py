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
    from outlast.plan._beside import (
        believed_data,
        believed_of_events,
        believed_table,
        beside_data,
        beside_note,
        beside_table,
        predicted_beside_observed,
    )

    events, held, run_dir = read_run(run)
    story = observe.why(events, held=held, now_s=time.time() if held else None, everything=every)
    believed = believed_of_events(events)
    beside = predicted_beside_observed(believed) if believed else []
    if as_json:
        told = believed_data(believed) if believed else None
        print_json(story, run_dir=run_dir, predicted=beside_data(beside), believed=told)
    else:
        print(observe.render_why(story))
        if any(row.tells for row in beside):  # in a short run any number of failures says nothing of the prediction
            print(f"\n{beside_table(beside).text()}\n{beside_note(beside)}")
        if believed and believed.num_deaths:
            print(f"\n{believed_table(believed).text()}\nOutlast plan --from-run says what that would change.")
        points = observe.losses(events)
        if points:
            print(f"\nLoss\n{observe.plot(points)}")
    return 0
