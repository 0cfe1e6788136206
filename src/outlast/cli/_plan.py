"""`outlast plan`: how reliable a job will be and what to do about it. Options in, one `Answer` out.

Nothing heavy is imported at module level: numpy and scipy load inside a command, so that `--help` is instant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from outlast.cli._plan_figures import Svg, register
from outlast.cli._plan_month import register_month

if TYPE_CHECKING:
    from outlast.plan.answers import Answer

__all__ = ["app"]

_DEFAULT = "job"


class _PlanGroup(TyperGroup):
    """`outlast plan [OPTIONS | job.toml]` without a subcommand's name means `outlast plan job ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in {"--help", "-h"}):
            _refuse_misspelt(args[:1], self.commands)
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)


def _refuse_misspelt(first: list[str], commands: Any) -> None:
    """A word that is no file and nearly a command's name is that command misspelt."""
    import difflib
    import os

    close = difflib.get_close_matches(first[0], commands, n=1, cutoff=0.7) if first else []
    if close and "." not in first[0] and not os.path.exists(first[0]):
        from outlast.errors import ConfigError

        raise ConfigError(f"plan has no command {first[0]!r}", remedy=f"did you mean {close[0]!r}?")


app = typer.Typer(
    cls=_PlanGroup,
    add_completion=False,
    rich_markup_mode=None,
    suggest_commands=False,
    pretty_exceptions_enable=False,
    help="How reliable will this job be, and what should be done about it? Without a subcommand: `plan job`.",
)

Json = Annotated[bool, typer.Option("--json", help="Print data instead of text.")]
Profile = Annotated[str, typer.Option(help="Fleet to start from: llama3, rsc1, lanl20, ...; see reference/plan.")]
Params = Annotated[float | None, typer.Option(help="Parameters; the state to write and hold follows them.")]
Accelerators = Annotated[int | None, typer.Option(help="Accelerators of the job.")]
CalibrationFile = Annotated[str, typer.Option("--calibration", help="Measured costs: a file of `outlast calibrate`.")]
TopologyOption = Annotated[str, typer.Option("--topology", help="fat-tree, rail, ring or tree.")]


def emit(answer: Answer, as_json: bool, svg: str = "") -> None:
    """Print an answer in the form asked for; `svg`: also draw its figures there, the second beside the first."""
    if svg:
        from outlast.plan.designs import write_figures

        write_figures(svg, answer.figures)
    typer.echo(answer.json() if as_json else answer.text())


register(app, emit)
register_month(app, emit)


@app.command()
def fleet(
    nodes: Annotated[int, typer.Option(help="Machines that must all work.")],
    node_mtbf_hours: Annotated[float, typer.Option(help="Mean time between failures of one machine, hours.")],
    mttr_hours: Annotated[float, typer.Option(help="Mean time to repair one, hours.")] = 2.0,
    hours: Annotated[float, typer.Option(help="Length of the job, hours.")] = 720.0,
    json: Json = False,
) -> None:
    """What many machines do together: first failure, availability, failures, spares."""
    from outlast.plan.small_answers import fleet_answer

    emit(fleet_answer(nodes, node_mtbf_hours, mttr_hours, hours), json)


