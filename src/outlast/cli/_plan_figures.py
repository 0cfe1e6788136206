"""The chapter's arithmetic, a command each: collapse, sweep, placement, objectives, quorum, burn-in, price.

`register` adds them to `outlast plan`; nothing heavy is imported at module level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

__all__ = ["Svg", "register"]

Json = Annotated[bool, typer.Option("--json", help="Print data instead of text.")]
Svg = Annotated[str, typer.Option("--svg", help="Also draw the curves: an SVG file here.")]
NodeMtbf = Annotated[float, typer.Option(help="Mean time between failures of one machine, hours.")]


def register(app: typer.Typer, emit: Callable[..., None]) -> None:
    """Add the commands; `emit(answer, json, svg)` prints one."""
    for add in (_register_scaling, _register_placement, _register_services, _register_costs, _register_lifetimes):
        add(app, emit)


def _register_scaling(app: typer.Typer, emit: Callable[..., None]) -> None:
    @app.command()
    def collapse(
        chance: Annotated[float, typer.Option(help="Probability that one part fails in a job.")] = 0.01,
        nodes: Annotated[str, typer.Option(help="Numbers of parts, comma-separated.")] = "10,100,500,1000,5000,10000",
        node_mtbf_hours: NodeMtbf = 50_000.0,
        mttr_hours: Annotated[float, typer.Option(help="Mean time to repair one, hours.")] = 2.0,
        svg: Svg = "",
        json: Json = False,
    ) -> None:
        """R^N: what many parts do together, as a table and a curve."""
        from outlast.plan.scaling import collapse_answer

        emit(collapse_answer(chance, nodes, node_mtbf_hours, mttr_hours), json, svg)

    @app.command()
    def sweep(
        nodes: Annotated[str, typer.Option(help="Node counts, comma-separated.")] = "512,2048,8192,32768,100000",
        writes: Annotated[str, typer.Option(help="Seconds that a write blocks, comma-separated.")] = "5,60,300",
        node_mtbf_hours: NodeMtbf = 50_000.0,
        near_factor: Annotated[float, typer.Option(help="How much cheaper a near write is.")] = 10.0,
        near_share: Annotated[float, typer.Option(help="Share of failures that a near write survives.")] = 0.9,
        verify_share: Annotated[float, typer.Option(help="Cost of a check, in writes.")] = 0.1,
        silent_share: Annotated[float, typer.Option(help="Share of errors that are silent.")] = 0.05,
        svg: Svg = "",
        json: Json = False,
    ) -> None:
        """The best checkpoint interval over N and the cost of a write: exact, Young, Daly, two levels, verified."""
        from outlast.plan.scaling import sweep_answer

        answer = sweep_answer(
            nodes,
            writes,
            node_mtbf_hours,
            near_factor=near_factor,
            near_share=near_share,
            verify_share=verify_share,
            silent_share=silent_share,
        )
        emit(answer, json, svg)


def _register_placement(app: typer.Typer, emit: Callable[..., None]) -> None:
    @app.command()
    def placement(
        nodes: Annotated[int, typer.Option(help="Machines that hold the state.")] = 16,
        copies: Annotated[int, typer.Option(help="Copies of each part.")] = 2,
        losses: Annotated[str, typer.Option(help="Machines (or groups) lost at once, comma-separated.")] = "1,2,3",
        parity: Annotated[str, typer.Option(help="Data and parity parts of an erasure code.")] = "4,2",
        group: Annotated[int, typer.Option(help="Machines that are lost together.")] = 1,
        svg: Svg = "",
        json: Json = False,
    ) -> None:
        """Odds that state kept in peers' memory survives, exactly, for any N, copies, losses and groups."""
        from outlast.plan.scaling import placement_answer

        emit(placement_answer(nodes, copies, losses, parity, group), json, svg)


def _register_services(app: typer.Typer, emit: Callable[..., Any]) -> None:
    @app.command()
    def objectives(
        samples: Annotated[str, typer.Argument(help="A CSV file, one request a line.")],
        objective: Annotated[list[str] | None, typer.Option(help='COLUMN<=BOUND@TARGET: "latency<=0.3@0.99".')] = None,
        sla: Annotated[float, typer.Option(help="Share of requests that the agreement promises.")] = 0.99,
        credit: Annotated[float, typer.Option(help="Share of the bill owed where it is broken.")] = 0.1,
        svg: Svg = "",
        json: Json = False,
    ) -> None:
        """A bundle of objectives: shares, error budgets, burn rates; the agreement beside them."""
        from outlast.plan.services import objectives_answer

        emit(objectives_answer(samples, objective or [], sla, credit), json, svg)

    @app.command()
    def quorum(
        replicas: Annotated[int, typer.Option(help="Copies of the service.")] = 3,
        read: Annotated[int, typer.Option(help="Answers that a read waits for.")] = 2,
        write: Annotated[int, typer.Option(help="Answers that a write waits for.")] = 2,
        availability: Annotated[float, typer.Option(help="Of one copy.")] = 0.999,
        tries: Annotated[int, typer.Option(help="Tries of one operation.")] = 1,
        partition: Annotated[float, typer.Option(help="Share of time that the network is cut in two.")] = 0.0001,
        svg: Svg = "",
        json: Json = False,
    ) -> None:
        """Quorums and retries of an always-on service, and the choice between consistency and availability."""
        from outlast.plan.services import quorum_answer

        emit(quorum_answer(replicas, read, write, availability, tries, partition), json, svg)


