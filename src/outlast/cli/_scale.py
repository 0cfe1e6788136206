"""`outlast scale`: have a run train with more or fewer replicas, while it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outlast.cli._operator import AT, JSON, SECRET, ask
from outlast.cli._runs import DEFAULT_RUNS
from outlast.cli._tls_options import TLS_CA, TLS_CERT, TLS_KEY, TLS_NAME

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def scale(
    replicas: Annotated[int, typer.Option(help="How many are to train; spares stay as many as they are.")],
    run: Annotated[Path, typer.Argument(help="A run directory, or one that holds runs (the newest is taken).")] = Path(
        DEFAULT_RUNS
    ),
    join: AT = "",
    secret_file: SECRET = None,
    tls_cert: TLS_CERT = "",
    tls_key: TLS_KEY = "",
    tls_ca: TLS_CA = "",
    tls_name: TLS_NAME = "",
    json: JSON = False,
) -> int:
    """Have a run train with more or fewer replicas from now on. They come and go between two steps, and the result has
    the same bits. `outlast status` shows how far it is."""
    from outlast.core.protocol import operator_messages as om

    tls = (tls_cert, tls_key, tls_ca, tls_name)
    return ask(run, join, secret_file, lambda asker: om.ScaleAsked(asker=asker, replicas=replicas), json, tls)
