"""`outlast agent`: bring this host into a run that was started on another."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from outlast.cli._tls_options import TLS_CA, TLS_CERT, TLS_KEY, TLS_NAME, tls_given
from outlast.errors import ConfigError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def agent(
    join: Annotated[str, typer.Option(help="HOST:PORT, as the run's --endpoint says, or its --record, etcd://…")],
    secret_file: Annotated[Path | None, typer.Option(help="the run's secret; else OUTLAST_SECRET")] = None,
    host: Annotated[str | None, typer.Option(help="this host's name in the run; its own by default")] = None,
    address: Annotated[str, typer.Option(help="at which other hosts reach it; else the one that reaches theirs")] = "",
    slots: Annotated[int, typer.Option(min=0, help="replicas that may run here; 0 for any number")] = 1,
    run_dir: Annotated[str, typer.Option(help="where the replicas' logs go")] = "",
    wait: Annotated[float, typer.Option(min=0, help="seconds for the run to be there")] = 600.0,
    tls_cert: TLS_CERT = "",
    tls_key: TLS_KEY = "",
    tls_ca: TLS_CA = "",
    tls_name: TLS_NAME = "",
    probes: Annotated[str, typer.Option(help="PORT or HOST:PORT at which /healthz and /ready are answered")] = "",
) -> int:
    """Bring this host into the run at HOST:PORT, or the one that this record is of, and start, watch and end its
    replicas here until the run is over. Exit code: 0 if the run finished, 1 if it ended otherwise, 3 without a
    coordinator, 4 if it does not take this host, 143 if this host was asked to leave (SIGTERM)."""
    from outlast.runtime.host.joined import JoinOptions, join_run, read_secret

    secret = read_secret(secret_file, os.environ.get("OUTLAST_SECRET"))
    if secret is None:
        raise ConfigError(
            "no secret of the run", remedy="--secret-file FILE, or OUTLAST_SECRET; outlast run says where it is"
        )
    options = JoinOptions(
        endpoint=join,
        secret=secret,
        host=host or socket.gethostname(),
        address=address,
        slots=slots,
        folder=run_dir,
        wait_s=wait,
        probes=probes,
        tls=tls_given(tls_cert, tls_key, tls_ca, tls_name),
    )
    return join_run(options, lambda text: print(f"outlast: {text}", file=sys.stderr, flush=True))
