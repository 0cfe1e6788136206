"""`outlast why`: what happened to a run, what it cost, and what to do next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outlast.cli._runs import DEFAULT_RUNS
from outlast.cli._tell_story import tell_story

app = typer.Typer(add_completion=False, rich_markup_mode=None)
Run = Annotated[Path, typer.Argument(help="A run directory, or one that holds runs (the newest is taken).")]
Price = Annotated[
    str | None, typer.Option(help="What an accelerator costs for an hour, as '2.50 EUR': adds the faults' cost.")
]
Accelerators = Annotated[
    int | None, typer.Option(min=1, help="Accelerators that the run holds; by default one a rank, spares included.")
]


@app.command()
def why(
    run: Run = Path(DEFAULT_RUNS),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the story.")] = False,
    price: Price = None,
    accelerators: Accelerators = None,
    every: Annotated[bool, typer.Option("--all", help="Show views, starts and exits in the timeline too.")] = False,
) -> int:
    """Tell a run's story: what happened, what it cost, and a remedy for each cause."""
    return tell_story(run, as_json=as_json, price=price, accelerators=accelerators, every=every)