@app.command()
def interval(
    mtbf_hours: Annotated[
        float | None, typer.Option(help="Mean time between interruptions of the whole fleet, hours.")
    ] = None,
    write_seconds: Annotated[
        float | None, typer.Option(help="Time that one checkpoint blocks the job, seconds.")
    ] = None,
    recovery_seconds: Annotated[
        float | None, typer.Option(help="From an interruption until work goes on, seconds.")
    ] = None,
    file: Annotated[str, typer.Option("--job", help="A job's TOML file: its clocks and costs.")] = "",
    profile: Profile = "",
    params: Params = None,
    accelerators: Accelerators = None,
    topology: TopologyOption = "",
    svg: Svg = "",
    json: Json = False,
) -> None:
    """When to checkpoint: Young, Daly, the exact optimum, what a wrong choice costs; of a job or of two numbers."""
    from outlast.plan.job_interval import job_interval_answer
    from outlast.plan.small_answers import interval_answer

    shape = {"file": file, "profile": profile, "params": params, "accelerators": accelerators, "topology": topology}
    if any(value not in ("", None) for value in shape.values()):
        _refuse_both({"--mtbf-hours": mtbf_hours, "--write-seconds": write_seconds})
        emit(job_interval_answer(recovery_seconds, **shape), json, svg)  # type: ignore[arg-type]
        return
    if mtbf_hours is None or write_seconds is None:
        from outlast.errors import ConfigError

        missing = "--write-seconds" if mtbf_hours is not None else "--mtbf-hours"
        raise ConfigError(f"{missing} is missing", remedy="give it, or a job: --profile, --params, --accelerators")
    emit(interval_answer(mtbf_hours, write_seconds, recovery_seconds or 0.0), json, svg)


def _refuse_both(given: dict[str, float | None]) -> None:
    from outlast.errors import ConfigError

    for option, value in given.items():
        if value is not None:
            raise ConfigError(f"both a job and {option}", remedy=f"leave {option} out: the job says it")


@app.command()
def nines(
    mtbf_hours: Annotated[float, typer.Option(help="Mean time between incidents, hours.")] = 1000.0,
    mttr_hours: Annotated[float, typer.Option(help="Mean time to repair, hours.")] = 1.0,
    target: Annotated[float | None, typer.Option(help="Availability wanted; default: one more nine.")] = None,
    cost_incidents: Annotated[float, typer.Option(help="Cost of halving the number of incidents.")] = 1.0,
    cost_repair: Annotated[float, typer.Option(help="Cost of halving the time to repair.")] = 1.0,
    incidents: Annotated[float, typer.Option(help="Incidents a month, for the budget.")] = 3.0,
    minutes: Annotated[float, typer.Option(help="Minutes each, for the budget.")] = 12.0,
    svg: Svg = "",
    json: Json = False,
) -> None:
    """Availability, downtime, error budgets, and the cheaper way to one more nine."""
    from outlast.plan.small_answers import nines_answer

    answer = nines_answer(
        mtbf_hours,
        mttr_hours,
        target,
        cost_incidents=cost_incidents,
        cost_repair=cost_repair,
        incidents=incidents,
        minutes=minutes,
    )
    emit(answer, json, svg)


@app.command(name="target-study")
def target_study(
    replications: Annotated[int, typer.Option(help="Simulated runs a row.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the simulation.")] = 0,
    profile: Annotated[str, typer.Option(help="Whose rates the prediction takes: llama3, rsc1, rsc2, infinitehbd.")] = (
        "llama3"
    ),
    calibration: CalibrationFile = "",
    measured: Annotated[str, typer.Option(help="Fleets that were run: a file of `python -m benchmarks target`.")] = "",
    json: Json = False,
) -> None:
    """The 1.5T target three times: fitted to its table, predicted for outlast, and measured on real fleets."""
    from outlast.plan.target_study import target_answer

    emit(target_answer(replications, seed, profile=profile, calibration=calibration, measured=measured), json)


