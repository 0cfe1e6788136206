"""What all benchmarks share: the block that says what was measured on what, statistics, tables, bounds.

Invariant: a figure never travels without its machine, versions, date and seed. It does not measure anything itself.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import fcntl
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["RESULTS", "ROOT", "Bounds", "Spread", "Table", "alone", "environment", "options", "publish", "spread"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_name("RESULTS.md")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Median, extremes and quartiles of `num` samples, in the samples' unit."""

    num: int
    median: float
    low: float
    high: float
    quartile1: float
    quartile3: float

    def show(self, scale: float = 1.0, digits: int = 3) -> str:
        """`median (low to high, n = num)`."""
        low, mid, high = (f"{value * scale:.{digits}f}" for value in (self.low, self.median, self.high))
        return f"{mid} ({low} to {high}, n = {self.num})" if self.num > 1 else f"{mid} (n = 1)"


def spread(values: Iterable[float]) -> Spread:
    """Raises ValueError when there are no samples."""
    data = sorted(values)
    if not data:
        raise ValueError("no samples to summarise")
    quartiles = statistics.quantiles(data, n=4, method="inclusive") if len(data) > 1 else data * 3
    return Spread(
        num=len(data), median=statistics.median(data), low=data[0], high=data[-1],
        quartile1=quartiles[0], quartile3=quartiles[2],
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One table of results. Cells are already text; `notes` stand under it, one line each."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", _row(self.columns), _row(["---"] * len(self.columns))]
        lines += [_row(row) for row in self.rows]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes), *([""] if self.notes else [])])


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


class Bounds:
    """Limits that a benchmark claims. They are always shown, and fail the command only with `--assert`."""

    def __init__(self) -> None:
        self.checks: list[dict[str, Any]] = []

    def check(self, what: str, value: float, limit: float, unit: str = "s") -> None:
        """Holds if `value <= limit`."""
        self.checks.append({"what": what, "value": value, "limit": limit, "unit": unit, "holds": value <= limit})

    @property
    def hold(self) -> bool:
        return all(check["holds"] for check in self.checks)

    def table(self, title: str) -> Table:
        rows = [
            [c["what"], f"{c['value']:.3f} {c['unit']}", f"≤ {c['limit']:g} {c['unit']}", "yes" if c["holds"] else "NO"]
            for c in self.checks
        ]
        return Table(title=title, columns=["bound", "measured", "limit", "holds"], rows=rows)


def options(what: str | None, *, seed: int = 0) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark takes: --seed, --out, --record, --assert."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=int, default=seed, help="fixes every random choice that the benchmark makes")
    parser.add_argument("--lock", type=Path, help="hold this lock file while timing: one measurement at a time")
    parser.add_argument("--out", type=Path, help="write everything measured to this JSON file")
    parser.add_argument("--record", action="store_true", help=f"replace this benchmark's section in {RESULTS.name}")
    parser.add_argument("--assert", dest="strict", action="store_true", help="exit 1 if a bound does not hold")
    return parser


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """Hold `lock` exclusively, so that commands which share it by `flock -s` stand back; without one, nothing."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def environment(args: argparse.Namespace, packages: Sequence[str] = ("torch", "numpy")) -> dict[str, Any]:
    """Machine, versions, commit, date, and the options in force."""
    chosen = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    return {
        "cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(), "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages}, "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "options": chosen,
    }  # fmt: skip


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _commit() -> str:
    ask = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def publish(
    name: str, args: argparse.Namespace, machine: dict[str, Any], tables: Sequence[Table], bounds: Bounds, data: Any
) -> int:
    """Print the tables; write --out; replace the section in RESULTS.md with --record. Returns the exit status."""
    shown = [*tables, bounds.table("Bounds")] if bounds.checks else list(tables)
    text = "\n".join([_describe(machine), "", *(table.markdown() for table in shown)])
    print(text)
    if args.out:
        results = {"benchmark": name, "environment": machine, "bounds": bounds.checks, "data": data}
        args.out.write_text(json.dumps(results, indent=1, default=_plain) + "\n", encoding="utf-8")
    if args.record:
        _replace_section(RESULTS, name, text)
    if args.strict and not bounds.hold:
        print(f"{name}: a bound does not hold", file=sys.stderr)
        return 1
    return 0


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)


def _describe(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"{machine['date'][:10]}, {machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, Linux "
        f"{machine['kernel']}, Python {machine['python']}, {versions}, commit {machine['commit']}, "
        f"seed {machine['options']['seed']}."
    )


def _replace_section(path: Path, name: str, text: str) -> None:
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    page = path.read_text(encoding="utf-8") if path.exists() else "# Results\n\nOnly what was measured, and on what.\n"
    section = f"{start}\n## {name}\n\n{text.rstrip()}\n{end}"
    before, found, rest = page.partition(start)
    after = rest.partition(end)[2] if found else "\n"
    path.write_text((before.rstrip() + "\n\n" if not found else before) + section + after, encoding="utf-8")
