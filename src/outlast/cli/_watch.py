"""`outlast watch`: follow a run in the terminal until it ends, from its journal alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer

from outlast.cli._runs import DEFAULT_RUNS

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_POLL_S = 0.5


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="A run directory, or one that holds runs (the newest is taken).")] = Path(
        DEFAULT_RUNS
    ),
) -> int:
    """Follow a run: what happens scrolls by, state and loss stand below. Ctrl-C ends the watching, never the run."""
    follow(run)
    return 0


def follow(run: Path) -> None:
    """Show the run until it is over; on a terminal as a picture, elsewhere in lines, on standard output."""
    import sys

    from outlast.journal import is_held
    from outlast.observe import OVER, Live, find_run

    run_dir = find_run(run).run_dir
    live, pause = Live(run_dir, stream=sys.stdout, strict=True), threading.Event()
    try:
        while True:
            held = is_held(run_dir)  # asked first: what is written before the lock is let go of is then read below
            state = live.poll(held=held)
            if state.state == "lost":
                print("outlast: no process holds the run, and it did not finish; outlast why tells more")
            if state.state in OVER:
                return
            pause.wait(_POLL_S)
    finally:
        live.close()
