"""A step of replicas on several hosts, and what crosses each host's cable in it, beside plain DDP's over Gloo.

Hosts are network namespaces on this machine, with two replicas each; their cables are as fast as they can be, or let
through so much a second. All systems are up at once and run block by block in turn, so what the machine does to one it
does to the other. Bytes are the kernel's count of the cable, in both directions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._common import Bounds, Table, alone, spread
from benchmarks._fleet import Fleet
from benchmarks._workload import build

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from outlast.prove.host_namespaces import HostNetwork

__all__ = ["HostSteps", "steps_measured", "steps_table"]

EACH, PORT, LIMIT = 2, 29500, 1.05
SYSTEMS = {"ddp": "DDP, Gloo", "c10d": "outlast, one level", "hosts": "outlast, two levels"}
BLOCK, START_S, BLOCK_S = 8, 240.0, 240.0


@dataclasses.dataclass(kw_only=True, slots=True)
class HostSteps:
    """One system under one rate. A figure a round: seconds a step, and bytes a step that the busiest host sent."""

    system: str
    model: str
    rate: str
    hosts: int
    ring: float
    step_s: list[float] = dataclasses.field(default_factory=list)
    sent: list[float] = dataclasses.field(default_factory=list)


def steps_measured(args: argparse.Namespace) -> list[HostSteps]:
    """All systems of a model, under each rate."""
    import outlast
    from outlast.prove.host_namespaces import HostNetwork

    package, found = Path(str(outlast.__file__)).parents[1], list[HostSteps]()
    for model in args.models:
        with contextlib.ExitStack() as stack:
            base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            stack.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
            tempfile.tempdir = str(base)  # what the hosts see of this machine's
            net = stack.enter_context(HostNetwork(args.hosts, [base, package, Path(sys.prefix)]))
            fleets = {name: stack.enter_context(_fleet(name, net, base, model, args)) for name in SYSTEMS}
            for fleet in fleets.values():
                fleet.wait_for("first block", lambda f=fleet: f.all_wait(EACH * args.hosts), START_S)  # type: ignore[misc]
            for rate in args.rates:
                found += _under(rate, net, fleets, model, args)
    return found


def _fleet(name: str, net: HostNetwork, base: Path, model: str, args: argparse.Namespace) -> Fleet:
    worker = [f"--model={model}", f"--microbatches={args.microbatches}", f"--seed={args.seed}"]
    commands = _ddp(net, worker) if name == "ddp" else _own(name, net, base, worker)
    fleet = Fleet(name, commands, {"GLOO_SOCKET_IFNAME": "eth0", "OUTLAST_SECRET": secrets.token_hex(32)})
    fleet.set_block(BLOCK)
    return fleet


def _ddp(net: HostNetwork, worker: Sequence[str]) -> list[list[str]]:
    where = ["env", f"MASTER_ADDR={net.address(0)}", f"MASTER_PORT={PORT}", f"WORLD_SIZE={EACH * net.num}"]
    return [
        [*net.entering(rank // EACH), *where, f"RANK={rank}", sys.executable, "-m", "benchmarks.peers.ddp", *worker]
        for rank in range(EACH * net.num)
    ]


def _own(exchange: str, net: HostNetwork, base: Path, worker: Sequence[str]) -> list[list[str]]:
    own = [sys.executable, "-m", "outlast"]
    endpoint = f"{net.address(0)}:{PORT + 1 + list(SYSTEMS).index(exchange)}"
    shape = ["--endpoint", endpoint, "--nnodes", str(net.num), "--replicas", str(EACH * net.num), "--spares", "0"]
    first = [*own, "run", *shape, "--host", "h0", "--slots", str(EACH), "--exchange", exchange]
    first += ["--run-dir", str(base / exchange), str(Path(__file__).with_name("_outlast_worker.py")), *worker]
    others = [
        [*own, "agent", "--join", endpoint, "--host", f"h{host}", "--slots", str(EACH),
         "--run-dir", str(base / f"{exchange}{host}")]
        for host in range(1, net.num)
    ]  # fmt: skip
    return [[*net.entering(host), *command] for host, command in enumerate([first, *others])]


def _under(
    rate: str, net: HostNetwork, fleets: dict[str, Fleet], model: str, args: argparse.Namespace
) -> list[HostSteps]:
    """Rounds of blocks; the first warms up, and is dropped."""
    size = sum(p.numel() * p.element_size() for p in build(model, args.seed)[0].parameters())
    ring = 2 * (net.num - 1) / net.num * size
    found = {name: HostSteps(system=name, model=model, rate=rate, hosts=net.num, ring=ring) for name in fleets}
    for host in range(net.num) if rate else ():
        net.shape(host, "rate", rate, "burst", "256kb", "latency", "100ms")
    with alone(args.lock):
        for turn in range(args.rounds + 1):
            for name in fleets if turn % 2 else reversed(fleets):
                step_s, sent = _block(fleets[name], net)
                if turn:
                    found[name].step_s.append(step_s)
                    found[name].sent.append(sent)
    for host in range(net.num) if rate else ():
        net.unshape(host)
    return list(found.values())


def _block(fleet: Fleet, net: HostNetwork) -> tuple[float, float]:
    """Seconds a step of the slowest member, and bytes a step that the busiest host sent."""
    before = [net.carried(host)[0] for host in range(net.num)]
    fleet.release()
    fleet.wait_for("end of a block", lambda: fleet.all_wait(EACH * net.num), BLOCK_S)
    sent = max(net.carried(host)[0] - was for host, was in enumerate(before))
    last = [member.commits[-BLOCK:] for member in fleet.living]
    return max((c[-1].at_s - c[0].at_s) / (len(c) - 1) for c in last), sent / BLOCK


def steps_table(every: Sequence[HostSteps], bounds: Bounds) -> Table:
    """A line a system and rate; the bytes of two levels are held against the ring's."""
    rows = []
    for one in every:
        plain = next(s for s in every if (s.system, s.model, s.rate) == ("ddp", one.model, one.rate))
        over = spread(mine / other for mine, other in zip(one.step_s, plain.step_s, strict=True))
        sent = spread(one.sent).median
        rows.append([
            SYSTEMS[one.system], one.model, one.rate or "as fast as it can be", spread(one.step_s).show(1e3, 1),
            f"{over.median:.2f}", f"{over.quartile1:.2f} to {over.quartile3:.2f}", f"{sent / 1e6:.2f}",
            f"{sent / one.ring:.3f}",
        ])  # fmt: skip
        if one.system == "hosts":
            what = f"{one.model}, {one.hosts} hosts{one.rate and ' at '}{one.rate}: bytes a host sent"
            bounds.check(f"{what} over a ring of hosts", sent / one.ring, LIMIT, "times")
            bounds.check(f"{what.partition(':')[0]}: step over DDP's", over.median, 1.0, "times")
    return Table(
        title=f"{every[0].hosts} hosts, {EACH} replicas each: a step, and what a host sends in it",
        columns=["system", "parameters", "cable", "step ms", "over DDP, median", "middle half", "MB sent",
                 "over a ring of hosts"], rows=rows,
        notes=["bytes are counted at the cable: headers of packets, acknowledgements and outlast's own words included"],
    )  # fmt: skip
