"""`outlast export`: a run's figures for other tools, once or as long as it lasts."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli._runs import DEFAULT_RUNS, note, open_run
from outlast.errors import ConfigError

if TYPE_CHECKING:
    from outlast.journal import Journal
    from outlast.observe import MetricWriter

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_PIECE = 2000


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run directory, or one that holds runs (the newest is taken).")] = Path(
        DEFAULT_RUNS
    ),
    jsonl: Annotated[Path | None, typer.Option(help="Write JSON lines to this file; - is standard output.")] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Write an event file into this directory.")] = None,
    wandb: Annotated[Path | None, typer.Option(help="Write an offline run of W&B into this directory.")] = None,
    otlp: Annotated[str, typer.Option(help="Send to this OpenTelemetry collector: http://HOST:4318.")] = "",
    salvage: Annotated[
        Path | None, typer.Option(help="Save what is readable of a damaged journal as a run in this new directory.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run is over.")] = False,
) -> int:
    """Write losses, step times, uses of time, faults and saves from a run's journal, for other tools to draw."""
    if salvage is not None:
        run = _salvaged(run, salvage)
    if not (jsonl or tensorboard or wandb or otlp):
        if salvage is not None:
            return 0
        raise ConfigError("nothing to write to", remedy="--jsonl FILE, --tensorboard DIR, --wandb DIR or --otlp URL")
    from outlast.observe.rounding import counted

    with open_run(run) as (reader, run_dir), contextlib.ExitStack() as stack:
        writers = _writers(reader, run_dir, jsonl, tensorboard, wandb, otlp)
        for writer in writers:
            stack.callback(writer.close)
        count = _copy(reader, run_dir, writers, follow, threading.Event())
    note(f"{counted(count, 'row')} written")
    return 0


def _salvaged(run: Path, target: Path) -> Path:
    """Where what is readable of a damaged journal now stands, as a run of its own."""
    from outlast import journal, observe

    run_dir = observe.find_run(run).run_dir
    found = journal.salvage(run_dir, target)
    of = f" of {found.num_known:,}" if found.num_known else ""
    note(f"{found.num_entries:,}{of} entries are saved: outlast why {target}")
    return target


def _writers(
    reader: Journal, run_dir: Path, jsonl: Path | None, tensorboard: Path | None, wandb: Path | None, otlp: str
) -> list[MetricWriter]:
    from outlast import observe

    first = reader.events(limit=1)
    writers: list[MetricWriter] = []
    if wandb is not None:  # first, as it may be missing
        writers.append(observe.WeightsAndBiases(wandb, run_dir.resolve().name))
    if otlp:
        from outlast.observe.otlp import OpenTelemetry

        writers.append(OpenTelemetry(otlp, run_dir.resolve().name))
    if jsonl is not None:
        writers.append(observe.JsonLines(jsonl))
    if tensorboard is not None:
        writers.append(observe.TensorBoardFile(tensorboard, first[0].event.at_s if first else 0.0))
    return writers


def _copy(reader: Journal, run_dir: Path, writers: list[MetricWriter], follow: bool, stop: threading.Event) -> int:
    """Each entry once, in order; returns how many rows that made."""
    from outlast.journal import is_held
    from outlast.observe import rows_of

    since = count = 0
    while True:
        held = is_held(run_dir)  # asked first: what is written before the lock is let go of is then read below
        while entries := reader.events(since, limit=_PIECE):
            since = entries[-1].seq
            for row in (row for entry in entries for row in rows_of(entry.event)):
                count += 1
                for writer in writers:
                    writer.write(row)
        if not (follow and held) or stop.wait(1.0):
            return count
