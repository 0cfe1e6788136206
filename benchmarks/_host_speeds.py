"""One of four hosts at a third of its speed: a step beside what the capacity that is left allows, and plain DDP's.

Hosts are network namespaces with one replica each. Each has a quota of processor time, its control group's, and all of
them together are less than the machine has: so a host has its speed whatever the others do. The ideal is the step of
four equal hosts, by the same system, times 4 / (3 + 1/3). Bits are those of a fleet of one at the same step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._common import Bounds, Table, alone, spread
from benchmarks._fleet import Fleet, FleetStuck
from benchmarks._probe import BITS

if TYPE_CHECKING:
    import argparse

    from outlast.prove.host_namespaces import HostNetwork

__all__ = ["SlowHost", "newest_notice", "no_quotas", "shares_changed", "slow_host_measured", "slow_host_table"]

HOSTS, PORT, LIMIT, SLOWER = 4, 29600, 1.15, 3
SYSTEMS = {"ddp": "DDP, Gloo", "outlast": "outlast"}
PART = 0.8  # of the machine's processors, for all hosts together
PERIOD_US = 20_000
BLOCK, BLOCK_S, RELIEF_BLOCKS = 4, 300.0, 60
WINDOW_S = "2"  # in place of speed_window_s = 10: what is measured comes after it
IDEAL = HOSTS / (HOSTS - 1 + 1 / SLOWER)
V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


@dataclasses.dataclass(kw_only=True, slots=True)
class SlowHost:
    """One system: seconds a step, a figure a round, of equal hosts, and with one of them slowed down. `bits`: whether
    they were those of a fleet of one; `blocks`: of steps, until work had followed speed. None where it is not asked."""

    system: str
    model: str
    microbatches: int
    even_s: list[float] = dataclasses.field(default_factory=list)
    slow_s: list[float] = dataclasses.field(default_factory=list)
    bits: bool | None = None
    blocks: int | None = None


def no_quotas() -> str:
    """Why no host can be slowed down here; "" if it can."""
    if (V1 / "cpu.cfs_quota_us").exists() and os.access(V1, os.W_OK):
        return ""
    controllers = V2 / "cgroup.controllers"
    if controllers.exists() and "cpu" in controllers.read_text().split() and os.access(V2, os.W_OK):
        return ""
    return "no control group with a quota of processor time can be made here"


class Quotas:
    """A control group a host. A context manager: leave it when the processes in them have been killed."""

    def __init__(self) -> None:
        self._v1 = (V1 / "cpu.cfs_quota_us").exists()
        self._groups = [(V1 if self._v1 else V2) / f"outlast-{os.getpid()}-{host}" for host in range(HOSTS)]

    def __enter__(self) -> Quotas:
        if not self._v1:
            (V2 / "cgroup.subtree_control").write_text("+cpu")
        for group in self._groups:
            group.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        pause = threading.Event()
        for group in self._groups:
            for _try in range(100):
                if not (group / "cgroup.procs").read_text():
                    break
                pause.wait(0.05)
            group.rmdir()

    def entering(self, host: int) -> list[str]:
        """What to put before a command to have it, and all that it starts, run under the host's quota."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._groups[host] / "cgroup.procs")]

    def set(self, host: int, processors: float) -> None:
        quota = int(processors * PERIOD_US)
        if self._v1:
            (self._groups[host] / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._groups[host] / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self._groups[host] / "cpu.max").write_text(f"{quota} {PERIOD_US}")


