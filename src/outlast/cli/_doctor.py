"""`outlast doctor`: whether this host, or a fleet of hosts, can train; before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outlast.cli._check_host import check_host
from outlast.cli._runs import DEFAULT_RUNS

app = typer.Typer(add_completion=False, rich_markup_mode=None)
CheckpointDir = Annotated[str | None, typer.Option(help="Where checkpoints shall be: a directory or a URL.")]
Model = Annotated[
    str | None, typer.Option(help="FILE.py:FUNCTION that returns (model, loss): are its bits the same each time?")
]
BurnIn = Annotated[
    float | None, typer.Option("--burn-in", help="Stress each device with known answers, for MINUTES in all.")
]
Answer = Annotated[
    str | None, typer.Option(help="Answer at ADDRESS:PORT for other hosts' --reach, and do nothing else.")
]
Reach = Annotated[list[str] | None, typer.Option(help="ADDRESS:PORT of a host that answers: round trip, speed, clock.")]
Compare = Annotated[
    list[Path] | None, typer.Option(help="Reports (--json) of hosts to hold against each other; more than once.")
]


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Only what takes a moment: no torch, no network.")] = False,
    config: Annotated[Path | None, typer.Option(help="The run's TOML file, with a table [run].")] = None,
    replicas: Annotated[int | None, typer.Option(help="Replicas that this host shall have.")] = None,
    run_dir: Annotated[Path, typer.Option(help="Where the run directory shall be.")] = Path(DEFAULT_RUNS),
    checkpoint_dir: CheckpointDir = None,
    model: Model = None,
    burn_in: BurnIn = None,
    answer: Answer = None,
    seconds: Annotated[float, typer.Option("--for", help="With --answer: for so many seconds.")] = 600.0,
    reach: Reach = None,
    compare: Compare = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 for warnings too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the list.")] = False,
) -> int:
    """Check a host before a run: each finding with its remedy. Exit code: 0 if a run can start here, 3 if not."""
    return check_host(
        quick=quick, config=config, replicas=replicas, run_dir=run_dir, checkpoint_dir=checkpoint_dir, model=model,
        burn_in=burn_in, answer=answer, seconds=seconds, reach=reach, compare=compare, strict=strict, as_json=as_json,
    )  # fmt: skip