@app.command(name=_DEFAULT)
def job_command(
    file: Annotated[str | None, typer.Argument(help="A job's TOML file.", metavar="JOB.TOML")] = None,
    profile: Profile = "",
    params: Params = None,
    accelerators: Accelerators = None,
    topology: TopologyOption = "",
    days: Annotated[float | None, typer.Option(help="Length of the run, days.")] = None,
    calibration: CalibrationFile = "",
    from_run: Annotated[str, typer.Option(help="Re-plan from the journal of this run.")] = "",
    write_seconds: Annotated[
        float | None, typer.Option(help="With --from-run: seconds a checkpoint blocks; default: as measured.")
    ] = None,
    report: Annotated[str, typer.Option(help="Also write a self-contained HTML page here.")] = "",
    replications: Annotated[int, typer.Option(help="Simulated runs.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the simulation.")] = 0,
    json: Json = False,
) -> None:
    """Design a job: clocks, ETTR, intervals, spares, placement, sensitivity (the default command)."""
    if from_run:
        emit(_rerun(from_run, write_seconds), json)
        return
    from outlast.plan.designs import design, write_report

    plan, sources = design(
        file,
        profile=profile,
        params=params,
        accelerators=accelerators,
        topology=topology,
        days=days,
        calibration=calibration,
        replications=replications,
        seed=seed,
    )
    from outlast.plan.plan_report import plan_answer

    if report:
        write_report(report, plan, sources)
    emit(plan_answer(plan, sources), json)
    if report and not json:
        typer.echo(f"\nreport: {report}")


@app.command()
def prediction(
    file: Annotated[str | None, typer.Argument(help="A job's TOML file.", metavar="JOB.TOML")] = None,
    profile: Profile = "",
    params: Params = None,
    accelerators: Accelerators = None,
    diary: Annotated[str, typer.Option(help="The diary of devices; OUTLAST_DIARY, or ~/.local/state/outlast.")] = "",
    share: Annotated[float | None, typer.Option(help="Share of failures foretold, in place of the diary's.")] = None,
    precision: Annotated[float | None, typer.Option(help="Share of alarms that come true; with --share.")] = None,
    notice_s: Annotated[float | None, typer.Option(help="Seconds from alarm to failure; with --share.")] = None,
    svg: Svg = "",
    json: Json = False,
) -> None:
    """What prediction is worth to a job: hours saved against false alarms, as the diary measured it."""
    from outlast.plan.prediction import prediction_answer

    told = _foretold(diary, share, precision, notice_s)
    answer = prediction_answer(**told, file=file or "", profile=profile, params=params, accelerators=accelerators)
    emit(answer, json, svg)


def _rerun(run: str, write_s: float | None) -> Answer:
    """The answer to `--from-run`: a run directory, one of several runs, or the journal's own file."""
    from pathlib import Path

    from outlast.cli._tell_story import useful_of
    from outlast.observe import find_run
    from outlast.plan.reruns import rerun_answer

    named = Path(run)
    journal = named.is_file() and named.suffix == ".db"
    run_dir = named.parent if journal else find_run(named).run_dir
    return rerun_answer(str(named if journal else run_dir), useful_of(run_dir), write_s)


def _foretold(diary: str, share: float | None, precision: float | None, notice_s: float | None) -> dict[str, Any]:
    """Shares with intervals: as given, or as the diary has them."""
    from outlast.errors import ConfigError

    if share is not None:
        for name, value in (("--share", share), ("--precision", precision)):
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"{name} {value:g} is no share", remedy="from 0 to 1")
        true = 1.0 if precision is None else precision
        return {
            "shares": (share,) * 3,
            "precisions": (true,) * 3,
            "notice_s": 3600.0 if notice_s is None else notice_s,
            "seen": "Share and precision are as given, not measured.",
        }
    if precision is not None or notice_s is not None:
        raise ConfigError("--precision and --notice-s go with --share", remedy="give it too, or leave them out")
    from pathlib import Path

    from outlast import health

    book = health.Diary(Path(diary) if diary else health.default_diary())
    found = health.foretold_of(book.entries())
    if not found.failures or not found.alarms:
        raise ConfigError(
            f"the diary {book.path} has {found.failures} failures and {found.alarms} settled alarms: nothing measured",
            remedy="outlast health learn RUN, or --share and --precision to ask what a predictor would be worth",
        )
    return {
        "shares": found.share,
        "precisions": found.precision,
        "notice_s": found.notice_s,
        "seen": health.worth_of(found).removesuffix(" outlast plan prediction says what that is worth to a job."),
    }


