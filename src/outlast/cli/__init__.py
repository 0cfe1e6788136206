"""The command line: one module a command, loaded only when it is called, so that `outlast --help` is instant.

A command module `outlast/cli/_NAME.py` defines `app: typer.Typer`. Never import torch, numpy or rich at module level
here. What must answer at once is called without typer where it is asked plainly (`_plain_words.py`).
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click

    from outlast.errors import OutlastError

__all__ = ["COMMANDS", "command_of", "main"]

COMMANDS: dict[str, tuple[str, str]] = {
    # name: (module, one line)
    "demo": ("outlast.cli._demo", "Train, kill things, and show that nothing was lost."),
    "plan": ("outlast.cli._plan", "How reliable will this job be, and what should I do about it?"),
    "calibrate": ("outlast.cli._calibrate", "Measure what saves, deaths and restarts cost here, for the planner."),
    "run": ("outlast.cli._run", "Train a script on replicas that may fail."),
    "convert": ("outlast.cli._convert", "Make a script for torchrun and DDP one of outlast's."),
    "launch": ("outlast.cli._launch", "Write the file with which Slurm or Kubernetes starts a run."),
    "agent": ("outlast.cli._agent", "Bring this host into a run that was started on another."),
    "status": ("outlast.cli._status", "Show who is alive in a run, in which view, at which step."),
    "why": ("outlast.cli._why", "Tell what happened in a run, what it cost, what to do next."),
    "watch": ("outlast.cli._watch", "Follow a run in the terminal until it ends."),
    "serve": ("outlast.cli._serve", "Show runs in a browser, and to Prometheus."),
    "export": ("outlast.cli._export", "Write a run's figures for TensorBoard, W&B, or as JSON lines."),
    "save": ("outlast.cli._save", "Ask a run for a checkpoint now."),
    "stop": ("outlast.cli._stop", "Ask a run to save and stop."),
    "scale": ("outlast.cli._scale", "Have a run train with more or fewer replicas."),
    "drain": ("outlast.cli._drain", "Empty a host of a run, and keep it empty."),
    "evict": ("outlast.cli._evict", "Put another process in a replica's place."),
    "doctor": ("outlast.cli._doctor", "Check a host, or several, before a run."),
    "prove": ("outlast.cli._prove", "Put the claims, or your own script, to the test under faults."),
    "rules": ("outlast.cli._rules", "List the robust aggregation rules with their conditions."),
    "config": ("outlast.cli._config", "Show every setting of a run and where its value came from."),
    "health": ("outlast.cli._health", "Test a device, and keep a diary of what devices did wrong."),
    "ckpt": ("outlast.cli._ckpt", "List, show, verify, compare, convert and prune checkpoints."),
    "completion": ("outlast.cli._completion", "Print a script that completes commands in bash, zsh or fish."),
}
_MEANT = {
    "start": "run", "train": "run", "torchrun": "run", "dlrover-run": "run", "ft_launcher": "run",
    "deepspeed": "run", "accelerate": "run", "resume": "run", "ps": "status", "logs": "why", "top": "watch",
    "dashboard": "serve", "check": "doctor", "checkpoint": "ckpt", "checkpoints": "ckpt", "simulate": "plan",
    "join": "agent", "worker": "agent", "resize": "scale", "cordon": "drain", "kill": "evict", "restart": "evict",
    "slurm": "launch", "sbatch": "launch", "kubernetes": "launch",
}  # fmt: skip


def _help() -> str:
    rows = "\n".join(f"  {name:<10} {line}" for name, (_, line) in COMMANDS.items())
    return (
        "Usage: outlast COMMAND [ARGS]...\n\nPyTorch training that outlasts the machines it runs on.\n\n"
        f"Commands:\n{rows}\n\nOptions:\n  --version  Show the version.\n  --help     Show this message.\n\n"
        "outlast COMMAND --help says what a command takes."
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code (see reference/errors)."""
    from outlast.cli._streams import is_gone, let_go_of_the_broken, lost_output

    args = sys.argv[1:] if argv is None else argv
    try:
        code = _answer(args)
    except OSError as error:
        code = 1 if is_gone(error) else _tell(lost_output(error), args)
    broken = let_go_of_the_broken()
    if broken is None or code or is_gone(broken):
        return code if broken is None else code or 1
    return _tell(lost_output(broken), [])


def _answer(args: list[str]) -> int:
    """What is asked most is answered without loading any command."""
    if not args or args[0] in {"--help", "-h", "help"}:
        print(_help())
        return 0 if args else 2
    if args[0] == "--version":
        from outlast import __version__

        print(f"outlast {__version__}")
        return 0
    if args[0] not in COMMANDS:
        import difflib

        meant = _MEANT.get(args[0])
        close = [meant] if meant else difflib.get_close_matches(args[0], COMMANDS, n=1)
        print(f"outlast: no command {args[0]!r}." + (f" Did you mean {close[0]!r}?" if close else ""), file=sys.stderr)
        print("outlast --help lists the commands.", file=sys.stderr)
        return 2
    return _call(args)


def command_of(name: str) -> click.Command:
    """The command, loaded, with the examples that its help, and those of the commands in it, end with."""
    import typer

    from outlast.cli._examples import epilog

    command = typer.main.get_command(importlib.import_module(COMMANDS[name][0]).app)
    command.epilog = epilog(name)
    for inner, one in getattr(command, "commands", {}).items():
        one.epilog = one.epilog or epilog(f"{name} {inner}")
    return command


def _call(args: list[str]) -> int:
    """One command, whatever it raises; what it raises is told on standard error, and with `--json` also as JSON."""
    from outlast.cli._plain_words import read_plainly, run_plainly
    from outlast.errors import OutlastError

    try:
        plain = read_plainly(args)
        return run_plainly(args[0], plain) if plain is not None else _call_by_typer(args)
    except OutlastError as error:
        return _tell(error, args)
    except KeyboardInterrupt:
        return _tell_stopped()


def _call_by_typer(args: list[str]) -> int:
    from outlast.cli._streams import print_error, wants_json

    command = command_of(args[0])
    import click

    try:
        result = command(args[1:], prog_name=f"outlast {args[0]}", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        _show_commands(error)
        if wants_json(args):
            print_error(error.format_message(), error.exit_code)
        return error.exit_code
    except click.exceptions.Abort:
        return _tell_stopped()
    return result if isinstance(result, int) else 0


def _tell_stopped() -> int:
    print("outlast: stopped", file=sys.stderr)
    return 130


def _show_commands(error: click.ClickException) -> None:
    """Where a command in a group is unknown, say which there are."""
    group = getattr(getattr(error, "ctx", None), "command", None)
    known = getattr(group, "commands", {})
    if known and error.message.startswith("No such command"):
        print(f"There are: {', '.join(known)}.", file=sys.stderr)


def _tell(error: OutlastError, args: list[str]) -> int:
    from outlast.cli._streams import print_error, wants_json

    print(f"outlast: {error}", file=sys.stderr)
    if wants_json(args):
        print_error(error.message, error.exit_code, error)
    return error.exit_code