def _register_costs(app: typer.Typer, emit: Callable[..., Any]) -> None:
    @app.command(name="burn-in")
    def burn_in(
        units: Annotated[int, typer.Option(help="New units.")] = 1000,
        days: Annotated[float, typer.Option(help="Length of the job, days.")] = 30.0,
        infant_shape: Annotated[float, typer.Option(help="Weibull shape of early deaths, below 1.")] = 0.5,
        infant_days: Annotated[float, typer.Option(help="Their scale, days.")] = 40_000.0,
        mtbf_days: Annotated[float, typer.Option(help="Mean time between failures of a unit in mid-life.")] = 2000.0,
        wear_shape: Annotated[float, typer.Option(help="Weibull shape of wear-out, above 1.")] = 3.0,
        wear_days: Annotated[float, typer.Option(help="Its scale, days.")] = 2500.0,
        failure_days: Annotated[float, typer.Option(help="Unit-days that one failure in the job costs.")] = 40.0,
        svg: Svg = "",
        json: Json = False,
    ) -> None:
        """The bathtub: how long to run new hardware before it is used, and what that buys."""
        from outlast.plan.services import burn_in_answer

        answer = burn_in_answer(units, days, infant_shape, infant_days, mtbf_days, wear_shape, wear_days, failure_days)
        emit(answer, json, svg)

    @app.command()
    def price(
        profile: Annotated[str, typer.Option(help="Fleet to start from.")] = "llama3",
        params: Annotated[float | None, typer.Option(help="Parameters.")] = None,
        accelerators: Annotated[int | None, typer.Option(help="Accelerators of the job.")] = None,
        days: Annotated[float | None, typer.Option(help="Length of the run, days.")] = None,
        hour: Annotated[float, typer.Option("--price", help="Of one accelerator for an hour.")] = 2.0,
        watts: Annotated[float, typer.Option(help="Of one accelerator with its share of the machine.")] = 1000.0,
        carbon: Annotated[float, typer.Option(help="Kilograms of CO2 a kWh.")] = 0.4,
        spot_price: Annotated[float | None, typer.Option(help="Of a spot accelerator: compare with reserved.")] = None,
        spot_mtbf_hours: Annotated[float, typer.Option(help="How long a spot machine is left to you, hours.")] = 200.0,
        svg: Svg = "",
        json: Json = False,
    ) -> None:
        """Money, energy and carbon of lost work, and spot machines against reserved ones."""
        from outlast.plan.services import price_answer

        answer = price_answer(
            profile=profile, params=params, accelerators=accelerators, days=days, price=hour, watts=watts,
            carbon=carbon, spot_price=spot_price, spot_mtbf_h=spot_mtbf_hours,
        )  # fmt: skip
        emit(answer, json, svg)


def _register_lifetimes(app: typer.Typer, emit: Callable[..., Any]) -> None:
    @app.command()
    def lifetimes(
        file: Annotated[str, typer.Argument(help="A CSV file, one unit a line.")],
        age: Annotated[str, typer.Option(help="Column of the age reached, years.")] = "age",
        dead: Annotated[str, typer.Option(help="Column that says whether it died then: 1 or 0.")] = "dead",
        group: Annotated[str, typer.Option(help="Column to tell batches or places apart by.")] = "",
        units: Annotated[int, typer.Option(help="Units of the job.")] = 1000,
        years: Annotated[float, typer.Option(help="Their age when the job begins.")] = 0.0,
        days: Annotated[float, typer.Option(help="Length of the job, days.")] = 30.0,
        svg: Svg = "",
        json: Json = False,
    ) -> None:
        """Lifetimes of units, dead or still alive: survival, laws, and what their age does to a job."""
        from outlast.plan.lifetimes import lifetimes_answer

        answer = lifetimes_answer(file, age=age, dead=dead, group=group, units=units, years=years, days=days)
        emit(answer, json, svg)
