"""`outlast config show`: every setting of a run, its value, and where the value came from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None, suggest_commands=False, no_args_is_help=True)


@app.callback()
def config() -> None:
    """Look at the configuration of a run."""


@app.command()
def show(
    file: Annotated[Path | None, typer.Option("--config", help="The run's TOML file, with a table [run].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> int:
    """Show each setting's value and origin: environment over file over default. A misspelt key is an error."""
    import msgspec

    from outlast.config import in_json, resolve

    resolved = resolve(cli={}, environ=os.environ, file=file)
    values = msgspec.to_builtins(resolved.config)
    if as_json:
        settings = {key: {"value": in_json(value), "origin": resolved.origins[key]} for key, value in values.items()}
        print(msgspec.json.format(msgspec.json.encode(settings), indent=2).decode())
    else:
        from outlast.observe import table

        print(table(("SETTING", "VALUE", "FROM"), [(k, _toml(v), resolved.origins[k]) for k, v in values.items()]))
    return 0


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
