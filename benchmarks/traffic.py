"""Bytes that a rank sends in a step under each rule, counted at its sockets, beside ring all-reduce's.

Seven replicas (the fewest with which every rule tolerates one) over torch.distributed on one host; then one is killed
and the others go on with the same seven rows. What goes through TCP (gradients, Gloo's own) is the kernel's count of
each socket; the members' messages go through Unix sockets here, where what is written is counted. Of each rank the
median step, of the ranks the largest.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._common import Bounds, Table, environment, options, publish
from benchmarks._workload import MODELS, build
from outlast.prove import Driven
from outlast.runtime.settings.fault_points import Fault

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["main"]

WORKER = ["-m", "benchmarks._traffic_worker"]
KILLED_AT, SETTLED, STEPS = 12, 3, 24
RUN_LIMIT_S, LIMIT = 300.0, 1.05
RULES: dict[str, tuple[list[str], float]] = {  # options of outlast run; share of slices that are reduced twice
    "mean": ([], 0.0),
    "trimmed mean": (["--aggregation", "trimmed_mean", "--f", "1"], 0.0),
    "median": (["--aggregation", "median", "--f", "1"], 0.0),
    "mean around median": (["--aggregation", "mean_around_median", "--f", "1"], 0.0),
    "Krum": (["--aggregation", "krum", "--f", "1"], 0.0),
    "Krum, n - f - 1 neighbours": (["--aggregation", "krum_all_honest", "--f", "1"], 0.0),
    "Multi-Krum": (["--aggregation", "multi_krum", "--f", "1"], 0.0),
    "Bulyan": (["--aggregation", "bulyan", "--f", "1"], 0.0),
    "geometric median": (["--aggregation", "geometric_median", "--f", "1"], 0.0),
    "centered clipping": (["--aggregation", "centered_clipping", "--f", "1"], 0.0),
    "MDA": (["--aggregation", "minimum_diameter", "--f", "1"], 0.0),
    "NNM + trimmed mean": (["--aggregation", "trimmed_mean", "--f", "1", "--pre", "nnm"], 0.0),
    "bucketing + median": (["--aggregation", "median", "--f", "1", "--pre", "bucketing"], 0.0),
    "clipping + trimmed mean": (["--aggregation", "trimmed_mean", "--f", "1", "--pre", "clip"], 0.0),
    "trimmed mean, a tenth checked": (["--aggregation", "trimmed_mean", "--f", "1"], 0.1),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Bytes a step that the rank with most of them sent, in a view of so many members."""

    rule: str
    members: int
    tcp: float
    local: float
    ring: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--model", choices=[name for name in MODELS if name != "none"], default="3.2M")
    parser.add_argument("--replicas", type=int, default=7)
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    args = parser.parse_args(argv)
    machine, bounds = environment(args), Bounds()
    every = [sent for rule in args.rules for sent in measure(rule, args)]
    for sent in every:
        checked = RULES[sent.rule][1]
        if sent.members == args.replicas:
            bounds.check(
                f"{sent.rule}, {sent.members} members: sent over ring all-reduce",
                (sent.tcp + sent.local) / sent.ring, LIMIT + checked, "times",
            )  # fmt: skip
    rows = [
        [
            s.rule, str(s.members), f"{s.tcp / 1e6:.3f}", f"{s.local / 1e3:.1f}", f"{s.ring / 1e6:.3f}",
            f"{(s.tcp + s.local) / s.ring:.3f}",
        ]
        for s in every
    ]  # fmt: skip
    table = Table(
        title=f"{args.model} parameters, {args.replicas} rows",
        columns=["rule", "members", "TCP MB", "messages KB", "ring all-reduce MB", "over the ring"], rows=rows,
        notes=[
            "a reduced slice that is checked is sent to a second member as well: a share of 0.1 adds 0.1 of the half",
            f"with {args.replicas - 1} members one has two rows' sums to send: (1 + 2) / 2 of the ring",
        ],
    )  # fmt: skip
    return publish("traffic", args, machine, [table], bounds, [dataclasses.asdict(s) for s in every])


def measure(rule: str, args: argparse.Namespace) -> list[Sent]:
    """One run: with all members, and after one is gone."""
    chosen, checked = RULES[rule]
    print(f"{rule}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="traffic-") as scratch:
        out, config = Path(scratch) / "out", Path(scratch) / "run.toml"
        out.mkdir()
        config.write_text('[run]\nexchange = "c10d"\nmax_restarts = 0\ntolerated = 0\n', encoding="utf-8")
        given = ["--replicas", str(args.replicas), "--spares", "0", "--config", str(config), *chosen]
        script = [*WORKER, "--model", args.model, "--microbatches", str(args.replicas), "--steps", str(STEPS)]
        script += ["--seed", str(args.seed), "--check-reducers", str(checked), "--out", str(out)]
        death = Fault(replica=f"r{args.replicas - 1}", phase="backward", step=KILLED_AT, action="SIGKILL")
        with Driven(Path(scratch) / "run", given, script, [death]) as driven:
            code = driven.finish(RUN_LIMIT_S, lambda: None)
            if code:
                raise SystemExit(f"{rule}: the run ended with {code} after step {driven.step}")
        ranks = [_cumulative(file) for file in sorted(out.iterdir())]
    size = sum(p.numel() * p.element_size() for p in build(args.model, args.seed)[0].parameters())
    found = []
    whole = args.replicas
    for members, first, last in ((whole, SETTLED, KILLED_AT - 1), (whole - 1, KILLED_AT + SETTLED, STEPS - 1)):
        usual = [_usual(rank, first, last) for rank in ranks if last in rank]
        tcp, local = max(usual)
        found.append(Sent(rule=rule, members=members, tcp=tcp, local=local, ring=2 * (members - 1) / members * size))
    return found


def _cumulative(file: Path) -> dict[int, tuple[int, int]]:
    """By step: what had been sent when it was over."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {line["step"]: (line["tcp"], line["local"]) for line in lines}


def _usual(rank: dict[int, tuple[int, int]], first: int, last: int) -> tuple[float, float]:
    """The median of what was sent in each of the steps first+1 to last."""
    each = [tuple(b - a for a, b in zip(rank[s - 1], rank[s], strict=True)) for s in range(first + 1, last + 1)]
    return statistics.median(e[0] for e in each), statistics.median(e[1] for e in each)


if __name__ == "__main__":
    sys.exit(main())
