"""How soon commands that look at a run say something: from the start of the process to its first byte of output.

`--help`, `status`, `why` and `doctor --quick`, over a short journal and over one of a million steps of ten thousand
members. Standard output and standard error are one pipe, as they are one terminal. All commands take turns, so that
none has a calmer machine than the others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks._common import Bounds, Table, alone, environment, options, publish, spread
from benchmarks._long_run import Long, keep_history, write

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Answer", "Asked", "ask", "main"]

_BOUND_S = 0.2
_SHORT = Long(steps=200, members=4, fault_every=50, save_every=20, word_every=50)


class Asked(NamedTuple):
    """A command; over which run, if any; whether it is to be the first to read it."""

    name: str
    args: tuple[str, ...]
    run_dir: Path | None = None
    first: bool = False


class Answer(NamedTuple):
    """Seconds from the start of a process to its first byte and to its end."""

    first_s: float
    whole_s: float


def ask(asked: Asked) -> Answer:
    """Run the command once. RuntimeError if it says nothing, or ends by an error."""
    if asked.first and asked.run_dir is not None:
        (asked.run_dir / "history.kept").unlink(missing_ok=True)
    command = [str(Path(sys.executable).with_name("outlast")), *asked.args]
    command += [str(asked.run_dir)] if asked.run_dir is not None else []
    begin_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0) as process:
        assert process.stdout is not None
        said = process.stdout.read(1)
        first_s = time.perf_counter() - begin_s
        while process.stdout.read(1 << 16):
            pass
        code = process.wait()
    if not said or code not in (0, 4):  # 4: the doctor's, of a host that has something to mend
        raise RuntimeError(f"{' '.join(command)} ended with {code} and {'some' if said else 'no'} output")
    return Answer(first_s, time.perf_counter() - begin_s)


def main(argv: Sequence[str] | None = None) -> int:
    made = options(__doc__)
    made.add_argument("--steps", type=int, default=Long().steps)
    made.add_argument("--members", type=int, default=Long().members)
    made.add_argument("--samples", type=int, default=15, help="times that each command is asked")
    made.add_argument("--first-samples", type=int, default=3, help="times that the long journal is read anew")
    args = made.parse_args(argv)
    machine = environment(args, ("typer", "click", "msgspec"))
    with alone(args.lock), tempfile.TemporaryDirectory() as folder:
        short = write(Path(folder) / "short", _SHORT)
        long = write(Path(folder) / "long", Long(steps=args.steps, members=args.members))
        keep_history(long)
        each = [
            Asked("--help", ("--help",)),
            Asked("doctor --quick", ("doctor", "--quick")),
            *(Asked(f"{name}, short", (name,), short) for name in ("status", "why")),
            *(Asked(f"{name}, long", (name,), long) for name in ("status", "why")),
        ]
        unread = Asked("why, long, read by nobody before", ("why",), long, first=True)
        for asked in each:
            ask(asked)  # from the disk, once
        load_before = os.getloadavg()[0]
        found = [(asked, [ask(asked)]) for asked in each]
        for _ in range(args.samples - 1):
            for asked, answers in found:
                answers.append(ask(asked))
        found.append((unread, [ask(unread) for _ in range(args.first_samples)]))
    return _publish(args, machine, found, load_before)


def _publish(
    args: argparse.Namespace, machine: dict[str, Any], found: Sequence[tuple[Asked, list[Answer]]], load: float
) -> int:
    bounds, rows = Bounds(), []
    for asked, answers in found:
        first = spread(answer.first_s for answer in answers)
        bounds.check(asked.name, first.median, _BOUND_S)
        rows.append([asked.name, first.show(1e3, 0), spread(answer.whole_s for answer in answers).show(1e3, 0)])
    table = Table(
        title=f"Short: {_SHORT.steps} steps of {_SHORT.members} members; long: {args.steps:,} of {args.members:,}",
        columns=["command, journal", "to the first output ms", "to the end ms"], rows=rows,
        notes=[
            f"Load of the machine as it began: {load:.1f}.",
            "Read by nobody before: what is said first is how much there is to read, on standard error.",
        ],
    )  # fmt: skip
    data = [{"command": asked.name, "answers": [each._asdict() for each in answers]} for asked, answers in found]
    return publish("first_output", args, machine, [table], bounds, data)


if __name__ == "__main__":
    sys.exit(main())