def slow_host_measured(args: argparse.Namespace) -> list[SlowHost]:
    """Rounds of equal hosts, then rounds with the last one slowed down; each system in turn, block by block."""
    import outlast
    from outlast.prove.host_namespaces import HostNetwork

    found = {
        name: SlowHost(system=name, model=args.slow_model, microbatches=args.slow_microbatches) for name in SYSTEMS
    }
    share = PART * len(os.sched_getaffinity(0)) / HOSTS
    with contextlib.ExitStack() as stack:
        quotas = stack.enter_context(Quotas())
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        stack.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
        tempfile.tempdir = str(base)  # what the hosts see of this machine's
        shared = [base, Path(str(outlast.__file__)).parents[1], Path(sys.prefix)]
        net = stack.enter_context(HostNetwork(HOSTS, shared))
        fleets = {name: stack.enter_context(_fleet(name, net, quotas, base, args)) for name in SYSTEMS}
        for fleet in fleets.values():
            fleet.wait_for("first block", lambda f=fleet: f.all_wait(HOSTS), BLOCK_S)  # type: ignore[misc]
        for host in range(HOSTS):
            quotas.set(host, share)
        with alone(args.lock):
            _rounds(args.slow_rounds, fleets, {name: one.even_s for name, one in found.items()})
            since_seq = newest_notice(base / "run")
            quotas.set(HOSTS - 1, share / SLOWER)
            found["outlast"].blocks = _relieved(fleets["outlast"], base / "run", since_seq)
            _rounds(args.slow_rounds, fleets, {name: one.slow_s for name, one in found.items()})
        step = fleets["outlast"].living[0].commits[-1].step  # all wait there, until `_bits` lets them go on
        bits = _bits(fleets["outlast"], HOSTS)
    found["outlast"].bits = bits == _bits_alone(args, step)
    return list(found.values())


def _worker(args: argparse.Namespace) -> list[str]:
    return [f"--model={args.slow_model}", f"--microbatches={args.slow_microbatches}", f"--seed={args.seed}"]


def _fleet(name: str, net: HostNetwork, quotas: Quotas, base: Path, args: argparse.Namespace) -> Fleet:
    commands = [
        [*quotas.entering(host), *net.entering(host), *command]
        for host, command in enumerate((_ddp if name == "ddp" else _own)(net, base, args))
    ]
    told = {"OUTLAST_SECRET": secrets.token_hex(32), "OUTLAST_SPEED_WINDOW_S": WINDOW_S}
    fleet = Fleet(name, commands, {"GLOO_SOCKET_IFNAME": "eth0", **told})
    fleet.set_block(BLOCK)
    return fleet


def _ddp(net: HostNetwork, base: Path, args: argparse.Namespace) -> list[list[str]]:
    where = ["env", f"MASTER_ADDR={net.address(0)}", f"MASTER_PORT={PORT}", f"WORLD_SIZE={HOSTS}"]
    return [
        [*where, f"RANK={rank}", sys.executable, "-m", "benchmarks.peers.ddp", *_worker(args)] for rank in range(HOSTS)
    ]


def _own(net: HostNetwork, base: Path, args: argparse.Namespace) -> list[list[str]]:
    own, endpoint = [sys.executable, "-m", "outlast"], f"{net.address(0)}:{PORT + 1}"
    first = [*own, "run", "--endpoint", endpoint, "--nnodes", str(HOSTS), "--replicas", str(HOSTS), "--slots", "1"]
    first += ["--host", "h0", "--run-dir", str(base / "run")]
    first += [str(Path(__file__).with_name("_outlast_worker.py")), "--bits", *_worker(args)]
    others = [
        [*own, "agent", "--join", endpoint, "--host", f"h{host}", "--slots", "1", "--run-dir", str(base / f"h{host}")]
        for host in range(1, HOSTS)
    ]
    return [first, *others]


def _rounds(num: int, fleets: dict[str, Fleet], into: dict[str, list[float]]) -> None:
    """The first warms up, and is dropped."""
    for turn in range(num + 1):
        for name in fleets if turn % 2 else reversed(fleets):
            step_s = _block(fleets[name])
            if turn:
                into[name].append(step_s)


def _block(fleet: Fleet) -> float:
    """Seconds a step of the slowest member."""
    fleet.release()
    fleet.wait_for("end of a block", lambda: fleet.all_wait(HOSTS), BLOCK_S)
    last = [member.commits[-BLOCK:] for member in fleet.living]
    return max((c[-1].at_s - c[0].at_s) / (len(c) - 1) for c in last)


