"""`outlast prove trace`: the busiest stretch of a real failure log, replayed on a script's run with time compressed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from outlast.cli._prove_report import exit_code, print_report, write_page
from outlast.cli._prove_run import Options, check_file, prove, script_of

if TYPE_CHECKING:
    from outlast.plan.traces import Trace
    from outlast.prove.script_plan import Shape
    from outlast.prove.trace_schedule import Stretch

__all__ = ["trace"]


def trace(
    log: Annotated[str, typer.Argument(help="A failure log.")],
    script: Annotated[str | None, typer.Argument(help="the training script")] = None,
    args: Annotated[list[str] | None, typer.Argument(help="its own arguments")] = None,
    preset: Annotated[str, typer.Option(help="infinitehbd, bamboo, slurm, k8s, xid or journal.")] = "",
    mapping: Annotated[str, typer.Option(help="A TOML that names the log's columns.")] = "",
    hours: Annotated[float, typer.Option(help="How many hours of the log; the busiest are taken.")] = 24.0,
    strikes: Annotated[int, typer.Option(help="How many of their failures are replayed at most.")] = 8,
    machines: Annotated[int, typer.Option(help="Only failures of so many of the log's machines; 0: of all.")] = 0,
    faster: Annotated[float, typer.Option(help="So many times as fast as it was, in place of --hours.")] = 0.0,
    replicas: Annotated[
        int, typer.Option(help="Replicas that the log's machines are dealt to; 0: 3, or as many as --hosts have room.")
    ] = 0,
    spares: Annotated[int, typer.Option(help="Spares of the run.")] = 1,
    hosts: Annotated[
        int, typer.Option(help="Deal them to so many hosts instead, 3 or more: network namespaces, as root.")
    ] = 0,
    only: Annotated[list[str] | None, typer.Option(help="Keep rows with COLUMN=VALUE; may be repeated.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings for all runs, as for outlast run.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep all runs here; else only those with findings.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page with all of it here: one HTML file.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Untrue numbers of status and why fail it, and useful time that is off.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Replay the busiest stretch of LOG on a run of SCRIPT: its machines are dealt to the replicas, its hours become
    seconds, and each failure kills a replica, or stops it where the log speaks of a hang or of the network. Repairs are
    not replayed. With --hosts a failure is a host's loss of power, or its hang, and the host is back when its machine
    was. Judged as by `outlast prove run`; besides, useful time is told beside what `outlast plan` makes of the same
    outages at what they cost this run. The log stays where it is: none comes with outlast."""
    from outlast.plan.traces import read_trace, rows_wanted

    wanted = script_of(script, None, args or [], "trace", "LOG ")
    check_file(report)
    found = read_trace(log, preset_name=preset, mapping_path=mapping, only=rows_wanted(only or []))
    replicas = replicas or (hosts - spares if hosts else 3)
    schedule = _schedule_of(found, (hours, faster, strikes, machines), replicas, hosts)
    options = Options(
        script=wanted, faults="", runs=1, minutes=0.0, seed=0, replicas=replicas, spares=spares, schedule="", agents=1,
        exchange="auto", checkpoints=True, config=config, keep=keep, shrink=0, resume=None, planned=schedule,
        hosts=hosts, slots=-(-(replicas + spares) // hosts) if hosts else 0,
    )  # fmt: skip
    proof = prove(options, quiet=as_json)
    write_page(proof, report)
    if as_json:
        print(json.dumps(msgspec.to_builtins(proof)))
    else:
        print_report(proof)
    return exit_code(proof, strict)


def _schedule_of(
    trace: Trace, wanted: tuple[float, float, int, int], replicas: int, hosts: int
) -> Callable[[Shape], str]:
    """What is struck, once it is known how long a run takes. `wanted`: hours, how many times as fast, strikes and
    machines at most. ConfigError for a log that has no such stretch."""
    from outlast.prove.script_plan import FROM_TRAINING
    from outlast.prove.trace_schedule import Hit, busiest, replayed_s

    hours, faster, strikes, machines = wanted
    hits = [Hit(f.down_h, f.node, f.kind, f.up_h if f.repair_known else None) for f in trace.by_place().failures]
    busiest(hits, hours, strikes, machines)  # what is none is known before hours have passed

    def schedule(shape: Shape) -> str:
        trains_s = shape.length_s - shape.begin_s
        stretch = busiest(hits, faster * replayed_s(trains_s) / 3600 if faster > 0 else hours, strikes, machines)
        among = f"{hosts - 1} hosts" if hosts else f"{replicas} replicas"
        print(f"{trace.name}: {_told(stretch, trains_s, among)}", file=sys.stderr, flush=True)
        dealt = (hosts, stretch.schedule_of_hosts) if hosts else (replicas, stretch.schedule)
        return f"{FROM_TRAINING},{dealt[1](dealt[0], trains_s)}"

    return schedule


def _told(stretch: Stretch, trains_s: float, among: str) -> str:
    return (
        f"{len(stretch.hits)} of the {stretch.failures} failures in {stretch.hours:g} h from hour "
        f"{stretch.start_h:.1f} on; {stretch.machines} machines are dealt to {among}; a second stands for "
        f"{stretch.scale(trains_s):.2f} h ({3600 * stretch.scale(trains_s):.0f} times as fast)"
    )
