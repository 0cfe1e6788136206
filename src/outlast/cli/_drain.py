"""`outlast drain`: empty a host of a run, and keep it empty."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outlast.cli._operator import AT, JSON, SECRET, ask
from outlast.cli._runs import DEFAULT_RUNS
from outlast.cli._tls_options import TLS_CA, TLS_CERT, TLS_KEY, TLS_NAME

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def drain(
    host: Annotated[str, typer.Argument(help="The host, as outlast status names it.")],
    run: Annotated[Path, typer.Argument(help="A run directory, or one that holds runs (the newest is taken).")] = Path(
        DEFAULT_RUNS
    ),
    undo: Annotated[bool, typer.Option("--undo", help="Let the host have replicas again.")] = False,
    join: AT = "",
    secret_file: SECRET = None,
    tls_cert: TLS_CERT = "",
    tls_key: TLS_KEY = "",
    tls_ca: TLS_CA = "",
    tls_name: TLS_NAME = "",
    json: JSON = False,
) -> int:
    """Have the replicas of a host leave between two steps, and start none there until --undo, also after it was
    restarted. Others take their places where there are slots."""
    from outlast.core.protocol import operator_messages as om

    tls = (tls_cert, tls_key, tls_ca, tls_name)
    return ask(run, join, secret_file, lambda asker: om.DrainAsked(asker=asker, host=host, undo=undo), json, tls)
