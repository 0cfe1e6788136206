"""`outlast demo`: train a small GPT, kill things, and show that nothing was lost."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=24, help="training steps of each of the two runs")] = 160,
    seed: Annotated[int, typer.Option(help="seed of model and data")] = 0,
    hosts: Annotated[
        int | None, typer.Option(min=3, max=16, help="on so many hosts: network namespaces, as root")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="where both runs are kept; a temporary directory otherwise")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="show the disturbed run in a browser while it lasts")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object, nothing else")] = False,
) -> int:
    """Train a small GPT on four replicas and a spare while killing a replica inside an exchange, stopping one inside a
    backward, killing the coordinator and losing the spare; train it undisturbed; compare the bits. With --hosts one
    host loses its power, another one its network, both come back, and the coordinator is killed. Exit code 1 if the
    bits differ."""
    from outlast.prove import Demo, HostsDemo

    base = keep or Path(tempfile.mkdtemp(prefix="outlast-demo-"))
    base.mkdir(parents=True, exist_ok=True)
    if serve:
        from outlast.cli._serve import serve_beside

        serve_beside(base / "disturbed")
    if not as_json:
        print(f"outlast: two runs of {steps} steps, a disturbed and an undisturbed one, in {base}", flush=True)
    watch = _Progress(steps, quiet=as_json)
    demonstration = HostsDemo(base, steps, seed, watch, hosts) if hosts else Demo(base, steps, seed, watch)
    verdict = demonstration.run()
    watch.close()
    if as_json:
        import msgspec

        print(json.dumps(msgspec.to_builtins(verdict)))
    else:
        _print(verdict)
    return 0 if verdict.identical and verdict.lost_steps == 0 else 1


class _Progress:
    """A bar for each run on a terminal, a line now and then elsewhere."""

    def __init__(self, steps: int, quiet: bool) -> None:
        self._steps, self._quiet, self._said = steps, quiet, ""
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}
        if not quiet and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns)
            self._bar.start()

    def __call__(self, title: str, driven: Any) -> None:
        faults = len(driven.recoveries())
        text = f"{title}: {faults} fault{'s' * (faults != 1)} survived" if title == "disturbed" else "undisturbed"
        done = driven.step + 1
        if self._bar is not None:
            if title not in self._tasks:
                self._tasks[title] = self._bar.add_task(text, total=self._steps)
            self._bar.update(self._tasks[title], completed=done, description=text)
        elif not self._quiet:
            line = f"{text}; step {done // 16 * 16} of {self._steps}" if done >= 0 else f"{text}; starting"
            if line != self._said:
                self._said = line
                print(line, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _print(verdict: Any) -> None:
    from outlast.core import events as ev
    from outlast.journal import Journal
    from outlast.observe import losses, plot, render_timeline, timeline

    with Journal.open_reader(Path(verdict.run_dir)) as journal:
        found = [entry.event for entry in journal.events()]
    told = [event for event in found if not isinstance(event, ev.ViewInstalled | ev.ViewFormed)]
    print("\nWhat happened\n" + render_timeline(timeline(told)))
    print("\nLoss\n" + plot(losses(found)))
    print(f"\nuseful time             {verdict.useful_time:.1%} of the time since the first step")
    print(f"steps lost              {verdict.lost_steps} of {verdict.steps}")
    print(f"disturbed run           {verdict.fingerprint}")
    print(f"undisturbed run         {verdict.reference}")
    same = "identical, to the bit" if verdict.identical else "DIFFERENT"
    print(f"parameters and optimizer state: {same}")
    print(f"\nBoth runs are kept: outlast why {verdict.run_dir}")
    print(f"Side by side: outlast serve {verdict.run_dir} {verdict.reference_dir}")
