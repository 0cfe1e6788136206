"""`outlast calibrate`: what outlast's own work costs on this machine, from journals or from a short fleet."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def calibrate(
    runs: Annotated[list[Path] | None, typer.Argument(help="Run directories whose journals are read.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Run a short fleet here and kill in it.")] = False,
    kills: Annotated[int, typer.Option(min=1, max=1000, help="With --measure: replicas to kill.")] = 4,
    out: Annotated[str, typer.Option(help="Also write the file that `outlast plan --calibration` takes.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of text.")] = False,
) -> int:
    """Measure what saves, deaths, joins and restarts cost, with their spread, for the planner."""
    import platform

    from outlast.errors import ConfigError
    from outlast.plan import calibration as cal

    if not runs and not measure:
        raise ConfigError("nothing to read", remedy="name run directories, or give --measure to run a short fleet")
    journals, names = [], [str(run) for run in runs or ()]
    for run in runs or ():
        journals.append(_events(run))
    if measure:
        where = Path(tempfile.mkdtemp(prefix="outlast-calibrate-"))
        names.append("a short fleet")
        journals.append(_measured(where, kills, quiet=as_json))
    machine = {"host": platform.machine(), "python": platform.python_version()}
    found = cal.calibrate(journals, machine, meant_losses=int(measure))
    if out:
        cal.write(found, out)
    answer = cal.calibration_answer(found, f"Measured from {', '.join(names)}: {found.faults} faults")
    print(answer.json() if as_json else answer.text())
    if out and not as_json:
        print(f"\nfile: {out}")
    return 0


def _events(run: Path) -> list[Any]:
    from outlast.journal import Journal
    from outlast.observe import find_run

    with Journal.open_reader(Path(find_run(run).run_dir)) as journal:
        return [entry.event for entry in journal.events()]


def _measured(where: Path, kills: int, *, quiet: bool) -> list[Any]:
    """Three replicas that save by themselves; each death is awaited before the next, then all are lost at once."""
    import os
    import signal

    import outlast.examples
    from outlast.core import events as ev
    from outlast.errors import ProveError
    from outlast.prove import Driven

    script = Path(str(outlast.examples.__file__)).with_name("gpt.py")
    settings = where / "run.toml"
    settings.write_text("[run]\nrestart_backoff_s = 0.0\ncheckpoint_min_s = 0.5\nmax_restarts = 2000\n")
    options = ["--config", str(settings), "--replicas", "3", "--checkpoint-dir", str(where / "checkpoints")]
    with Driven(where / "run", options, [str(script), "--steps", "1000000"]) as driven:

        def count(kind: type[Any]) -> int:
            return sum(isinstance(event, kind) for event in driven.events)

        def await_(what: str, test: Any) -> None:
            driven.until(what, test, 60.0, lambda: None, renewed=False)  # its steps do not end

        def pids() -> dict[str, int]:
            live = {e.replica: e.pid for e in driven.events if isinstance(e, ev.ReplicaStarted)}
            gone = {e.replica for e in driven.events if isinstance(e, ev.ReplicaExited)}
            return {name: pid for name, pid in live.items() if name not in gone}

        await_("a checkpoint was published", lambda: count(ev.CheckpointSaved) > 0)
        for number in range(kills):
            joined, victim = count(ev.JoinerCaughtUp), sorted(pids().items())[number % 3]
            if not quiet:
                print(f"kill {number + 1} of {kills}: {victim[0]}", file=sys.stderr, flush=True)
            os.kill(victim[1], signal.SIGKILL)
            await_("its place was filled", lambda joined=joined: count(ev.JoinerCaughtUp) > joined)
        formed = count(ev.ViewFormed)
        for pid in pids().values():
            os.kill(pid, signal.SIGKILL)
        await_("the lost fleet had begun again", lambda: count(ev.FleetGone) and count(ev.ViewFormed) > formed)
        await_("it had read its checkpoint", lambda: count(ev.CheckpointLoaded) > 0)
        events = list(driven.events)
        driven.process.send_signal(signal.SIGTERM)
        driven.process.wait(60)
    if not events:
        raise ProveError("the short fleet left no journal", remedy=f"see {where}")
    return events
