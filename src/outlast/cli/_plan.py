"""`outlast plan`: how reliable a job will be and what to do about it. Options in, one `Answer` out.

Nothing heavy is imported at module level: numpy and scipy load inside a command, so that `--help` is instant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from outlast.plan._answer import Answer

__all__ = ["app"]

_DEFAULT = "job"


class _PlanGroup(TyperGroup):
    """`outlast plan [OPTIONS | job.toml]` without a subcommand's name means `outlast plan job ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in {"--help", "-h"}):
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_PlanGroup,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="How reliable will this job be, and what should be done about it? Without a subcommand: `plan job`.",
)

Json = Annotated[bool, typer.Option("--json", help="Print data instead of text.")]


def emit(answer: Answer, as_json: bool) -> None:
    """Print an answer in the form asked for."""
    typer.echo(answer.json() if as_json else answer.text())


@app.command()
def fleet(
    nodes: Annotated[int, typer.Option(help="Machines that must all work.")],
    node_mtbf_hours: Annotated[float, typer.Option(help="Mean time between failures of one machine, hours.")],
    mttr_hours: Annotated[float, typer.Option(help="Mean time to repair one, hours.")] = 2.0,
    hours: Annotated[float, typer.Option(help="Length of the job, hours.")] = 720.0,
    json: Json = False,
) -> None:
    """What many machines do together: first failure, availability, failures, spares."""
    from outlast.plan._quick import fleet_answer

    emit(fleet_answer(nodes, node_mtbf_hours, mttr_hours, hours), json)


@app.command()
def interval(
    mtbf_hours: Annotated[float, typer.Option(help="Mean time between interruptions of the whole fleet, hours.")],
    write_seconds: Annotated[float, typer.Option(help="Time that one checkpoint blocks the job, seconds.")],
    recovery_seconds: Annotated[float, typer.Option(help="From an interruption until work goes on, seconds.")] = 0.0,
    json: Json = False,
) -> None:
    """When to checkpoint: Young, Daly, the exact optimum, and what a wrong choice costs."""
    from outlast.plan._quick import interval_answer

    emit(interval_answer(mtbf_hours, write_seconds, recovery_seconds), json)


@app.command()
def nines(
    mtbf_hours: Annotated[float, typer.Option(help="Mean time between incidents, hours.")] = 1000.0,
    mttr_hours: Annotated[float, typer.Option(help="Mean time to repair, hours.")] = 1.0,
    target: Annotated[float | None, typer.Option(help="Availability wanted; default: one more nine.")] = None,
    cost_incidents: Annotated[float, typer.Option(help="Cost of halving the number of incidents.")] = 1.0,
    cost_repair: Annotated[float, typer.Option(help="Cost of halving the time to repair.")] = 1.0,
    incidents: Annotated[float, typer.Option(help="Incidents a month, for the budget.")] = 3.0,
    minutes: Annotated[float, typer.Option(help="Minutes each, for the budget.")] = 12.0,
    json: Json = False,
) -> None:
    """Availability, downtime, error budgets, and the cheaper way to one more nine."""
    from outlast.plan._quick import nines_answer

    answer = nines_answer(
        mtbf_hours, mttr_hours, target, cost_incidents=cost_incidents, cost_repair=cost_repair, incidents=incidents,
        minutes=minutes,
    )  # fmt: skip
    emit(answer, json)


@app.command(name="target-study")
def target_study(
    replications: Annotated[int, typer.Option(help="Simulated runs a row.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the simulation.")] = 0,
    json: Json = False,
) -> None:
    """The 1.5T target table by simulation, with intervals, parameters and what one run can show."""
    from outlast.plan._target import target_answer

    emit(target_answer(replications, seed), json)
