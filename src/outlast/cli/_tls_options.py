"""Options of commands that speak with a run on other hosts by TLS: this host's certificate, key and authorities."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["TLS_CA", "TLS_CERT", "TLS_KEY", "TLS_NAME", "tls_given"]

TLS_CERT = Annotated[str, typer.Option(help="this host's certificate, PEM; else OUTLAST_TLS_CERT")]
TLS_KEY = Annotated[str, typer.Option(help="its key, PEM, mode 600; else OUTLAST_TLS_KEY")]
TLS_CA = Annotated[str, typer.Option(help="the authorities of the run's certificates, PEM; else OUTLAST_TLS_CA")]
TLS_NAME = Annotated[str, typer.Option(help="the name that they all bear; else OUTLAST_TLS_NAME, else addresses")]


def tls_given(cert: str, key: str, ca: str, name: str) -> Any:
    """What was said here and in the environment, as `outlast.config.TlsFiles`; None for nothing. ConfigError."""
    from outlast.config import TlsFiles

    said = {"cert": cert, "key": key, "ca": ca, "name": name}
    said = {part: value or os.environ.get(f"OUTLAST_TLS_{part.upper()}", "") for part, value in said.items()}
    files = TlsFiles.of(said)
    if files is None:
        return None
    places = {part: str(Path.cwd() / getattr(files, part)) for part in ("cert", "key", "ca")}
    return files._replace(**places)
