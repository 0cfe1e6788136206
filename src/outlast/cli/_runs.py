"""What `status` and `why` share: from what was typed to a run's journal, and JSON out.

No command itself. Imports nothing heavy at module level.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import msgspec

    from outlast.journal import Journal

__all__ = ["DEFAULT_RUNS", "note", "open_run", "print_json"]

DEFAULT_RUNS = "outlast-runs"


@contextlib.contextmanager
def open_run(path: Path) -> Iterator[tuple[Journal, Path]]:
    """(the journal, the run directory) of what was typed. Says on standard error which run it took.

    Raises ConfigError where there is no run, EnvironmentFault where it cannot be read.
    """
    from outlast import journal, observe

    found = observe.find_run(path)
    if found.note:
        note(found.note)
    with journal.Journal.open_reader(found.run_dir) as reader:
        yield reader, found.run_dir


def note(text: str) -> None:
    """One line for people, on standard error, at once."""
    print(f"outlast: {text}", file=sys.stderr, flush=True)


def print_json(record: msgspec.Struct, *, run_dir: Path, **more: object) -> None:
    """One JSON object on standard output: the record's fields, `run_dir`, and what else is given."""
    import msgspec

    fields = {"run_dir": str(run_dir.resolve()), **msgspec.structs.asdict(record), **more}
    print(msgspec.json.format(msgspec.json.encode(fields), indent=2).decode())
