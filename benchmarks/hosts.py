"""Hosts that fail: how long no step is committed after a process's death on another host, and after a power-off. And
hosts that do not: a step beside plain DDP's, and the bytes that a host sends in it (`_host_steps.py`); and one of
four at a third of its speed (`_host_speeds.py`).

Three hosts are network namespaces on this machine, with one replica each. In every sample a run learns its deadlines, a
replica on another host is killed as often as asked, and at the end that host loses its power: all of it goes, and no
connection ends. Times are those that `outlast why` tells, from the last commit before the fault to the first after it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import secrets
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._common import Bounds, Table, alone, environment, options, publish, spread
from benchmarks._host_speeds import no_quotas, slow_host_measured, slow_host_table
from benchmarks._host_steps import steps_measured, steps_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outlast.core import events as ev
    from outlast.prove._drive import Driven
    from outlast.prove.host_namespaces import HostNetwork

__all__ = ["main"]

PORT, HOSTS, STRUCK = 29400, 3, 2
DEADLINE_S, MARGIN_S, DEATH_S = 0.5, 0.15, 0.06
LEARN, BETWEEN = 40, 20
"""Steps before the first fault, and between two."""
PATIENCE_S = 240.0


@dataclasses.dataclass(kw_only=True, slots=True)
class Outage:
    """One fault. `detect_s`: from the last sign of life to the first notice; `downtime_s`: no step was committed."""

    kind: str
    detect_s: float
    downtime_s: float
    noticed_by: str
    lost_steps: int


def main(argv: Sequence[str] | None = None) -> int:
    from outlast.prove.host_namespaces import unavailable

    args = parse(argv)
    machine, bounds, every = environment(args), Bounds(), list[Outage]()
    if reason := unavailable():
        print(f"no hosts can be made on this machine: {reason}", file=sys.stderr)
        return 0
    steps = steps_measured(args) if args.rates else []
    if reason := no_quotas() if args.slow_rounds else "":
        print(f"no host is slowed down: {reason}", file=sys.stderr)
    slow = slow_host_measured(args) if args.slow_rounds and not reason else []
    for sample in range(args.samples):
        with alone(args.lock):
            every += measured(args, sample)
    deaths = [outage.downtime_s for outage in every if outage.kind == "a process's death"]
    power = [outage.downtime_s for outage in every if outage.kind == "power off"]
    if power:
        bounds.check("power off: longest time without a commit", max(power), DEADLINE_S + MARGIN_S, "s")
    if deaths:
        bounds.check("a process's death on another host: median", spread(deaths).median, DEATH_S, "s")
    tables = [*([tabulate(every)] if every else []), *([steps_table(steps, bounds)] if steps else [])]
    tables += [slow_host_table(slow, bounds)] if slow else []
    every_row = [dataclasses.asdict(one) for group in (every, steps, slow) for one in group]
    return publish("hosts", args, machine, tables, bounds, every_row)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--samples", type=int, default=5, help="runs, each with one power-off")
    parser.add_argument("--deaths", type=int, default=3, help="processes killed in each run before that")
    parser.add_argument("--hosts", type=int, default=2, help="for steps: hosts with two replicas each")
    parser.add_argument("--models", nargs="+", choices=["3.2M", "10M"], default=["3.2M", "10M"])
    parser.add_argument("--rates", nargs="*", default=["", "1gbit"], help="of the cables; none: measure no steps")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slow-rounds", type=int, default=5, help="with one of four hosts slowed down; 0 for none")
    parser.add_argument("--slow-model", choices=["0.15M", "3.2M", "10M"], default="3.2M")
    parser.add_argument("--slow-microbatches", type=int, default=40)
    return parser.parse_args(argv)


def tabulate(every: Sequence[Outage]) -> Table:
    rows = []
    for kind in dict.fromkeys(outage.kind for outage in every):
        mine = [outage for outage in every if outage.kind == kind]
        noticed, downtime = ([getattr(one, name) for one in mine] for name in ("detect_s", "downtime_s"))
        who, lost = ", ".join(sorted({one.noticed_by for one in mine})), sum(one.lost_steps for one in mine)
        rows.append([kind, spread(noticed).show(1e3, 0), spread(downtime).show(1e3, 0), who, str(lost)])
    return Table(
        title=f"{HOSTS} hosts (network namespaces), one replica each",
        columns=["fault", "noticed after, ms", "no commit for, ms", "noticed by", "steps lost"], rows=rows,
        notes=[f"deadlines are learned, {DEADLINE_S:g} s at least; the coordinator is on a host that stays"],
    )  # fmt: skip


# --- one run --------------------------------------------------------------------------------------------------------
def measured(args: argparse.Namespace, sample: int) -> list[Outage]:
    """Deaths, then a power-off."""
    import outlast
    from outlast.prove._drive import Driven
    from outlast.prove.host_namespaces import HostNetwork

    package = Path(str(outlast.__file__)).parents[1]
    with contextlib.ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        net = stack.enter_context(HostNetwork(HOSTS, [base, package, Path(sys.prefix)]))
        secret = secrets.token_hex(32)
        asked = ["--endpoint", f"{net.address(0)}:{PORT}", "--nnodes", str(HOSTS), "--host", "h0", "--slots", "1"]
        script = [str(Path(str(outlast.__file__)).with_name("examples") / "gpt.py"), "--steps", "1000000"]
        script += ["--seed", str(args.seed + sample), "--out", str(base / "result.json")]
        told = {"OUTLAST_SECRET": secret, "OUTLAST_STALL_FLOOR_S": str(DEADLINE_S), "OUTLAST_RESTART_BACKOFF_S": "0.1"}
        run = stack.enter_context(
            Driven(base / "run", [*asked, "--replicas", str(HOSTS)], script, environ=told, prefix=net.entering(0))
        )
        for host in range(1, HOSTS):
            join(net, host, base, told)
        return [*(death(run) for _ in range(args.deaths)), power_off(run, net)]


def join(net: HostNetwork, host: int, base: Path, told: dict[str, str]) -> None:
    command = [sys.executable, "-m", "outlast", "agent", "--join", f"{net.address(0)}:{PORT}", "--host", f"h{host}"]
    with (base / f"h{host}.log").open("wb") as log:
        net.start(host, [*command, "--slots", "1", "--run-dir", str(base / f"h{host}")], os.environ | told, log)


def death(run: Driven) -> Outage:
    """A replica there is killed, once all train."""
    settled(run)
    victim = started_there(run)[-1]
    os.kill(victim.pid, signal.SIGKILL)
    return outage(run, "a process's death", lambda recovery: recovery.replica == victim.replica)


def power_off(run: Driven, net: HostNetwork) -> Outage:
    settled(run)
    victim = started_there(run)[-1]
    net.power_off(STRUCK)
    return outage(run, "power off", lambda recovery: recovery.replica == victim.replica)


def started_there(run: Driven) -> list[ev.ReplicaStarted]:
    """Replicas of the host that is struck."""
    from outlast.core import events as ev

    agents = {e.agent for e in run.events if isinstance(e, ev.AgentStarted) and e.host == f"h{STRUCK}"}
    return [e for e in run.events if isinstance(e, ev.ReplicaStarted) and e.agent in agents]


def settled(run: Driven) -> None:
    """All hosts' replicas are members, and have trained so many steps together."""
    until(run, "all were members", lambda: len(run.members) == HOSTS)
    began = run.step
    until(run, "they had trained", lambda: run.step >= max(LEARN, began + BETWEEN))


def outage(run: Driven, kind: str, is_it: Callable[[ev.Recovery], bool]) -> Outage:
    found: list[Any] = []

    def told() -> bool:
        found[:] = [recovery for recovery in run.recoveries() if is_it(recovery)]
        return bool(found)

    until(run, f"the recovery from {kind}", told)
    [told_of] = found
    return Outage(
        kind=kind, detect_s=told_of.detect_s, downtime_s=told_of.downtime_s, noticed_by=told_of.noticed_by,
        lost_steps=told_of.lost_steps,
    )  # fmt: skip


def until(run: Driven, what: str, test: Callable[[], bool]) -> None:
    run.until(what, test, PATIENCE_S, lambda: None)


if __name__ == "__main__":
    sys.exit(main())
