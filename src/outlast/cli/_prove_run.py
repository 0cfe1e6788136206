"""`outlast prove run`: faults put into a run of anybody's script, and its bits beside an undisturbed run."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

from outlast.cli._prove_report import exit_code, print_report, write_page
from outlast.cli._script_checks import checked_script
from outlast.errors import ConfigError, EnvironmentFault, nearest

if TYPE_CHECKING:
    from outlast.cli._campaign_file import CampaignFile
    from outlast.prove.script_campaign import Baseline, ScriptCampaign, ScriptResult, StrikeRecord
    from outlast.prove.script_plan import ScriptFleet, Shape
    from outlast.prove.script_report import ProofReport

__all__ = ["Options", "check_file", "prove", "run", "script_of"]


class Options(NamedTuple):
    """What `run` and `gate` are told alike."""

    script: list[str]
    faults: str
    runs: int
    minutes: float
    seed: int
    replicas: int
    spares: int
    schedule: str
    agents: int
    exchange: str
    checkpoints: bool
    config: Path | None
    keep: Path | None
    shrink: int
    resume: Path | None = None
    hosts: int = 0
    slots: int = 0
    ranks: int = 1
    planned: Callable[[Shape], str] | None = None  # the schedule, once it is known how long a run takes


Resume = Annotated[Path | None, typer.Option(help="Keep results in this file, and go on after those that it has.")]


def run(
    script: Annotated[str | None, typer.Argument(help="the training script")] = None,
    args: Annotated[list[str] | None, typer.Argument(help="its own arguments")] = None,
    module: Annotated[str | None, typer.Option("-m", help="Run this module instead of a script.")] = None,
    faults: Annotated[str, typer.Option(help="Kinds of faults, with commas between; all if not said.")] = "",
    runs: Annotated[int, typer.Option(help="How many struck runs at most.")] = 4,
    minutes: Annotated[float, typer.Option(help="Begin no further run after so long; 0: no limit.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Fixes the strikes; -1 draws one, and says which.")] = -1,
    replicas: Annotated[int, typer.Option(help="Replicas of each struck run.")] = 2,
    spares: Annotated[int, typer.Option(help="Spares of each struck run.")] = 1,
    hosts: Annotated[int, typer.Option(help="On so many hosts, 3 or more: network namespaces, as root.")] = 0,
    slots: Annotated[int, typer.Option(help="Places for replicas on each host; 0: enough without one.")] = 0,
    ranks: Annotated[int, typer.Option(help="Processes of each replica, as for outlast run.")] = 1,
    schedule: Annotated[str, typer.Option(help="One run, struck as a failure printed it.")] = "",
    agents: Annotated[int, typer.Option(help="Agents, with --schedule.")] = 1,
    exchange: Annotated[str, typer.Option(help="auto, shm, c10d or hosts, with --schedule.")] = "auto",
    checkpoints: Annotated[bool, typer.Option(help="Whether it saves, with --schedule.")] = True,
    config: Annotated[Path | None, typer.Option(help="Settings for all runs, as for outlast run.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep all runs here; else only those with findings.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page with all of it here: one HTML file.")] = None,
    shrink: Annotated[int, typer.Option(help="Runs to spend on the shortest schedule of a failure; 0: none.")] = 8,
    resume: Resume = None,
    strict: Annotated[bool, typer.Option("--strict", help="Untrue numbers of status and why fail it, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Train SCRIPT undisturbed, alone and as a fleet, and then again and again under faults: processes are killed,
    stopped, aborted and starved, from outside at random moments and from inside at the phases of a step. Each run must
    end with the same bits, every microbatch computed with one result, nothing left behind; or be truly lost. A fault of
    the script's own is named. Exit code 8 if anything does not hold."""
    options = Options(
        script=script_of(script, module, args or [], "run"), faults=faults, runs=runs, minutes=minutes, seed=seed,
        replicas=replicas, spares=spares, schedule=schedule, agents=agents, exchange=exchange, checkpoints=checkpoints,
        config=config, keep=keep, shrink=shrink, resume=resume, hosts=hosts, slots=slots, ranks=ranks,
    )  # fmt: skip
    check_file(report)
    found = prove(options, quiet=as_json)
    write_page(found, report)
    _print(found, as_json)
    return exit_code(found, strict)


