"""`outlast prove faults`: real fleets with injected faults, and their bits beside an undisturbed run."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.errors import ConfigError

if TYPE_CHECKING:
    from outlast.prove import Result

__all__ = ["faults"]

_BAD = ("different", "failed")


def faults(
    samples: Annotated[
        int, typer.Option(help="How many fleets; with as many as there are phases, each is struck.")
    ] = 8,
    seed: Annotated[int, typer.Option(help="Fixes which fleets, and which faults in them.")] = 0,
    only: Annotated[int, typer.Option(help="One fleet of the campaign, by its number.")] = -1,
    keep: Annotated[Path | None, typer.Option(help="Where all runs are kept; else only those that failed are.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Fleets of 1 to 8 replicas that are killed, stopped, hung and made to raise at every phase, fp32 and bf16; their
    parameters, optimizer state and losses are compared, bit for bit, with an undisturbed run. Exit code 8 if any
    differs or does not reach its end."""
    from outlast.prove import Campaign

    if samples < 1 or seed < 0 or only < -1:
        raise ConfigError(
            f"--samples {samples} --seed {seed} --only {only} cannot be",
            remedy="--samples 1 or more, --seed and --only 0 or more",
        )
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ConfigError(f"--keep {keep} is not an empty directory", remedy="give a new directory")
    base = keep or Path(tempfile.mkdtemp(prefix="outlast-faults-"))
    numbers = [only] if only >= 0 else list(range(samples))
    with _progress(len(numbers), as_json) as progress:
        results = Campaign(base, seed).run(numbers, progress)
    bad = [result for result in results if result.verdict in _BAD]
    if keep is None and not bad:
        shutil.rmtree(base, ignore_errors=True)
    if as_json:
        print(json.dumps(_report(results, seed, base if keep or bad else None)))
    else:
        _print(results, seed, base if keep or bad else None)
    return 8 if bad else 0


def _report(results: list[Result], seed: int, base: Path | None) -> dict[str, Any]:
    import msgspec

    counts = Counter(result.verdict for result in results)
    rows = [msgspec.to_builtins(result) | {"command": _command(result, seed)} for result in results]
    return {
        "samples": len(results),
        "seed": seed,
        "identical": counts["identical"],
        "missed": counts["missed"],
        "different": counts["different"],
        "failed": counts["failed"],
        "runs": str(base) if base else None,
        "trials": rows,
    }


def _command(result: Result, seed: int) -> str:
    return f"outlast prove faults --seed {seed} --only {result.trial.number}"


def _print(results: list[Result], seed: int, base: Path | None) -> None:
    counts = Counter(result.verdict for result in results)
    print(f"\n{'':3}{'phase':18}{'fault':9}{'fleet':24}{'ended':>6}{'views survived':>15}{'seconds':>9}  bits")
    for result in results:
        trial = result.trial
        place = trial.phase + (f", {trial.bucket}" if trial.bucket is not None else "")
        fleet = f"{trial.replicas}{f'+{trial.spares}' if trial.spares else ''} {trial.dtype} {trial.exchange}"
        row = f"{trial.number:<3}{place:18}{trial.action:9}{fleet:24}{result.ended:6}{result.recoveries:15}"
        print(f"{row}{result.seconds:9.1f}  {result.verdict}")
    print(f"\n{len(results)} fleets, seed {seed}: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    for result in results:
        if result.verdict in _BAD:
            print(f"{result.verdict.upper()} {result.detail}\n  again: {_command(result, seed)}")
    if base is not None:
        print(f"the runs are kept in {base}")


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[Result], None]]:
    """A bar on a terminal, a line a fleet elsewhere; always on standard error."""
    if not sys.stderr.isatty():
        done = [0]

        def line(result: Result) -> None:
            done[0] += 1
            trial = result.trial
            what = f"{trial.action} at {trial.phase}, {trial.replicas} replicas: {result.verdict}"
            print(f"{done[0]} of {total} fleets: {what}", file=sys.stderr, flush=True)

        yield (lambda _: None) if quiet else line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("fleets", total=total)
        yield lambda result: bar.update(task, advance=1, description=f"{result.trial.phase}: {result.verdict}")
