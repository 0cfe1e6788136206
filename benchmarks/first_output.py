"""How soon commands that look at a run say something: from the start of the process to its first byte of output.

`--help`, `status`, `why` and `doctor --quick`, over a short journal and over one of a million steps of ten thousand
members. Standard output and standard error are one pipe, as they are one terminal. All commands take turns, so that
none has a calmer machine than the others. Where others use the machine, the quickest quarter of each command's times
says how soon it is on a calm one, and that is held against the bound; beside it stands the processor time that the
command had used by then, which others lengthen little. Python may keep what it compiles, as pip has it do where it
installs a package, whatever the environment of the benchmark says.
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
    """Seconds from the start of a process to its first byte and to its end; `used_s`: of a processor, by the first."""

    first_s: float
    whole_s: float
    used_s: float


def ask(asked: Asked) -> Answer:
    """Run the command once. RuntimeError if it says nothing, or ends by an error."""
    if asked.first and asked.run_dir is not None:
        (asked.run_dir / "history.kept").unlink(missing_ok=True)
    command = [str(Path(sys.executable).with_name("outlast")), *asked.args]
    command += [str(asked.run_dir)] if asked.run_dir is not None else []
    begin_s = time.perf_counter()
    compiled = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0, env=compiled
    ) as process:
        assert process.stdout is not None
        said = process.stdout.read(1)
        first_s = time.perf_counter() - begin_s
        used_s = _used_s(process.pid)
        while process.stdout.read(1 << 16):
            pass
        code = process.wait()
    if not said or code not in (0, 4):  # 4: the doctor's, of a host that has something to mend
        raise RuntimeError(f"{' '.join(command)} ended with {code} and {'some' if said else 'no'} output")
    return Answer(first_s, time.perf_counter() - begin_s, used_s)


def _used_s(pid: int) -> float:
    """Seconds of a processor that a process has used, all of its threads; what it had, if it has just ended."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
    except (OSError, IndexError):
        return float("nan")


def _quickest(answers: Sequence[Answer]) -> list[float]:
    """The quickest quarter of the times to the first byte, in seconds."""
    return sorted(answer.first_s for answer in answers)[: max(1, len(answers) // 4)]


def main(argv: Sequence[str] | None = None) -> int:
    made = options(__doc__)
    made.add_argument("--steps", type=int, default=Long().steps)
    made.add_argument("--members", type=int, default=Long().members)
    made.add_argument("--samples", type=int, default=20, help="times that each command is asked")
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
        calm, used = spread(_quickest(answers)), [a.used_s for a in answers if a.used_s == a.used_s]
        bounds.check(asked.name, calm.median, _BOUND_S)
        rows.append([
            asked.name, calm.show(1e3, 0), spread(a.first_s for a in answers).show(1e3, 0),
            spread(used).show(1e3, 0) if used else "-", spread(a.whole_s for a in answers).show(1e3, 0),
        ])  # fmt: skip
    table = Table(
        title=f"Short: {_SHORT.steps} steps of {_SHORT.members} members; long: {args.steps:,} of {args.members:,}",
        columns=[
            "command, journal", "to the first output, quickest quarter ms", "all ms", "processor by then ms",
            "to the end ms",
        ],
        rows=rows,
        notes=[
            f"Load of the machine as it began: {load:.1f}; as it ended: {os.getloadavg()[0]:.1f}.",
            "The bounds are held against the quickest quarter.",
            "Read by nobody before: what is said first is how much there is to read, on standard error.",
        ],
    )  # fmt: skip
    data = [{"command": asked.name, "answers": [each._asdict() for each in answers]} for asked, answers in found]
    return publish("first_output", args, machine, [table], bounds, data)


if __name__ == "__main__":
    sys.exit(main())