@app.command()
def compare(
    first: Annotated[str | None, typer.Argument(help="A job's TOML; default: the lost weekend, before.")] = None,
    second: Annotated[str | None, typer.Argument(help="Another; default: the lost weekend, after.")] = None,
    replications: Annotated[int, typer.Option(help="Simulated runs of each.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the simulation.")] = 0,
    json: Json = False,
) -> None:
    """Two designs side by side, and how long a run must be to tell them apart."""
    from outlast.errors import ConfigError
    from outlast.plan.design_comparison import compare_answer, example_paths

    if (first is None) != (second is None):
        raise ConfigError("one design cannot be compared", remedy="give two job files, or none for the example")
    paths = (first, second) if first and second else example_paths()
    emit(compare_answer(*paths, replications=replications, seed=seed), json)


@app.command()
def fit(
    log: Annotated[str, typer.Argument(help="A failure log, or with --preset journal a run's directory.")],
    preset: Annotated[
        str, typer.Option(help="journal, slurm, k8s, xid, infinitehbd, bamboo, lanl, titan, philly or pai.")
    ] = "",
    mapping: Annotated[str, typer.Option(help="A TOML that names the log's columns.")] = "",
    only: Annotated[list[str] | None, typer.Option(help="Keep rows with COLUMN=VALUE; may be repeated.")] = None,
    nodes: Annotated[int, typer.Option(help="Machines watched; 0: those that appear.")] = 0,
    rounds: Annotated[int, typer.Option(help="Rounds of each bootstrap and of the predictive check; 0: none.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of both.")] = 0,
    job: Annotated[str, typer.Option(help="Also write the fitted classes as a job's TOML here.")] = "",
    plot: Annotated[str, typer.Option(help="Also draw the trace: a self-contained HTML page here.")] = "",
    json: Json = False,
) -> None:
    """Read a failure log, validate it, fit it, and test the fit on its held-out end."""
    from outlast.plan.designs import fit_log

    emit(
        fit_log(
            log,
            preset=preset,
            mapping=mapping,
            only=only or [],
            nodes=nodes,
            rounds=rounds,
            seed=seed,
            job=job,
            plot=plot,
        ),
        json,
    )


trace = typer.Typer(
    help="Failure traces: make more of them.", add_completion=False, rich_markup_mode=None, suggest_commands=False
)
app.add_typer(trace, name="trace")


@trace.command()
def generate(
    log: Annotated[str, typer.Argument(help="The failure log to be like.")],
    out: Annotated[str, typer.Option(help="CSV file to write.")],
    preset: Annotated[
        str, typer.Option(help="journal, slurm, k8s, xid, infinitehbd, bamboo, lanl, titan, philly or pai.")
    ] = "",
    mapping: Annotated[str, typer.Option(help="A TOML that names the log's columns.")] = "",
    days: Annotated[float, typer.Option(help="Length; 0: the log's own.")] = 0.0,
    nodes: Annotated[int, typer.Option(help="Machines of the new trace; 0: the log's own.")] = 0,
    log_nodes: Annotated[int, typer.Option(help="Machines that the log watched; 0: those that appear in it.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed.")] = 0,
    json: Json = False,
) -> None:
    """A new trace like a log: its bursts, incidents, lemons and repair tails."""
    from outlast.plan.designs import generate_like

    answer = generate_like(
        log, out, preset=preset, mapping=mapping, days=days, nodes=nodes, log_nodes=log_nodes, seed=seed
    )
    emit(answer, json)


@app.command()
def system(
    params: Annotated[str, typer.Option(help="Parameter counts, comma-separated.")] = "7e9,7e10,1.5e12",
    nodes: Annotated[str, typer.Option(help="Node counts, comma-separated.")] = "64,512,2048",
    steps: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    profile: Profile = "llama3",
    svg: Svg = "",
    json: Json = False,
) -> None:
    """R = R_compute x R_communication x R_synchronisation over parameters, nodes and topology."""
    from outlast.plan.system_table import system_answer

    emit(system_answer(params, nodes, steps, profile), json, svg)
