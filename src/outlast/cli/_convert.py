"""`outlast convert`: a script for torchrun and DDP, as one of outlast's. Text only: nothing of it is run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from outlast.cli._examples import epilog
from outlast.convert import Conversion, convert
from outlast.errors import ConfigError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog=epilog("convert"))
def convert_script(
    script: Annotated[Path, typer.Argument(help="The script, a file of Python.", show_default=False)],
    processes: Annotated[
        int, typer.Option(min=1, help="How many processes torchrun started: a step has so many microbatches.")
    ] = 8,
    write: Annotated[
        bool,
        typer.Option("--write", help="Change the file, and keep what it was in FILE.orig. Only if nothing is left."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say what to change in a script that trains with torchrun and DDP, and do the mechanical part.

    Prints each line with what becomes of it and why, then the changes as a diff. What is not understood is listed as
    to be done by hand, and the exit code is then 1. Nothing is imported or run.
    """
    found = convert(_read(script), script.name, processes=processes)
    if write and found.complete:
        _write(script, found)
    if as_json:
        print(json.dumps(_fields(found, written=write and found.complete), indent=1))
    else:
        _show(found, script, write)
    raise typer.Exit(0 if found.complete else 1)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", remedy="give a file of Python") from error


def _write(path: Path, found: Conversion) -> None:
    """The old text first, then the new one in its place at once. ConfigError where the old one cannot be kept."""
    kept = path.with_name(path.name + ".orig")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        was = path.read_bytes()
        with kept.open("xb") as file:
            file.write(was)
        part.write_text(found.after, encoding="utf-8", newline="\r\n" if b"\r\n" in was else "\n")
        part.chmod(path.stat().st_mode)
        part.replace(path)
    except FileExistsError as error:
        raise ConfigError(f"{kept} is there already", did="nothing was changed", remedy="move it away") from error
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(
            f"{path} was not changed: {error}", remedy="see the error; the diff is printed without --write"
        ) from error


def _fields(found: Conversion, *, written: bool) -> dict[str, object]:
    remarks = [{"line": r.line, "kind": r.kind, "what": r.what, "why": r.why} for r in found.remarks]
    return {"complete": found.complete, "written": written, "remarks": remarks, "diff": found.diff()}


def _show(found: Conversion, script: Path, write: bool) -> None:
    for remark in found.remarks:
        what = remark.what if len(remark.what) <= 90 else remark.what[:87] + "…"
        print(f"{remark.line:>5}  {remark.kind:<8} {what}\n       {remark.why}")
    diff = found.diff()
    print("\n" + diff if diff else "\nNothing was converted: half a conversion would train something else.")
    count = sum(r.kind == "by hand" for r in found.remarks)
    if not found.complete:
        print(f"{count} to do by hand, marked above" + ("; the file was not changed" if write else "") + ".")
    elif write:
        print(f"{script} is converted, {script.name}.orig is what it was. Next: outlast run --replicas 2 {script}")
    else:
        print(f"Complete. Look at what is marked `check`, then: outlast convert {script} --write", file=sys.stdout)
