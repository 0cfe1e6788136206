"""`outlast evict`: put another process in a replica's place."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outlast.cli._operator import AT, JSON, SECRET, ask
from outlast.cli._runs import DEFAULT_RUNS
from outlast.cli._tls_options import TLS_CA, TLS_CERT, TLS_KEY, TLS_NAME

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def evict(
    replica: Annotated[str, typer.Argument(help="The replica, such as r2.1, or its slot, such as r2.")],
    run: Annotated[Path, typer.Argument(help="A run directory, or one that holds runs (the newest is taken).")] = Path(
        DEFAULT_RUNS
    ),
    now: Annotated[bool, typer.Option("--now", help="Kill it, in place of letting it leave between steps.")] = False,
    join: AT = "",
    secret_file: SECRET = None,
    tls_cert: TLS_CERT = "",
    tls_key: TLS_KEY = "",
    tls_ca: TLS_CA = "",
    tls_name: TLS_NAME = "",
    json: JSON = False,
) -> int:
    """Have a replica leave between two steps, and start another process in its place."""
    from outlast.core.protocol import operator_messages as om

    tls = (tls_cert, tls_key, tls_ca, tls_name)
    return ask(run, join, secret_file, lambda asker: om.EvictAsked(asker=asker, replica=replica, now=now), json, tls)
