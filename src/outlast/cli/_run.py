"""`outlast run`: train a script on replicas that may fail."""

from __future__ import annotations

import os
import secrets
import stat
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import typer
from typer.core import TyperCommand

from outlast.cli._of_others import hint_for
from outlast.cli._run_checks import argument_for, check_run_dir, tell_of_own_options
from outlast.cli._runs import DEFAULT_RUNS
from outlast.cli._script_checks import checked_script
from outlast.errors import ConfigError

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_FLAGS = frozenset({"--json", "--help", "--serve", "--init-strict", "--no-init-strict"})
_TRY_S = 10.0  # for a disk that answers
_LOG_TAIL_BYTES = 2000


class _Command(TyperCommand):
    """After `-m MODULE`, as after SCRIPT, all that follows belongs to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] not in ("-m", "--"):
            at += 1 if args[at] in _FLAGS or "=" in args[at] else 2
        if args[at : at + 1] == ["-m"] and len(args) > at + 1:
            args = [*args[: at + 2], "--", *args[at + 2 :]]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if argument := argument_for(error.option_name):
                said = f"{error.option_name} is said in the script, as an argument: protect({argument}=…)"
                raise click.UsageError(said, ctx) from error
            hint = hint_for(error.option_name)
            if hint is None:
                raise
            raise click.UsageError(f"{error.option_name} is another launcher's: {hint}", ctx) from error


@app.command(cls=_Command, context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
def run(
    script: Annotated[str | None, typer.Argument(help="the training script")] = None,
    args: Annotated[list[str] | None, typer.Argument(help="its own arguments")] = None,
    module: Annotated[str | None, typer.Option("-m", help="run this module instead of a script")] = None,
    replicas: Annotated[int | None, typer.Option(help="full copies of the training state, one process each")] = None,
    ranks: Annotated[str | None, typer.Option(metavar="INTEGER", help="processes of a replica, for run.mesh()")] = None,
    spares: Annotated[str | None, typer.Option(help="replicas kept caught up beside the run, or auto")] = None,
    agents: Annotated[int | None, typer.Option(help="supervising processes on this machine")] = None,
    endpoint: Annotated[str | None, typer.Option(help="HOST:PORT of this machine, for a run on several")] = None,
    nnodes: Annotated[str | None, typer.Option(help="hosts, MIN or MIN:MAX; others join by outlast agent")] = None,
    slots: Annotated[int | None, typer.Option(help="replicas that may run on this host; 0 for any number")] = None,
    host: Annotated[str | None, typer.Option(help="this host's name in the run; its own by default")] = None,
    secret_file: Annotated[Path | None, typer.Option(help="the run's secret; else made, or OUTLAST_SECRET")] = None,
    record: Annotated[str | None, typer.Option(help="sqlite, or etcd://HOST:PORT,… that all hosts share")] = None,
    tls_cert: Annotated[str | None, typer.Option(help="TLS between hosts: this one's certificate, PEM")] = None,
    tls_key: Annotated[str | None, typer.Option(help="its key, PEM, mode 600")] = None,
    tls_ca: Annotated[str | None, typer.Option(help="the authorities of all hosts' certificates, PEM")] = None,
    tls_name: Annotated[str | None, typer.Option(help="the name that they all bear; else addresses")] = None,
    exchange: Annotated[str | None, typer.Option(help="auto, shm, c10d or hosts")] = None,
    guards: Annotated[str | None, typer.Option(help="script, default, full or off: what is watched")] = None,
    aggregation: Annotated[str | None, typer.Option(help="mean, or a robust rule; outlast rules lists them")] = None,
    f: Annotated[int | None, typer.Option("--f", help="how many rows may lie")] = None,
    pre: Annotated[str | None, typer.Option(help="steps in front of the rule: nnm, bucketing, clip")] = None,
    rows: Annotated[int | None, typer.Option(help="groups of microbatches that the rule sees; one a replica")] = None,
    on_shortfall: Annotated[str | None, typer.Option(help="too few rows are independent: wait, stop or lower")] = None,
    audit: Annotated[str | None, typer.Option(help="share of microbatches computed twice, 0 to 1, or auto")] = None,
    threads: Annotated[int | None, typer.Option(help="intra-op threads of each replica")] = None,
    port: Annotated[int | None, typer.Option(help="the coordinator's port on loopback; 0 takes a free one")] = None,
    checkpoint_dir: Annotated[str | None, typer.Option(help="where to keep checkpoints: a directory or a URL")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="steps between saves; 0 lets outlast choose")] = None,
    resume: Annotated[str | None, typer.Option(help="auto, never, or a directory or URL to begin from")] = None,
    init_from: Annotated[str | None, typer.Option(help="weights to begin step 0 with, by name")] = None,
    init_strict: Annotated[bool | None, typer.Option(help="whether all their names must fit")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML with a table [run]; see outlast config show")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="a new directory for journal and logs")] = None,
    probes: Annotated[str, typer.Option(help="PORT or HOST:PORT at which /healthz and /ready are answered")] = "",
    serve: Annotated[bool, typer.Option("--serve", help="show the run in a browser while it lasts")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object at the end, nothing else")] = False,
) -> int:
    """Train SCRIPT on replicas that may fail; give it ARGS. Exit code: the run's (reference/errors)."""
    given = dict(locals())  # those that are settings bear their names
    check_run_dir(run_dir)
    resolved, command = _resolved(given, config), _command(script, module, args or [])
    tell_of_own_options(command, _own_options())
    folder = run_dir or _new_directory()
    _serve(folder) if serve else None
    secret = _secret(secret_file, folder, resolved)
    code = launch(resolved, command, folder, as_json=as_json, host=host, secret=secret, probes=probes)
    _remember(folder)
    return code


