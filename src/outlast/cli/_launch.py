"""`outlast launch`: write the file with which an engine starts a run on several hosts. It starts nothing itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from outlast.cli._launch_files import EngineJob, slurm_script
from outlast.cli._launch_kubernetes import KubernetesJob, kubernetes_manifests
from outlast.config import TlsFiles
from outlast.errors import ConfigError

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)
_TEXT = {"allow_interspersed_args": False, "ignore_unknown_options": False}
_Command = Annotated[list[str], typer.Argument(help="the training script and its arguments, or -- -m MODULE ARGS")]
_Nodes = Annotated[str, typer.Option(help="hosts, MIN or MIN:MAX")]
_Slots = Annotated[int, typer.Option(min=1, help="replicas that may run on a host")]
_Replicas = Annotated[int | None, typer.Option(min=1, help="of the run; by default all slots of MIN hosts")]
_Spares = Annotated[int, typer.Option(min=0, help="replicas kept caught up beside them")]
_Options = Annotated[str, typer.Option(help="further options of outlast run, in one word")]
_Name = Annotated[str, typer.Option(help="of the job")]
_Out = Annotated[Path | None, typer.Option(help="the file to write; standard output otherwise")]
_Json = Annotated[bool, typer.Option("--json", help="one JSON object with the file's text")]


@app.callback()
def launch() -> None:
    """Write what an engine needs to start a run on several hosts."""


@app.command("slurm", context_settings=_TEXT)
def slurm(
    command: _Command,
    nodes: _Nodes = "2",
    slots: _Slots = 1,
    replicas: _Replicas = None,
    spares: _Spares = 0,
    options: _Options = "",
    name: _Name = "outlast",
    cpus: Annotated[int, typer.Option(min=0, help="processors a node; 0 leaves the site's default")] = 0,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs a node")] = 0,
    time: Annotated[str, typer.Option(help="limit, as Slurm has it: 1-00:00:00")] = "",
    partition: Annotated[str, typer.Option(help="of the site")] = "",
    python: Annotated[str, typer.Option(help="the interpreter on the nodes")] = "python",
    tls_cert: Annotated[str, typer.Option(help="TLS: each node's certificate, a path there; {node}: its name")] = "",
    tls_key: Annotated[str, typer.Option(help="its key, mode 600 on the nodes")] = "",
    tls_ca: Annotated[str, typer.Option(help="the authorities of all nodes' certificates")] = "",
    tls_name: Annotated[str, typer.Option(help="the name that they all bear; else addresses")] = "",
    out: _Out = None,
    as_json: _Json = False,
) -> int:
    """Write a script for sbatch: a run on the job's nodes that goes on when one of them fails."""
    _look_at(command)
    shape = _shape(command, nodes, slots, replicas, spares, options)
    tls = TlsFiles.of({"cert": tls_cert, "key": tls_key, "ca": tls_ca, "name": tls_name})
    job = EngineJob(
        name=name, cpus=cpus, gpus=gpus, time=time, partition=partition, python=python, tls=tls, **shape
    )  # fmt: skip
    return _tell(slurm_script(job), out, as_json)


@app.command("kubernetes", context_settings=_TEXT)
def kubernetes(
    command: _Command,
    image: Annotated[str, typer.Option(help="with outlast, torch and the script")],
    nodes: _Nodes = "2",
    slots: _Slots = 1,
    replicas: _Replicas = None,
    spares: _Spares = 0,
    options: _Options = "",
    name: _Name = "outlast",
    cpus: Annotated[int, typer.Option(min=0, help="processors a pod; 0 sets no limit")] = 0,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs a pod")] = 0,
    python: Annotated[str, typer.Option(help="the interpreter in the image")] = "python",
    tls_secret: Annotated[str, typer.Option(help="TLS: a Secret with tls.crt, tls.key and ca.crt")] = "",
    tls_name: Annotated[str, typer.Option(help="the name that its certificate bears")] = "",
    kind: Annotated[str, typer.Option(help="jobset, or trainjob with a runtime of its own")] = "jobset",
    out: _Out = None,
    as_json: _Json = False,
) -> int:
    """Write manifests for kubectl: one pod keeps the run's record and trains, the others join it."""
    shape = _shape(command, nodes, slots, replicas, spares, options)
    job = KubernetesJob(
        name=name, cpus=cpus, gpus=gpus, image=image, python=python, tls_secret=tls_secret, tls_name=tls_name, **shape
    )
    return _tell(kubernetes_manifests(job, kind), out, as_json)


def _look_at(command: list[str]) -> None:
    """A script that Python could not begin is refused. One that is not here may be where the job will be."""
    from outlast.cli._script_checks import checked_script

    if Path(command[0]).is_file():
        checked_script(command[0], None, [], usage="outlast launch slurm [options] SCRIPT [ARGS]")
    elif command[0] != "-m":
        print(f"outlast: {command[0]} is not here; it must be where sbatch is called", file=sys.stderr)


def _shape(
    command: list[str], nodes: str, slots: int, replicas: int | None, spares: int, options: str
) -> dict[str, Any]:
    """What both engines are told alike."""
    low, _, high = nodes.partition(":")
    if not low.isdigit() or not (high or low).isdigit() or not 1 <= int(low) <= int(high or low):
        raise ConfigError(f"nodes = {nodes!r}", remedy="MIN or MIN:MAX, such as 3 or 2:4")
    least, most = int(low), int(high or low)
    number = replicas if replicas is not None else max(1, least * slots - spares)
    if number + spares > most * slots:
        raise ConfigError(
            f"{number} replicas and {spares} spares need more than {most} nodes with {slots} slots",
            remedy="more nodes or slots, or fewer replicas",
        )
    told = ("--replicas", str(number), "--spares", str(spares), *_further(options, number))
    return {"nodes": (least, most), "slots": slots, "command": tuple(command), "options": told}


_TOLD = ("replicas", "spares", "nnodes", "slots", "endpoint", "host", "secret_file", "probes")


def _further(text: str, replicas: int) -> list[str]:
    """Options of `outlast run`, refused here where it would refuse them, and not when the job has waited for nodes."""
    import shlex

    import click

    from outlast.cli import command_of
    from outlast.config import RunConfig, resolve

    try:
        words = shlex.split(text)
        found = command_of("run").make_context("outlast run", [*words, "SCRIPT"]).params
    except (ValueError, click.ClickException, click.exceptions.Exit) as error:
        what = error.format_message() if isinstance(error, click.ClickException) else str(error) or "asks for help"
        raise ConfigError(f"--options {text!r}: {what}", remedy="outlast run --help lists them") from error
    given = {name: value for name, value in found.items() if value not in (None, False, "", [])}
    if given.pop("script", None) != "SCRIPT" or found["module"]:
        raise ConfigError(f"--options {text!r} hold a script", remedy="the script is the last of the command")
    for name in _TOLD:
        if name in given:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} in --options", remedy="what is written says it: see outlast launch --help")
    if "config" not in given:  # which may be where the job will be
        known = {name for name in RunConfig.__struct_fields__ if not name.startswith("tls_")}  # which are refused below
        settings = {name: value for name, value in given.items() if name in known}
        resolve(cli=settings | {"replicas": replicas}, environ={})
    return words


def _tell(text: str, out: Path | None, as_json: bool) -> int:
    if out is not None:
        out.write_text(text, encoding="utf-8")
    if as_json:
        print(json.dumps({"file": str(out) if out else None, "text": text}))
    else:
        print(f"outlast: {out} is written" if out else text)
    return 0