def check_file(path: Path | None) -> None:
    """That it can be written is known before hours have passed. ConfigError if it cannot."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"{path} cannot be written", remedy="a file in a directory that exists")


def script_of(script: str | None, module: str | None, args: list[str], command: str, log: str = "") -> list[str]:
    """What is trained. ConfigError if there is none, or none that Python could begin."""
    before = f"outlast prove {command} [OPTIONS]"
    usage = f"{before} {log}train.py ARGS…" + ("" if log else f", or {before} -m MODULE ARGS…")
    return checked_script(script, module, args, usage)


# --- the campaign ----------------------------------------------------------------------------------------------------
def prove(options: Options, *, quiet: bool) -> ProofReport:
    """All runs, one after the other, with a word on each on standard error."""
    from outlast.cli._campaign_file import campaign_file
    from outlast.prove.script_campaign import ScriptResult

    kinds, impossible = _possible(options, _kinds(options))
    with campaign_file(options.resume, ScriptResult, lambda result: result.seed, options.seed) as file:
        return _proved(options, file, kinds, impossible, quiet)


def _proved(
    options: Options,
    file: CampaignFile[ScriptResult],
    kinds: Sequence[str],
    impossible: Mapping[str, str],
    quiet: bool,
) -> ProofReport:
    from outlast.prove.script_campaign import ScriptCampaign
    from outlast.prove.script_plan import Shape
    from outlast.prove.script_report import proof_of

    results, seed = file.found, file.seed
    base = options.keep or Path(tempfile.mkdtemp(prefix="outlast-prove-"))
    base.mkdir(parents=True, exist_ok=True)
    shape = Shape(
        replicas=options.replicas, spares=options.spares, hosts=options.hosts, slots=options.slots, ranks=options.ranks
    )  # fmt: skip
    say = _said_to_nobody if quiet else _said
    say(f"seed {seed}; runs with findings are kept in {base}")
    campaign = ScriptCampaign(base, options.script, seed, shape, settings=options.config, keep=options.keep is not None)
    live = _Live(quiet)
    end_s = time.monotonic() + (options.minutes * 60.0 or 1e9)
    baseline = campaign.baseline(lambda name, record: live.now(f"undisturbed, {name}", record))
    live.clear()
    if not baseline.faults:
        say(_undisturbed(baseline))
        known = {result.number for result in results}
        for fleet in _fleets(options, seed, baseline, kinds, results):
            if results and time.monotonic() > end_s:
                break
            if fleet.number in known:
                continue
            file.add(_attempt(campaign, fleet, live))
            say(_ended(results[-1], len(results)))
    shrunk = _shrunk(options, campaign, baseline, results, live, say)
    untested = _untested(kinds, impossible, options.ranks)
    report = proof_of(options.script, seed, baseline, results, untested, shrunk)
    if not (report.failures or report.script_faults or report.numbers or options.keep):
        shutil.rmtree(base, ignore_errors=True)
    return report


def _shrunk(
    options: Options,
    campaign: ScriptCampaign,
    baseline: Baseline,
    results: Sequence[ScriptResult],
    live: _Live,
    say: Callable[[str], None],
) -> dict[int, ScriptResult]:
    """The first run that failed, with as few strikes as still make it fail."""
    from outlast.prove.schedule_shrinking import shrink
    from outlast.prove.script_plan import planned, schedule_of

    first = next((result for result in results if result.outcome == "wrong"), None)
    if first is None or options.shrink <= 0:
        return {}
    checks, found = {finding.check for finding in first.findings}, [first]

    def fails(fleet: ScriptFleet) -> bool:
        result = _attempt(campaign, fleet, live)
        same = bool(checks & {finding.check for finding in result.findings})
        say(f"  shrinking, {len(fleet.strikes) + len(fleet.faults)} strikes: {'it fails' if same else 'it holds'}")
        if same:
            found.append(result)
        return same

    told = (first.schedule, first.agents, first.exchange, first.keeps)
    least = shrink(planned(first.number, first.seed, baseline.shape, *told), fails, options.shrink)
    wanted = schedule_of(least)
    return {first.number: next(result for result in reversed(found) if result.schedule == wanted)}


def _attempt(campaign: ScriptCampaign, fleet: ScriptFleet, live: _Live) -> ScriptResult:
    result = campaign.attempt(fleet, lambda record: live.now(str(fleet), record))
    live.clear()
    return result


def _kinds(options: Options) -> list[str]:
    from outlast.prove.script_plan import KINDS, read_schedule

    if options.runs < 1 or options.minutes < 0 or options.seed < -1 or options.replicas < 1 or options.spares < 0:
        raise ConfigError(
            f"--runs {options.runs} --minutes {options.minutes:g} --seed {options.seed} --replicas {options.replicas} "
            f"--spares {options.spares} cannot be",
            remedy="--runs and --replicas 1 or more, the others 0 or more",
        )
    if (
        options.keep is not None
        and options.keep.exists()
        and (not options.keep.is_dir() or any(options.keep.iterdir()))
    ):
        raise ConfigError(f"--keep {options.keep} is not an empty directory", remedy="give a new directory")
    if options.slots < 0 or 0 < options.slots * options.hosts < options.replicas + options.spares:
        raise ConfigError(
            f"--slots {options.slots} on {options.hosts} hosts do not hold {options.replicas} + {options.spares}",
            remedy="more --slots, or 0 for as many as hold all when a host is gone",
        )
    if options.ranks not in (1, 2, 4, 8):
        raise ConfigError(f"--ranks {options.ranks} cannot be", remedy="1, 2, 4 or 8 processes for each replica")
    if options.hosts and not (3 <= options.hosts <= 16 and options.replicas > 1):
        raise ConfigError(
            f"--hosts {options.hosts} --replicas {options.replicas} cannot be",
            remedy="3 to 16 hosts, 2 replicas or more: the first host is not struck, and one may be gone",
        )
    read_schedule(options.schedule)
    names = [name.strip() for name in options.faults.split(",") if name.strip()] or list(KINDS)
    for name in names:
        if name not in KINDS:
            remedy = nearest(name, KINDS, f"one or more of {', '.join(KINDS)}", both=True)
            raise ConfigError(f"--faults {options.faults!r}: {name!r} is none", remedy=remedy)
    return names


def _fleets(
    options: Options, seed: int, baseline: Baseline, kinds: Sequence[str], results: Sequence[ScriptResult]
) -> Iterator[ScriptFleet]:
    """One after the other, as `results` grow."""
    from outlast.prove.script_plan import drawn, paced, planned

    schedule = options.planned(baseline.shape) if options.planned is not None else options.schedule
    if not schedule:
        for number in range(options.runs):
            whole_s = [result.seconds for result in results if result.steps == baseline.shape.steps]
            yield drawn(number, seed, paced(baseline.shape, whole_s), kinds)
        return
    told = (schedule, options.agents, options.exchange, options.checkpoints)
    for number in range(options.runs):
        yield planned(number, seed, baseline.shape, *told)


def _possible(options: Options, kinds: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Those of `kinds` that can be put into a run on this machine, and why the others cannot. EnvironmentFault where
    one of these was asked for by its name."""
    from outlast.prove.script_plan import KINDS, strikes_of
    from outlast.prove.script_surroundings import cannot_be_struck

    reasons = {kind: reason for kind in KINDS if (reason := _not_here(kind, options.hosts) or cannot_be_struck(kind))}
    asked = {kind for kind in kinds if options.faults.strip()} | strikes_of(options.schedule)
    for kind in sorted(asked & reasons.keys()):
        raise EnvironmentFault(
            f"{kind} cannot be put into this run: {reasons[kind]}",
            did="nothing was started",
            remedy="--faults without it",
        )
    return [kind for kind in kinds if kind not in reasons], {k: r for k, r in reasons.items() if k in kinds}


