"""`outlast convert`: a script for torchrun and DDP, as one of outlast's. Text only: nothing of it is run."""

from __future__ import annotations

import json
import os
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
    output: Annotated[
        Path | None, typer.Option(help="A new file for the result, also where something is left to do by hand.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say what to change in a script that trains with torchrun and DDP, and do the mechanical part.

    Prints each line with what becomes of it and why, then the changes as a diff. What is not understood is listed as
    to be done by hand, and the exit code is then 1. Nothing is imported or run.
    """
    found = convert(_read(script), script.name, processes=processes)
    created = written = False
    failed = None
    try:
        if output is not None:  # before the script is changed
            _create(output, found, _newline(script.read_bytes()))
            created = True
        if write and found.complete:
            _write(script, found)
            written = True
    except ConfigError as error:
        failed = error  # what was found is shown all the same, but to programs, which read one answer
    if failed is not None and as_json:
        raise failed
    if as_json:
        print(json.dumps(_fields(found, written=written), indent=1))
    else:
        _show(found)
        _say_what_follows(found, script, processes, write=write, written=written)
        if created:
            print(f"{output} is what was converted" + ("." if found.complete else ", with that still to do."))
    if failed is not None:
        raise failed
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
        part.write_text(found.after, encoding="utf-8", newline=_newline(was))
        part.chmod(path.stat().st_mode)
        part.replace(path)
    except FileExistsError as error:
        raise ConfigError(f"{kept} is there already", did="nothing was changed", remedy="move it away") from error
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(
            f"{path} was not changed: {error}", remedy="see the error; the diff is printed without --write"
        ) from error


def _create(path: Path, found: Conversion, newline: str) -> None:
    """The result as a new file, whole or not at all. ConfigError where there is one, or where it cannot be."""
    opened = False
    try:
        with path.open("x", encoding="utf-8", newline=newline) as file:
            opened = True
            file.write(found.after)
    except OSError as error:
        if opened:
            path.unlink(missing_ok=True)
        raise ConfigError(
            f"{path} was not written: {error}", did="nothing was changed", remedy="give --output a new file"
        ) from error


def _newline(text: bytes) -> str:
    """How its lines end."""
    return "\r\n" if b"\r\n" in text else "\n"


def _fields(found: Conversion, *, written: bool) -> dict[str, object]:
    remarks = [{"line": r.line, "kind": r.kind, "what": r.what, "why": r.why} for r in found.remarks]
    return {"complete": found.complete, "written": written, "remarks": remarks, "diff": found.diff()}


def _show(found: Conversion) -> None:
    for remark in found.remarks:
        what = remark.what if len(remark.what) <= 90 else remark.what[:87] + "…"
        print(f"{remark.line:>5}  {remark.kind:<8} {what}\n       {remark.why}")
    diff = found.diff()
    print("\n" + diff if diff else "\nNothing was converted.")


def _say_what_follows(found: Conversion, script: Path, processes: int, *, write: bool, written: bool) -> None:
    """The next command, for as many processes as were told."""
    count = sum(r.kind == "by hand" for r in found.remarks)
    if not found.complete:
        kept = "; the file was not changed" if write else ""
        print(f"{count} to do by hand, marked above; until then it would train something else{kept}.")
    elif written:
        following = f"outlast run --replicas {processes} {script}"
        print(f"{script} is converted, {script.name}.orig is what it was. Next: {following}")
    elif not write:
        following = f"outlast convert {script} --processes {processes} --write"
        print(f"Complete. Look at what is marked `check`, then: {following}")
