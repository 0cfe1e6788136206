"""`outlast run`: train a script on replicas that may fail."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from outlast.errors import ConfigError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
def run(
    script: Annotated[str, typer.Argument(help="the training script")],
    args: Annotated[list[str] | None, typer.Argument(help="its own arguments")] = None,
    replicas: Annotated[int | None, typer.Option(help="full copies of the training state, one process each")] = None,
    spares: Annotated[int | None, typer.Option(help="replicas kept caught up beside the run")] = None,
    agents: Annotated[int | None, typer.Option(help="supervising processes on this machine")] = None,
    exchange: Annotated[str | None, typer.Option(help="auto, shm or c10d")] = None,
    threads: Annotated[int | None, typer.Option(help="intra-op threads of each replica")] = None,
    port: Annotated[int | None, typer.Option(help="the coordinator's port on loopback; 0 takes a free one")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML with a table [run]; see outlast config show")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="a new directory for journal and logs")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object at the end, nothing else")] = False,
) -> int:
    """Train SCRIPT on replicas that may fail; give it ARGS. Exit code: the run's (reference/errors)."""
    from outlast.config import resolve

    if not Path(script).is_file():
        raise ConfigError(f"no script {script}", remedy="outlast run [OPTIONS] train.py ARGS…")
    given = {
        "replicas": replicas, "spares": spares, "agents": agents, "exchange": exchange, "threads": threads,
        "port": port,
    }  # fmt: skip
    resolved = resolve(cli=given, environ=os.environ, file=config)
    command = [sys.executable, script, *(args or [])]
    return launch(resolved, command, run_dir or _new_directory(), as_json=as_json)


def launch(resolved: Any, command: list[str], run_dir: Path, *, as_json: bool) -> int:
    """Run to the end with the live view; returns the exit code."""
    from outlast.observe import Live
    from outlast.runtime._launcher import Launcher

    launcher = Launcher(resolved=resolved, command=command, run_dir=run_dir)
    live: Live | None = None

    def watch() -> None:
        nonlocal live
        if live is None:
            live = Live(run_dir)
        live.poll()

    if not as_json:
        print(f"outlast: {run_dir} (logs of the replicas under logs/)", flush=True)
        launcher.watch = watch
    outcome = launcher.run()
    if live is not None:
        live.close()
    _report(run_dir, outcome.exit_code, as_json)
    return outcome.exit_code


def _report(run_dir: Path, exit_code: int, as_json: bool) -> None:
    import json

    from outlast.core import events
    from outlast.journal import Journal

    with Journal.open_reader(run_dir) as journal:
        found = [entry.event for entry in journal.events(kinds=[events.RunFinished])]
    last = found[-1] if found else None
    detail = last.detail if isinstance(last, events.RunFinished) else "the coordinator could not be kept alive"
    if as_json:
        print(json.dumps({"run_dir": str(run_dir), "exit_code": exit_code, "detail": detail}))
    elif exit_code:
        print(f"outlast: the run ended with code {exit_code}: {detail}", file=sys.stderr)
        print(f"outlast: outlast why {run_dir}", file=sys.stderr)


def _new_directory() -> Path:
    import datetime

    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    base = Path("outlast-runs")
    for number in range(1000):
        candidate = base / (stamp if number == 0 else f"{stamp}-{number}")
        if not candidate.exists():
            return candidate
    raise ConfigError(f"too many runs under {base} in one second", remedy="give --run-dir")
