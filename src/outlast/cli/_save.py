"""`outlast save`: ask a run for a checkpoint now."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outlast.cli._runs import DEFAULT_RUNS

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def save(
    run: Annotated[Path, typer.Argument(help="A run directory, or one that holds runs (the newest is taken).")] = Path(
        DEFAULT_RUNS
    ),
    as_json: Annotated[bool, typer.Option("--json", help="The answer as JSON.")] = False,
) -> int:
    """Ask a run for a checkpoint after its next step, beside training."""
    from outlast.cli._asking import ask_and_tell
    from outlast.observe import find_run

    return ask_and_tell(find_run(run).run_dir, "save", as_json)