def _own_options() -> set[str]:
    """The options of `outlast run` that have names of their own, as they are written."""
    from typer.main import get_command

    found = {name for param in get_command(app).params if isinstance(param, click.Option) for name in param.opts}
    return {name for name in found if name.startswith("--")}


def _secret(file: Path | None, folder: Path, resolved: Any) -> bytes | None:
    """The run's secret where it was given. Where hosts are to join and none was, a new one, in the run directory."""
    from outlast.runtime.host.joined import read_secret

    # That of a run around this one, whose replica may have started it, is none of a run on one host.
    secret = read_secret(file, os.environ.get("OUTLAST_SECRET") if resolved.config.endpoint else None)
    if secret is not None or not resolved.config.endpoint:
        return secret
    secret = secrets.token_bytes(32)
    folder.mkdir(parents=True, exist_ok=True)
    with open(os.open(folder / "secret", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as out:
        out.write(secret.hex() + "\n")
    return secret


def _remember(folder: Path) -> None:
    """What the run tells about its devices, into the diary if one was named; no run ends otherwise for it."""
    if not os.environ.get("OUTLAST_DIARY"):
        return
    import socket

    from outlast import health
    from outlast.errors import OutlastError

    try:
        health.remember_run(health.Diary(health.default_diary()), folder, socket.gethostname())
    except (OutlastError, OSError) as error:
        print(f"outlast: the run is not in the diary: {error}", file=sys.stderr)


def _resolved(given: dict[str, Any], file: Path | None) -> Any:
    """The run's settings, from everywhere, checked."""
    from outlast.config import RunConfig, resolve

    given = {key: value for key, value in given.items() if key in RunConfig.__struct_fields__}
    if os.environ.get("OUTLAST", "on").lower() == "off":
        raise ConfigError(
            "OUTLAST=off in the environment makes a plain loop of the script: there is nothing to replicate",
            remedy="unset OUTLAST, or run the script without outlast run",
        )
    resolved = resolve(cli=given, environ=os.environ, file=file)
    for check in (_check_rule, _check_audit, _check_places, _check_record):
        check(resolved.config)
    return resolved


def _serve(folder: Path) -> None:
    from outlast.cli._serve import serve_beside

    serve_beside(folder)


def _check_rule(config: Any) -> None:
    """What a rule cannot keep is refused before anything is started; the rest of it when the script is known."""
    from outlast.core.policy import check_choice

    if config.aggregation != "mean":
        steps = [step.strip() for step in config.pre.split(",") if step.strip()]
        check_choice(config.aggregation, config.rows or config.replicas, config.f, steps)


def _check_record(config: Any) -> None:
    if config.record != "sqlite":
        from outlast.journal import check_reachable

        check_reachable(config.record, os.environ)


def _check_audit(config: Any) -> None:
    from outlast.core.policy import audit_share

    if config.audit != "script":
        audit_share(config.audit, config.replicas)


def _check_places(config: Any) -> None:
    """Local places that cannot be right are told now, not by every replica once it has loaded."""
    keep, begin = config.checkpoint_dir, config.resume
    if keep and "://" not in keep and _kind_of(keep, "checkpoint_dir") == "file":
        raise ConfigError(f"checkpoint_dir {keep} is no directory", remedy="give a directory, or a URL")
    if begin not in ("auto", "never") and "://" not in begin:
        place, at, number = begin.rpartition("@")
        if not at or not number.isdigit() or _kind_of(begin, "resume") == "directory":
            place = begin
        if (kind := _kind_of(place, "resume")) != "directory":
            what = f"{place} is no directory" if kind else f"there is no directory {begin}"
            raise ConfigError(f"resume: {what}", remedy="auto, never, DIR, DIR@N, or a URL")
    if keep:  # it is made here, so only where nothing else is wrong with what was asked
        from outlast.checkpoint.room import tried

        tried(keep, 0, _TRY_S)
    _check_beginning(config)


def _kind_of(path: str, setting: str) -> Literal["directory", "file", ""]:
    """What lies there; "" for nothing. Raises ConfigError where that cannot be seen."""
    try:
        return "directory" if stat.S_ISDIR(os.stat(path).st_mode) else "file"
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return ""
    except OSError as error:
        raise ConfigError(
            f"{setting}: {path} cannot be read: {error.strerror}", remedy="see its name, its owner and its mode"
        ) from error


def _check_beginning(config: Any) -> None:
    from outlast.runtime.saving.contents import check_holds_state, check_holds_weights, place_and_number

    keep, begin, weights = config.checkpoint_dir, config.resume, config.init_from
    if weights and begin not in ("auto", "never"):
        raise ConfigError(f"resume = {begin!r} and init_from = {weights!r}", remedy="one of them: go on, or begin anew")
    if weights and "://" not in weights and not _kind_of(weights, "init_from"):
        place, number = place_and_number(weights)
        if number is None or _kind_of(place, "init_from") != "directory":
            raise ConfigError(
                f"init_from: there is no {weights}", remedy="a directory, DIR@N, a URL, or a safetensors file"
            )
    if weights:
        check_holds_weights(weights)
    if begin != "never" and not (begin == "auto" and (weights or not keep)):
        check_holds_state(keep if begin == "auto" else begin, asked=begin != "auto")


def _command(script: str | None, module: str | None, args: list[str]) -> list[str]:
    usage = "outlast run [OPTIONS] train.py ARGS…, or outlast run [OPTIONS] -m MODULE ARGS…"
    return [sys.executable, *checked_script(script, module, args, usage)]


def launch(
    resolved: Any,
    command: list[str],
    run_dir: Path,
    *,
    as_json: bool,
    host: str | None = None,
    secret: bytes | None = None,
    probes: str = "",
) -> int:
    """Run to the end with the live view; returns the exit code."""
    from outlast.cli._follow import Follower
    from outlast.cli._streams import unheard
    from outlast.observe import Live
    from outlast.runtime.host.launcher import Launcher
    from outlast.runtime.host.probes import Probes

    answering = Probes(probes)
    launcher = Launcher(resolved=resolved, command=command, run_dir=run_dir, began_at_s=_began_at_s())
    launcher.host, launcher.secret = host or launcher.host, secret or launcher.secret
    live = Live(run_dir)
    follower = Follower(run_dir, live.say)

    def watch(why_out: str) -> None:
        answering.turned(why_out)
        if as_json:
            return
        with unheard():
            live.poll()
            follower.poll()

    def ready() -> None:
        with unheard():
            print(_starting(resolved.config, command, run_dir), flush=True)
            if launcher.awaits:
                print(f"outlast: {launcher.awaits} of other hosts: {_joining(launcher.endpoint, run_dir)}", flush=True)

    def ended(exit_code: int) -> None:
        with unheard():
            if not as_json:
                live.poll()
                follower.close()
            live.close()
        with unheard():
            _report(run_dir, exit_code, as_json, follower.shown)

    launcher.ended, launcher.watch = ended, watch
    if not as_json:
        launcher.ready = ready
    return launcher.run()


def _starting(config: Any, command: list[str], run_dir: Path) -> str:
    """What is being started, where its output is, and how to look at it."""
    what = f"-m {command[2]}" if command[1] == "-m" else command[1]
    spares = f" and {config.num_spares} spare{'s' * (config.num_spares != 1)}" if config.num_spares else ""
    ranks = f" of {config.ranks} ranks each" if config.ranks > 1 else ""
    count = f"{config.replicas} replica{'s' * (config.replicas != 1)}{ranks}{spares}"
    return (
        f"outlast: starting {count} of {what} in {run_dir}; each one's output is in its logs/, the first one's below\n"
        f"outlast: in another terminal: outlast watch {run_dir} (or status, why, serve); Ctrl-C here stops the run"
    )


def _joining(endpoint: str, run_dir: Path) -> str:
    made = run_dir / "secret"
    return f"outlast agent --join {endpoint}" + (f" --secret-file {made}" if made.exists() else "")


def _began_at_s() -> float:
    """When this process began, in Unix seconds."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def _report(run_dir: Path, exit_code: int, as_json: bool, shown: Collection[str]) -> None:
    import json

    from outlast.core import events
    from outlast.journal import Journal

    with Journal.open_reader(run_dir) as journal:
        found = [entry.event for entry in journal.events(kinds=[events.RunFinished])]
    last = found[-1] if found else None
    detail = last.detail if isinstance(last, events.RunFinished) else _coordinator_s_end(run_dir)
    if as_json:
        print(json.dumps({"run_dir": str(run_dir), "exit_code": exit_code, "detail": detail}), flush=True)
    elif exit_code:
        print(f"outlast: the run ended with code {exit_code}: {_not_yet_shown(detail, shown)}", file=sys.stderr)
        print(f"outlast: outlast why {run_dir}", file=sys.stderr)


def _not_yet_shown(detail: str, shown: Collection[str]) -> str:
    """A traceback that the script's output already ended with is not told twice."""
    lines = [line for line in detail.splitlines() if line.strip()]
    if len(lines) > 1 and lines[-1] in shown:
        first = lines[0].removesuffix(":")
        if any(line.startswith("Traceback") for line in lines):
            return f"{first} (its traceback is above)"
        told = "" if lines[1] in shown else f": {lines[1].partition(';')[0]}"  # an error of ours begins with its words
        return f"{first}{told} (its output is above)"
    return detail.strip()


def _coordinator_s_end(run_dir: Path) -> str:
    try:
        tail = (run_dir / "logs" / "coordinator.log").read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace")
    except OSError:
        tail = ""
    return f"the coordinator could not be kept alive; the end of its log:\n{tail}".strip()


def _new_directory() -> Path:
    import datetime

    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    base = Path(DEFAULT_RUNS)
    for number in range(1000):
        candidate = base / (stamp if number == 0 else f"{stamp}-{number}")
        if not candidate.exists():
            return candidate
    raise ConfigError(f"too many runs under {base} in one second", remedy="give --run-dir")