def _relieved(fleet: Fleet, run_dir: Path, since_seq: int) -> int:
    """Blocks until the slow one has fewer microbatches, and one more. FleetStuck if it never has."""
    for block in range(1, RELIEF_BLOCKS + 1):
        _block(fleet)
        if shares_changed(run_dir, f"h{HOSTS - 1}", since_seq):
            _block(fleet)
            return block + 1
    raise FleetStuck(f"work has not followed speed in {RELIEF_BLOCKS} blocks\n{fleet.tail()}")


def shares_changed(run_dir: Path, host: str, since_seq: int) -> bool:
    """Whether a notice after this one gives the replica of `host` another share of the work."""
    from outlast.core import events as ev
    from outlast.journal import Journal

    with Journal.open_reader(run_dir) as journal:
        started: list[Any] = [entry.event for entry in journal.events(kinds=[ev.AgentStarted])]
    agents = {event.agent for event in started if event.host == host}
    told = [entry.event.text for entry in _notices(run_dir, since_seq)]
    return any(f" on {agent} is slow" in text and "it gets" in text for text in told for agent in agents)


def newest_notice(run_dir: Path) -> int:
    """Its place in the journal, 0 if there is none."""
    return max((entry.seq for entry in _notices(run_dir)), default=0)


def _notices(run_dir: Path, since_seq: int = 0) -> list[Any]:
    from outlast.core import events as ev
    from outlast.journal import Journal

    with Journal.open_reader(run_dir) as journal:
        return list(journal.events(since_seq, kinds=[ev.Notice]))


def _bits(fleet: Fleet, num: int) -> set[float]:
    """Of the state after the newest step, of each member."""
    key = BITS + fleet.living[0].commits[-1].step
    fleet.release()
    fleet.wait_for("their bits", lambda: sum(key in member.numbers for member in fleet.members) == num, BLOCK_S)
    return {member.numbers[key] for member in fleet.members}


def _bits_alone(args: argparse.Namespace, step: int) -> set[float]:
    worker = str(Path(__file__).with_name("_outlast_worker.py"))
    fleet = Fleet("alone", [[sys.executable, worker, "--bits", f"--steps={step + 1}", *_worker(args)]])
    fleet.set_block(step + 1)
    with fleet:
        fleet.wait_for("the last step", lambda: fleet.all_wait(1), BLOCK_S * 2)
        return _bits(fleet, 1)


def slow_host_table(every: list[SlowHost], bounds: Bounds) -> Table:
    """A line a system."""
    rows = []
    for one in every:
        ideal_s = spread(one.even_s).median * IDEAL
        over = spread(step_s / ideal_s for step_s in one.slow_s)
        rows.append([
            SYSTEMS[one.system], spread(one.even_s).show(1e3, 0), spread(one.slow_s).show(1e3, 0),
            f"{ideal_s * 1e3:.0f}", f"{over.median:.2f}", {None: "", True: "yes", False: "NO"}[one.bits],
            "" if one.blocks is None else str(one.blocks * BLOCK),
        ])  # fmt: skip
        if one.system == "outlast":
            bounds.check(
                f"one of {HOSTS} hosts at a third of its speed: step over the ideal", over.median, LIMIT, "times"
            )
            bounds.check("its bits differ from those of a fleet of one", float(not one.bits), 0.0, "")
    return Table(
        title=f"{HOSTS} hosts, one replica each, one of them at a third of its speed",
        columns=["system", "step of equal hosts, ms", "with the slow one, ms", "ideal, ms", "over the ideal, median",
                 "bits of a fleet of one", "steps until then"], rows=rows,
        notes=[f"{every[0].model}, {every[0].microbatches} microbatches a step; quotas of processor time, "
               f"{PERIOD_US / 1000:g} ms; the ideal is the step of equal hosts times {IDEAL:g}",
               f"steps until then: from the slowing down to shares that follow it, with speed_window_s = {WINDOW_S}"],
    )  # fmt: skip
