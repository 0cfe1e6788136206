"""What `status` and `why` share: from what was typed to a run's events, and JSON out.

No command itself. Imports nothing heavy at module level.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import msgspec

    from outlast.core.events import AnyEvent

__all__ = ["DEFAULT_RUNS", "print_json", "read_run"]

DEFAULT_RUNS = "outlast-runs"


def read_run(path: Path) -> tuple[list[AnyEvent], bool | None, Path]:
    """(all events, whether a process holds the run, the run directory). Says on standard error which run it took.

    Raises ConfigError where there is no run, EnvironmentFault where it cannot be read.
    """
    from outlast import journal, observe

    found = observe.find_run(path)
    if found.note:
        print(f"outlast: {found.note}", file=sys.stderr)
    with journal.Journal.open_reader(found.run_dir) as reader:
        events = [entry.event for entry in reader.events()]
    return events, journal.is_held(found.run_dir), found.run_dir


def print_json(record: msgspec.Struct, *, run_dir: Path, **more: object) -> None:
    """One JSON object on standard output: the record's fields, `run_dir`, and what else is given."""
    import msgspec

    fields = {"run_dir": str(run_dir.resolve()), **msgspec.structs.asdict(record), **more}
    print(msgspec.json.format(msgspec.json.encode(fields), indent=2).decode())
