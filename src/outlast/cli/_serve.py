"""`outlast serve`: the page, the metrics and the probes of runs, on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli._runs import DEFAULT_RUNS
from outlast.errors import ConfigError, EnvironmentFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.core import events as ev
    from outlast.observe.web import Wishes
    from outlast.plan.useful_time import UsefulSeen

_MOST_REPLICAS = 100_000

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def serve(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run directories, or ones that hold runs (the newest of each is taken).")
    ] = None,
    port: Annotated[int | None, typer.Option(help="0 is any free port; by default 8642, or a free one.")] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A name that requests may also be made to: that of a proxy in front.")
    ] = None,
    actions: Annotated[
        bool,
        typer.Option("--actions", help="Let the page ask runs for what changes them, behind a key printed here."),
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Take a directory that is not there yet, and wait.")] = False,
    until_pid: Annotated[int | None, typer.Option(help="End when this process ends.")] = None,
) -> int:
    """Show runs in a browser, live or long over, and to Prometheus at /metrics. Listens on 127.0.0.1 only, and changes
    nothing without --actions."""
    from outlast.observe import find_run

    _need_extra()
    from outlast.observe.web import Board, Serving, listen

    places = [place if wait else find_run(place).run_dir for place in runs or [Path(DEFAULT_RUNS)]]
    wishes = _wishes() if actions else None
    board = Board(places, beside_plan=_beside_plan)
    serving = Serving(board, listen(port), allowed_hosts=allowed_host or (), with_pid=until_pid, wishes=wishes)
    print(
        f"outlast: {serving.url} shows {', '.join(map(str, places))}; {serving.url}/metrics for Prometheus", flush=True
    )
    serving.run()
    return 0


def _beside_plan(events: Sequence[ev.AnyEvent], useful: UsefulSeen) -> list[dict[str, object]]:
    """What was planned beside what was seen, and what the run believes: the tables of `outlast why`."""
    from outlast.plan.run_beside import run_beside, worth_telling

    return [
        {"title": table.title, "columns": table.columns, "rows": table.rows, "note": note}
        for table, note in worth_telling(run_beside(events, useful))
    ]


WISHES = {"save": "", "stop": "", "evict": "replica", "drain": "host", "undrain": "host", "scale": "replicas"}
"""What the page may ask for, and what each wish is about."""


def _wishes() -> Wishes:
    """What the page may ask for, behind a new key, which is printed and kept nowhere."""
    import secrets

    from outlast.observe.web import Wishes

    key = secrets.token_urlsafe(12)
    print(f"outlast: the key for what the page may ask of runs: {key}", flush=True)
    return Wishes(WISHES, ask_for_page, key)


def ask_for_page(run_dir: Path, wish: str, what: str) -> str:
    """Ask the run as the command of that name does; returns what to expect. Raises OutlastError."""
    from outlast.cli._asking import ask_run
    from outlast.cli._operator import ask_here
    from outlast.core.protocol import operator_messages as om

    if wish in ("save", "stop"):
        return ask_run(run_dir, "save" if wish == "save" else "stop")
    if wish == "evict":
        return ask_here(run_dir, lambda asker: om.EvictAsked(asker=asker, replica=what))
    if wish in ("drain", "undrain"):
        return ask_here(run_dir, lambda asker: om.DrainAsked(asker=asker, host=what, undo=wish == "undrain"))
    if not (what.isascii() and what.isdigit()) or not 0 < int(what) <= _MOST_REPLICAS:
        raise ConfigError(f"{what!r} is no number of replicas", remedy=f"1 to {_MOST_REPLICAS:,}")
    return ask_here(run_dir, lambda asker: om.ScaleAsked(asker=asker, replicas=int(what)))


def serve_beside(run_dir: Path) -> None:
    """Serve a run from a process of its own, at the lowest priority, until this process ends."""
    _need_extra()
    command = [sys.executable, "-m", "outlast", "serve", str(run_dir), "--wait", "--until-pid", str(os.getpid())]
    subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True, preexec_fn=lambda: os.nice(19)
    )


def _need_extra() -> None:
    import importlib.util

    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentFault(
            f"{' and '.join(missing)} cannot be imported",
            remedy="pip install 'outlast[serve]' brings what serving needs",
        )
