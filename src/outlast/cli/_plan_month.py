"""`outlast plan month`: a month of runs from their journals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from outlast.cli._runs import DEFAULT_RUNS, note

__all__ = ["register_month"]


def register_month(app: typer.Typer, emit: Callable[..., None]) -> None:
    """Add the command; `emit(answer, json)` prints its answer."""

    @app.command()
    def month(
        runs: Annotated[list[Path] | None, typer.Argument(help="Run directories, or directories of runs.")] = None,
        month: Annotated[str, typer.Option(help="YYYY-MM, UTC; default: that of the newest run.")] = "",
        objective: Annotated[float, typer.Option(help="Share of time that was to be useful.")] = 0.9,
        hour: Annotated[float, typer.Option("--price", help="Of one accelerator for an hour.")] = 2.0,
        watts: Annotated[float, typer.Option(help="Of one accelerator with its share of the machine.")] = 1000.0,
        carbon: Annotated[float, typer.Option(help="Kilograms of CO2 a kWh.")] = 0.4,
        accelerators: Annotated[int, typer.Option(help="Accelerators of one replica.")] = 1,
        json: Annotated[bool, typer.Option("--json", help="Print data instead of text.")] = False,
    ) -> None:
        """A month of runs, from their journals: useful time and its budget, what failed, what that cost."""
        from outlast import observe
        from outlast.errors import OutlastError
        from outlast.journal import Journal
        from outlast.plan.monthly_report import month_answer, run_of_month

        found, odd = [], list[OutlastError]()
        for run_dir in _run_dirs(runs or [Path(DEFAULT_RUNS)]):
            try:
                with Journal.open_reader(run_dir) as reader:
                    events = [entry.event for entry in reader.events()]
                if events:
                    found.append(run_of_month(str(run_dir), events, observe.accounting(events).seconds()))
                else:
                    note(f"{run_dir} holds no event yet: left out")
            except OutlastError as error:  # one that cannot be read says nothing of the others
                odd.append(error)
                note(f"{run_dir} is left out: {error}")
        if odd and not found:
            raise odd[0]
        emit(
            month_answer(
                found, month, objective=objective, price=hour, watts=watts, carbon=carbon, accelerators=accelerators
            ),
            json,
        )


def _run_dirs(places: list[Path]) -> Iterator[Path]:
    """Each run once. ConfigError where a place holds none."""
    from outlast.errors import ConfigError
    from outlast.journal import holds_run

    seen: set[Path] = set()
    for place in places:
        inside = [place] if holds_run(place) else sorted(p for p in place.glob("*") if p.is_dir() and holds_run(p))
        if not inside:
            raise ConfigError(f"{place} holds no run", remedy="give a run's directory, or one of several runs")
        for path in inside:
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield path