def _not_here(kind: str, hosts: int) -> str:
    """Why a run on so many hosts cannot be struck by this kind."""
    from outlast.prove.script_plan import KINDS

    if KINDS[kind].roles == ("host",) and not hosts:
        return "the run is on one host; --hosts 3 puts it on three"
    return (
        "a disk that all hosts share is not this campaign's to strike" if "disk" in KINDS[kind].roles and hosts else ""
    )


def _untested(kinds: Sequence[str], impossible: Mapping[str, str], ranks: int) -> list[tuple[str, str]]:
    from outlast.prove.script_plan import KINDS, RANK_ALONE

    told = [(RANK_ALONE, "each replica is one process; --ranks 2 gives it two")] if ranks == 1 else []
    told += [(name, f"cannot be put into this run: {reason}") for name, reason in impossible.items()]
    return told + [(n, "left out by --faults") for n in KINDS if n not in kinds and n not in impossible]


# --- what is shown ---------------------------------------------------------------------------------------------------
def _said(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _said_to_nobody(_: str) -> None:
    pass


class _Live:
    """One line on a terminal that says what happens now."""

    def __init__(self, quiet: bool) -> None:
        self._shown = sys.stderr.isatty() and not quiet
        self._width = 0

    def now(self, what: str, record: StrikeRecord) -> None:
        if self._shown:
            text = f"{what}: {time.monotonic() - record.started_s:.0f} s, {len(record.done)} strikes"[:118]
            print(f"\r{text:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(text)

    def clear(self) -> None:
        if self._width:
            print(f"\r{'':{self._width}}\r", end="", file=sys.stderr, flush=True)


def _undisturbed(baseline: Baseline) -> str:
    shape = baseline.shape
    return (
        f"undisturbed: {shape.steps} steps of {baseline.microbatches} microbatches, {shape.length_s:.1f} s; 1 replica "
        f"and {shape.replicas} end with the same bits, {baseline.fingerprint[:16]}"
    )


def _ended(result: ScriptResult, count: int) -> str:
    struck = len(result.done) + len(result.phases)
    checks = ", ".join(sorted({finding.check for finding in (*result.findings, *result.numbers)}))
    return f"run {count}: {struck} strikes, {result.seconds:.1f} s: {result.outcome}{f' ({checks})' if checks else ''}"


def _print(report: ProofReport, as_json: bool) -> None:
    if as_json:
        print(json.dumps(msgspec.to_builtins(report)))
    else:
        print_report(report)
